"""Images of the corpus, and two views of random ones.

    python -m benchmarks.corpus.images closeups.npz                        # needs stl10 where `stairwise data` puts it
    python -m benchmarks.corpus.images closeups.npz --images stl10.npz     # pixels (N, 96, 96, 3), labels (N,)
    python -m benchmarks.corpus.images closeups.npz --pixels 8             # 1 MB instead of 12, as networks see them

writes 4000 details of STL-10's photographs. Disks, clouds and strokes are drawn when they are needed.
"""

import argparse
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from stairwise.data.images import load


@cache
def leaves(number: int = 4000, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Images of disks that cover each other ("dead leaves"), each with one of ten palettes, which is its label."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=number)
    palettes = rng.uniform(0, 255, (10, 4, 3))
    pixels = np.zeros((number, side, side, 3), dtype=np.uint8)
    y, x = np.mgrid[:side, :side]
    for _ in range(60):
        center, radius = rng.uniform(0, side, (2, number, 1, 1)), 1.5 / rng.uniform(0.1, 1, (number, 1, 1))
        color = palettes[labels, rng.integers(4, size=number)] + rng.normal(0, 25, (number, 3))
        inside = (x - center[0]) ** 2 + (y - center[1]) ** 2 <= radius**2
        pixels = np.where(inside[..., None], color.clip(0, 255).astype(np.uint8)[:, None, None], pixels)
    return pixels, labels


@cache
def clouds(number: int = 4000, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Random fields with a power law in frequency, mixed into colours; exponent and colours are those of the label."""
    rng = np.random.default_rng(1)
    labels = rng.integers(10, size=number)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.rfftfreq(side), indexing="ij"))
    frequency[0, 0] = np.inf  # no mean
    power = frequency ** -np.linspace(0.8, 2.6, 10)[labels][:, None, None, None]
    fields = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(number, 3, side, side))) * power, s=(side, side))
    fields /= fields.std(axis=(1, 2, 3), keepdims=True)
    colors = np.einsum("nkc,nkyx->nyxc", rng.normal(0, 0.7, (10, 3, 3))[labels], fields)
    return (128 + 60 * colors).clip(0, 255).astype(np.uint8), labels


@cache
def strokes(number: int = 4000, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Writing: three curved strokes of a pen in one of ten signs, which is the label, in other inks and on other paper,
    each sign slanted, moved and bent at random."""
    rng = np.random.default_rng(2)
    labels = rng.integers(10, size=number)
    corners = rng.uniform(-0.8, 0.8, (10, 3, 3, 2))[labels] + rng.normal(0, 0.08, (number, 3, 3, 2))
    slant = np.eye(2) * rng.uniform(0.7, 1.1, (number, 1, 1)) + rng.normal(0, 0.15, (number, 2, 2))
    corners = np.einsum("nskx,nxy->nsky", corners, slant) + rng.normal(0, 0.1, (number, 1, 1, 2))
    width, ink = rng.uniform(0.04, 0.09, (number, 1, 1)), np.zeros((number, side, side))
    y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
    for s in np.linspace(0, 1, 24):
        points = np.einsum("k,nskx->snx", [(1 - s) ** 2, 2 * s * (1 - s), s**2], corners)  # of Bézier curves
        for point in points:
            distance = (x - point[:, :1, None]) ** 2 + (y - point[:, 1:, None]) ** 2
            np.maximum(ink, np.exp(-distance / (2 * width**2)), out=ink)
    dark, light = rng.uniform(0, 90, (number, 1, 1, 3)), rng.uniform(150, 255, (number, 1, 1, 3))
    return (light + (dark - light) * ink[..., None]).astype(np.uint8), labels


def closeups(pixels: np.ndarray, labels: np.ndarray, number: int = 4000, side: int = 32) -> dict[str, np.ndarray]:
    """Squares of `side` pixels of larger photographs, as they are: a third of STL-10's height and width."""
    rng = np.random.default_rng(3)
    rows = rng.permutation(len(pixels))[:number]
    top, left = rng.integers(pixels.shape[1] - side + 1, size=(2, len(rows)))
    cut = [pixels[k, i : i + side, j : j + side] for k, i, j in zip(rows, top, left, strict=True)]
    return {"pixels": np.stack(cut), "labels": labels[rows]}


def smaller(pixels: np.ndarray, side: int) -> np.ndarray:
    """Sums over squares of pixels, exact: means of them are what `Source` takes, whose scale it removes.

    >>> smaller(np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1), 2)[0, ..., 0].tolist()
    [[10, 18], [42, 50]]
    """
    n, width = len(pixels), pixels.shape[1] // side
    return pixels.reshape(n, side, width, side, width, -1).sum(axis=(2, 4), dtype=np.uint16)


MADE = {"leaves": leaves, "clouds": clouds, "strokes": strokes}


class Source:
    """Images of one data set, and two views of random ones."""

    def __init__(
        self, data: str, side: int, classes: int, files: Mapping[str, Path], device: str, generator: torch.Generator
    ) -> None:
        if data in files:
            with np.load(files[data]) as stored:
                pixels, labels = stored["pixels"], stored["labels"]
        elif data in MADE:
            pixels, labels = MADE[data]()
        else:
            images = load(data)
            pixels, labels = np.asarray(images.pixels), np.asarray(images.labels)
        if data == "photos":  # ten regions of the two photographs
            labels = np.arange(len(pixels)) * 10 // len(pixels)
        x = torch.as_tensor(pixels).float()
        x = x[..., None] if x.ndim == 3 else x
        x = x.permute(0, 3, 1, 2) / x.max()
        if x.shape[2] > side:
            x = avg_pool2d(x, x.shape[2] // side)
        self.x = ((x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)).contiguous().to(device)
        self.by_class = [torch.as_tensor(np.flatnonzero(labels == c)).to(device) for c in range(classes)]
        self.digits, self.generator, self.device = data == "digits", generator, device
        self.side, self.channels = self.x.shape[2], self.x.shape[1]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def pair(self, n: int) -> tuple[Tensor, Tensor]:
        if not self.by_class:
            rows = (self._uniform(n) * len(self.x)).long()
            return self._view(self.x[rows]), self._view(self.x[rows])
        classes = (self._uniform(n) * len(self.by_class)).long()
        views = []
        for _ in range(2):
            rows = torch.empty_like(classes)
            for c, members in enumerate(self.by_class):
                chosen = classes == c
                rows[chosen] = members[(self._uniform(int(chosen.sum())) * len(members)).long()]
            views.append(self._view(self.x[rows]))
        return views[0], views[1]

    def _view(self, x: Tensor) -> Tensor:
        n, u = len(x), self._uniform(8, len(x))
        scale = 0.85 + 0.3 * u[0] if self.digits else 0.5 + 0.5 * u[0]
        shift = 0.2 if self.digits else 1 - scale
        angle = (0.5 * (u[1] - 0.5)) if self.digits else torch.zeros_like(u[1])
        flip = torch.ones_like(u[2]) if self.digits else torch.sign(u[2] - 0.5)
        rows = [
            torch.stack([scale * angle.cos() * flip, -scale * angle.sin(), shift * (2 * u[3] - 1)], dim=1),
            torch.stack([scale * angle.sin(), scale * angle.cos(), shift * (2 * u[4] - 1)], dim=1),
        ]
        y = grid_sample(
            x, affine_grid(torch.stack(rows, dim=1), list(x.shape), align_corners=False), align_corners=False
        )
        gray = ((u[5] < 0.2) & (x.shape[1] == 3))[:, None, None, None]
        y = torch.where(gray, y.mean(dim=1, keepdim=True), y)
        gains = 1 + 0.5 * (self._uniform(n, x.shape[1], 1, 1) - 0.5)
        noise = torch.randn(y.shape, generator=self.generator, device=self.device)
        return y * gains * (0.6 + 0.8 * u[6])[:, None, None, None] + (u[7] - 0.5)[:, None, None, None] + 0.1 * noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("to", type=Path)
    parser.add_argument("--images", type=Path, help="photographs to cut from, pixels and labels, instead of stl10")
    parser.add_argument("--pixels", type=int, default=32, help="height and width that are stored: 32, 16 or 8")
    choice = parser.parse_args()
    if choice.images:
        with np.load(choice.images) as stored:
            pixels, labels = stored["pixels"], stored["labels"]
    else:
        pixels, labels = (np.asarray(values) for values in (load("stl10").pixels, load("stl10").labels))
    cut = closeups(pixels, labels)
    if choice.pixels < cut["pixels"].shape[1]:
        cut["pixels"] = smaller(cut["pixels"], choice.pixels)
    np.savez_compressed(choice.to, **cut)


if __name__ == "__main__":
    main()
