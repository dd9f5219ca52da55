"""Images of the race: read from files, and offered to recipes under names that say what may be looked at.

    python -m benchmarks.race.images FILE.npz … --out ALL.npz      join files into one that is read quickly
    python -m benchmarks.race.images STL.npz --side 32 --out SMALL.npz      and make its images smaller

A file is .npz: either `pixels` (N, H, W, 3), `labels` and, optionally, `split` (0 train, 1 test) and `index` (position
in its split); or packed: `blob` holds image files one after the other from `offsets`, each of `counts` images in
`tiles` (rows, columns) of side `size`. Files that are joined need `index`.
"""

import argparse
import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stairwise.checks import InputError
from stairwise.data.images import DATASETS, Dataset, Images, load

HELD = 0.1  # share of the training images, the last ones, on which settings are judged


@dataclass(frozen=True, eq=False)
class RaceImages:
    """Training and test images, in the order of the dataset; `elsewhere`: images of another dataset, to probe too."""

    name: str
    pixels: np.ndarray
    labels: np.ndarray
    training: int
    elsewhere: "RaceImages | None" = None

    def offer(self) -> None:
        """Make recipes know `race-tune` (training images only; the last tenth is held out) and `race-final` (all)."""
        kept = self.training - round(HELD * self.training)
        pixels, labels = self.pixels[: self.training], self.labels[: self.training]
        tune = Images("race-tune", pixels, labels, training=kept)
        final = Images("race-final", self.pixels, self.labels, training=self.training)
        DATASETS["race-tune"] = Dataset("training images, the last tenth held out", lambda _: tune)
        DATASETS["race-final"] = Dataset("all images", lambda _: final)

    def fewer(self, most: int) -> "RaceImages":
        """At most so many images of each split, the first; 0: all."""
        if not most:
            return self
        kept = np.r_[: min(most, self.training), self.training : min(self.training + most, len(self.labels))]
        return replace(self, pixels=self.pixels[kept], labels=self.labels[kept], training=min(most, self.training))

    def smaller(self, side: int) -> "RaceImages":
        """Images of this side: means over squares of pixels, so the present side must be a multiple of it."""
        N, present = self.pixels.shape[:2]
        if side < 1 or present % side or self.pixels.shape[2] != present:
            raise InputError("--side", f"must divide {' × '.join(map(str, self.pixels.shape[1:3]))} pixels", side)
        squares = self.pixels.reshape(N, side, present // side, side, present // side, 3)
        means = np.concatenate([some.mean(axis=(2, 4)) for some in np.array_split(squares, max(1, N // 1000))])
        return replace(self, pixels=np.rint(means).astype(np.uint8))

    def save(self, path: Path) -> Path:
        """Write one file that `read_images` reads quickly."""
        split = np.arange(len(self.labels)) >= self.training
        np.savez(path, pixels=self.pixels, labels=self.labels, split=split)
        return path


def named_images(name: str, most: int = 0) -> RaceImages:
    """A dataset of the package that has labels and a test set. `most`: of each split, the first."""
    images = load(name)
    if images.labels is None or not images.training:
        raise InputError("--data", "must have labels and a test set", name, "use cifar10 or stl10")
    return RaceImages(name, images.pixels, images.labels, images.training).fewer(most)


def read_images(paths: list[Path], name: str = "", most: int = 0) -> RaceImages:
    """Join the images of several files; the same image in two files counts once. `most`: of each split, the first."""
    parts = [_read(path, alone=len(paths) == 1) for path in paths]
    pixels, labels, split, index = (np.concatenate([part[i] for part in parts]) for i in range(4))
    places = np.stack([split, index], axis=1)
    _, first, again = np.unique(places, axis=0, return_index=True, return_inverse=True)  # training first, in order
    other = np.flatnonzero(labels != labels[first[again.ravel()]])
    if len(other):
        which = f"index {index[other[0]]} of split {split[other[0]]}"
        raise InputError("--data-file", "must hold one image per split and index", f"two labels for {which}")
    training = int((split[first] == 0).sum())
    if training == 0 or training == len(first):
        raise InputError("--data-file", "must hold training and test images", [p.name for p in paths])
    return RaceImages(name or paths[0].stem, pixels[first], labels[first], training).fewer(most)


def _read(path: Path, alone: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, labels, split and index of one file; without an index, images are in order, which needs a single file."""
    try:
        stored = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InputError("--data-file", "must exist", path) from None
    if "index" not in stored and not alone:
        remedy = "add it, or join the images into one file"
        raise InputError("--data-file", "must hold `index`, because several files are joined", path.name, remedy)
    pixels = stored["pixels"] if "pixels" in stored else _unpacked(stored)
    labels = np.asarray(stored["labels"], dtype=np.int64)
    split = np.asarray(stored["split"], dtype=np.int64) if "split" in stored else np.zeros(len(labels), np.int64)
    index = np.asarray(stored["index"], dtype=np.int64) if "index" in stored else np.arange(len(labels))
    return pixels, labels, split, index


def _unpacked(stored: np.lib.npyio.NpzFile) -> np.ndarray:
    from PIL import Image

    side, (rows, columns) = int(stored["size"]), (int(n) for n in stored["tiles"])
    blob, offsets = stored["blob"], stored["offsets"]

    def unpacked(start: int, end: int, count: int) -> np.ndarray:
        sheet = np.asarray(Image.open(io.BytesIO(blob[start:end].tobytes())).convert("RGB"))
        tiles = sheet.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
        return tiles.reshape(-1, side, side, 3)[:count]

    with ThreadPoolExecutor() as pool:
        return np.concatenate(list(pool.map(unpacked, offsets[:-1], offsets[1:], stored["counts"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--side", type=int, default=0, help="in pixels; default: as they are")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    images = read_images(options.files)
    if options.side:
        images = images.smaller(options.side)
    digest = hashlib.md5(images.pixels.tobytes() + images.labels.tobytes(), usedforsecurity=False).hexdigest()
    print(f"{images.training} training and {len(images.labels) - images.training} test images, md5 {digest}")
    images.save(options.out)


if __name__ == "__main__":
    main()
