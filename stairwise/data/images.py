"""Load images by name: datasets shipped with scikit-learn, downloaded datasets, or your own files."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, RunWarning, one_of
from stairwise.data import cifar10, stl10
from stairwise.files import regular

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size.

    Attributes:
        name: name of the source.
        pixels: (N, H, W, channels); uint8, or floats, which are not rescaled.
        labels: (N,), if there are any.
        training: the first `training` images are the dataset's own training set; None if it has no split.
    """

    name: str
    pixels: NDArray
    labels: NDArray | None = None
    training: int | None = None

    def take(self, rows: NDArray) -> "Images":
        return Images(self.name, self.pixels[rows], None if self.labels is None else self.labels[rows])


@dataclass(frozen=True)
class Dataset:
    """A named dataset: description, loader and location."""

    about: str
    load: Callable[[Path], Images]
    folder: str | None = None  # below the data root, if it has to be downloaded
    extra: str | None = None  # a file that it needs but that may be missing from its folder


def data_root() -> Path:
    """$STAIRWISE_DATA, or `stairwise` in the user's cache folder."""
    named = os.environ.get("STAIRWISE_DATA")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stairwise"


def load(source: str, root: Path | None = None, size: int = 64) -> Images:
    """Load images by name: `photos`, `digits`, `cifar10`, `stl10`, a folder of images, or `array:FILE.npy`.

    Arguments:
        source: name of the dataset; `images:FOLDER` for a folder that has the name of a dataset.
        root: folder of downloaded datasets; default `data_root()`.
        size: side in pixels of the square to which images of a folder are resized and cropped.

    Example:
        >>> load("photos").pixels.shape
        (520, 32, 32, 3)
    """
    kind, rest = _kind(source)
    if kind == "images" and rest:
        return _folder(Path(rest), size)
    if kind == "array" and rest:
        return _array(Path(rest))
    one_of(source, "dataset", [*DATASETS, "FOLDER", "images:FOLDER", "array:FILE.npy"])
    return DATASETS[source].load(root or data_root())


def _kind(source: str) -> tuple[str, str]:
    """("images", folder), ("array", file), or the name of a dataset and nothing."""
    if source and source not in DATASETS and Path(source).is_dir():
        return "images", source
    kind, _, rest = source.partition(":")
    return kind, rest


def fingerprint(source: str) -> str:
    """A string that changes when the user's files behind `source` change; empty for fixed datasets."""
    kind, rest = _kind(source)
    if kind not in {"array", "images"} or not Path(rest).exists():
        return ""
    files = [Path(rest)] if kind == "array" else [p for p in Path(rest).rglob("*") if p.is_file()]
    stats = [p.stat() for p in files]
    newest = max((s.st_mtime_ns for s in stats), default=0)
    return f"{len(files)} files, {sum(s.st_size for s in stats)} bytes, {newest}"


def _photos(_: Path, patch: int = 32) -> Images:
    """All 520 tiles of 32 × 32 of scikit-learn's two photographs; the label is the photograph."""
    from sklearn.datasets import load_sample_images

    tiles = []
    for photo in load_sample_images().images:
        rows, columns = photo.shape[0] // patch, photo.shape[1] // patch
        grid = photo[: rows * patch, : columns * patch].reshape(rows, patch, columns, patch, 3)
        tiles.append(grid.swapaxes(1, 2).reshape(-1, patch, patch, 3))
    return Images("photos", np.concatenate(tiles), np.repeat(np.arange(len(tiles)), [len(group) for group in tiles]))


def _digits(_: Path) -> Images:
    """scikit-learn's 1797 handwritten digits, 8 × 8, with values 0 … 16 scaled to uint8."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return Images("digits", (digits.images[..., None] * 15.9375).astype(np.uint8), digits.target.astype(np.uint8))


def _cifar10(root: Path) -> Images:
    return Images("cifar10", *cifar10.read(root / "cifar10"), training=50_000)


def _stl10(root: Path) -> Images:
    return Images("stl10", *stl10.read(root / "stl10"), training=stl10.TRAIN)


def _stl10_full(root: Path) -> Images:
    return Images("stl10-full", *stl10.read_full(root / "stl10"), training=stl10.TRAIN)


DATASETS = {
    "photos": Dataset("520 tiles of 32×32 of scikit-learn's two photographs; no download", _photos),
    "digits": Dataset("scikit-learn's 1,797 handwritten digits of 8×8, labelled; no download", _digits),
    "cifar10": Dataset("CIFAR-10, 50,000 training and 10,000 test images of 32×32", _cifar10, "cifar10"),
    "stl10": Dataset("STL-10, 5,000 training and 8,000 test images of 96×96", _stl10, "stl10"),
    "stl10-full": Dataset("STL-10 with 100,000 unlabelled images (3.1 GB)", _stl10_full, "stl10", "unlabeled_X.bin"),
}


def _folder(folder: Path, size: int) -> Images:
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not folder.is_dir():
        raise InputError("images:FOLDER", "must name a folder", folder)
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not paths:
        raise InputError("images:FOLDER", "must hold images", folder, f"known endings: {' '.join(sorted(SUFFIXES))}")
    pixels = np.empty((len(paths), size, size, 3), np.uint8)
    read, bad = 0, []
    for path in paths:
        try:
            with Image.open(path) as image:
                pixels[read] = np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS))
            read += 1
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            bad.append(f"{path} cannot be read ({error})")
    if not read:
        raise InputError("images:FOLDER", "must hold readable images", f"{len(bad)} files", f"the first: {bad[0]}")
    if bad:
        note = f"{len(bad)} of {len(paths)} images skipped, the first because {bad[0]}"
        warnings.warn(note, RunWarning, stacklevel=3)
    return Images(f"images:{folder.name}", pixels[:read])


def _array(path: Path) -> Images:
    try:
        pixels = np.load(regular(path, "array:FILE"), mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError("array:FILE", "must exist", path) from None
    except InputError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise InputError("array:FILE", "must be a whole .npy file without objects", path, str(error)) from error
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 4 or 0 in pixels.shape or pixels.dtype.kind not in "uif":
        raise InputError(
            "array:FILE",
            "must be a .npy of numbers, shape (images, height, width, channels)",
            f"{getattr(pixels, 'dtype', '')} {getattr(pixels, 'shape', type(pixels).__name__)}",
        )
    return Images(f"array:{path.name}", pixels)
