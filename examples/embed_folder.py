"""From a folder of images to embeddings, without training: each image is decoded once, and a stopped run continues.

    python examples/embed_folder.py FOLDER [--out embedded] [--dimension 32] [--landmarks 1000]

Pairs are two random crops of an image. They are added batch by batch with `KernelSSL.partial_fit`, which takes the same
memory for any number of images. Writes pixels.npy (the decoded images), state.npz (the estimator, after every batch; it
knows how many pairs it has seen), names.txt and z.npy (embeddings of central crops).
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

import stairwise as sw
from stairwise.data.images import SUFFIXES


def decoded(path, size):
    with Image.open(path) as image:
        return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS))


def crops(pixels, side, rng=None):
    """Random or, without rng, central crops as rows of floats."""
    n, size = pixels.shape[:2]
    top, left = rng.integers(size - side + 1, size=(2, n)) if rng else np.full((2, n), (size - side) // 2)
    cut = [image[i : i + side, j : j + side] for image, i, j in zip(pixels, top, left, strict=True)]
    return np.stack(cut).reshape(n, -1).astype(np.float32) / 255 - 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("embedded"))
    parser.add_argument("--dimension", type=int, default=32)
    parser.add_argument("--landmarks", type=int, default=1000)
    parser.add_argument("--size", type=int, default=32, help="side to which images are scaled")
    parser.add_argument("--crop", type=int, default=24)
    parser.add_argument("--batch", type=int, default=1000, help="images; twice as many should exceed --landmarks")
    parser.add_argument("--most", type=int, help="stop after this many images; the next run continues there")
    options = parser.parse_args()
    paths = sorted(path for path in options.folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    options.out.mkdir(parents=True, exist_ok=True)
    state, stored = options.out / "state.npz", options.out / "pixels.npy"
    begun = state.exists()
    if begun:
        est = sw.KernelSSL.load(state)
    else:
        est = sw.KernelSSL(options.dimension, method="nystroem", n_features=options.landmarks, dtype="float32")
    shape = (len(paths), options.size, options.size, 3)
    pixels = np.lib.format.open_memmap(stored, "r+" if begun else "w+", np.uint8, None if begun else shape)
    for start in range(est.pairs_ if begun else 0, min(options.most or len(paths), len(paths)), options.batch):
        rows = slice(start, min(start + options.batch, len(paths)))
        pixels[rows] = [decoded(path, options.size) for path in paths[rows]]
        pixels.flush()
        rng = np.random.default_rng(start)  # the same crops however often the run is stopped
        est.partial_fit(crops(pixels[rows], options.crop, rng), X_b=crops(pixels[rows], options.crop, rng))
        est.save(state)
        print(f"{rows.stop:,} of {len(paths):,} images", flush=True)
    if est.pairs_ < len(paths):
        return
    z = np.concatenate([est.transform(crops(pixels[i : i + 1000], options.crop)) for i in range(0, len(paths), 1000)])
    np.save(options.out / "z.npy", z)
    (options.out / "names.txt").write_text("\n".join(map(str, paths)) + "\n")
    print(
        f"{len(z):,} embeddings in {options.out / 'z.npy'}; γ = {np.array2string(est.eigenvalues_[:5], precision=3)} …"
    )


if __name__ == "__main__":
    main()
