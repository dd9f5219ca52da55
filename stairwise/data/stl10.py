"""STL-10, binary version: the labelled images, or all images including the unlabelled ones."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError
from stairwise.data.download import Whole, check_file, extract, fetch
from stairwise.progress import Progress, silent

URL = "https://cs.stanford.edu/~acoates/stl10/stl10_binary.tar.gz"
ARCHIVE = Whole(2_640_397_119, "91f7769df0f17e558f3565bffb0c7dfb")
PIXELS = 3 * 96 * 96
TRAIN, TEST, UNLABELLED = 5_000, 8_000, 100_000
FILES = {
    "train_X.bin": Whole(TRAIN * PIXELS, "918c2871b30a85fa023e0c44e0bee87f"),
    "train_y.bin": Whole(TRAIN, "5a34089d4802c674881badbb80307741"),
    "test_X.bin": Whole(TEST * PIXELS, "7f263ba9f9e0b06b93213547f721ac82"),
    "test_y.bin": Whole(TEST, "36f9794fa4beb8a2c72628de14fa638e"),
    "unlabeled_X.bin": Whole(UNLABELLED * PIXELS, "5242ba1fed5e4be9e1e742405eb56ca4"),
}
NEEDED = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin")


def read(folder: Path) -> tuple[NDArray, NDArray]:
    """The 13,000 labelled images (N, 96, 96, 3) uint8, training set first, and their labels 0 … 9 (N,)."""
    for name in NEEDED:
        if not (folder / name).is_file() or (folder / name).stat().st_size != FILES[name].size:
            problem = check_file(folder / name, FILES[name])
            raise InputError("stl10", "must be fetched first", f"{name} {problem}", "stairwise data get stl10")
    pixels = np.concatenate([np.fromfile(folder / f"{part}_X.bin", np.uint8) for part in ("train", "test")])
    labels = np.concatenate([np.fromfile(folder / f"{part}_y.bin", np.uint8) for part in ("train", "test")])
    # the file stores each channel column by column
    return pixels.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1), labels - 1


def read_full(folder: Path) -> tuple[NDArray, NDArray]:
    """All 113,000 images in the order training set, unlabelled (label 255), test set."""
    pixels, labels = read(folder)
    name = "unlabeled_X.bin"
    problem = check_file(folder / name, FILES[name]) if not (folder / name).is_file() else ""
    if problem or (folder / name).stat().st_size != FILES[name].size:
        raise InputError("stl10-full", "must be fetched first", f"{name} {problem}", "stairwise data get stl10")
    more = np.fromfile(folder / name, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
    whole = np.concatenate([pixels[:TRAIN], more, pixels[TRAIN:]])
    return whole, np.concatenate([labels[:TRAIN], np.full(len(more), 255, np.uint8), labels[TRAIN:]])


def problems(folder: Path) -> list[str]:
    """Files that are missing or damaged. The unlabelled images may be missing."""
    checked = ((name, check_file(folder / name, whole)) for name, whole in FILES.items())
    return [f"{name} {why}" for name, why in checked if why and (name in NEEDED or why != "missing")]


def get(folder: Path, progress: Progress = silent, url: str = URL) -> None:
    """Download the official archive (2.6 GB) and extract its five binary files (3.1 GB)."""
    archive = folder / "stl10_binary.tar.gz"
    fetch(url, archive, ARCHIVE, progress)
    extract(archive, {f"stl10_binary/{name}": (folder / name, whole) for name, whole in FILES.items()})
    archive.unlink()
