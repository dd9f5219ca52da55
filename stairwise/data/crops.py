"""Two random crops of each image: the positive pairs of the paper's linear experiment (Sec. 4.4)."""

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of, positive_int
from stairwise.checks import seed as check_seed
from stairwise.data.images import Images

Floats = NDArray[np.float64]

PIXELS = ("standardize", "unit", "center")
NUMBER, CROP, SIDE = 500, 20, 32  # the paper's images, and its crops of 20 pixels of images of 32


def two_crops(
    images: Images, n: int = 500, crop: int = 20, pixels: str = "standardize", seed: int = 0
) -> tuple[Floats, Floats]:
    """Choose n images, cut two independent crop × crop squares out of each; rows are flattened crops.

    Arguments:
        images: at least n of them, at least `crop` pixels wide and high.
        pixels: "unit": as they are, uint8 divided by 255. "center": minus the mean of each channel over the chosen
            images. "standardize": and divided by its standard deviation. The paper does not say which it used;
            the choice determines the spacing of the steps.
        seed: of the choice and the crops.

    Returns:
        x_a, x_b, each (n, crop · crop · channels), float64.

    Example:
        >>> from stairwise.data.images import load
        >>> x_a, x_b = two_crops(load("photos"), n=100)
        >>> x_a.shape, x_b.shape
        ((100, 1200), (100, 1200))
    """
    total = len(images.pixels)
    n = positive_int(n, "n", total, f"{images.name} has {total} images")
    _check(images, crop, pixels)
    rng = np.random.default_rng(check_seed(seed))
    chosen = np.sort(rng.choice(total, n, replace=False))
    x = _scaled(images.take(chosen), pixels)
    return _random_crops(x, crop, rng), _random_crops(x, crop, rng)


def fitting(images: Images, n: int | None, crop: int | None) -> tuple[int, int]:
    """n and crop as given; where they are None, the paper's 500 and 20, or what fits the images.

    Crops of images smaller than 32 pixels are 5/8 of their side, as in the paper.

    >>> from stairwise.data.images import load
    >>> fitting(load("photos"), None, None), fitting(load("digits"), 100, None)
    ((500, 20), (100, 5))
    """
    side = min(images.pixels.shape[1:3])
    crop = crop if crop is not None else min(CROP, max(1, round(side * CROP / SIDE)))
    return n if n is not None else min(NUMBER, len(images.pixels)), crop


def central_crops(images: Images, crop: int = 20, pixels: str = "standardize") -> Floats:
    """The middle of every image, scaled like `two_crops`; (N, crop · crop · channels)."""
    _check(images, crop, pixels)
    _, height, width, _ = images.pixels.shape
    top, left = (height - crop) // 2, (width - crop) // 2
    return _scaled(images, pixels)[:, top : top + crop, left : left + crop].reshape(len(images.pixels), -1)


def _check(images: Images, crop: int, pixels: str) -> None:
    one_of(pixels, "pixels", PIXELS)
    if images.pixels.ndim != 4:
        raise InputError(images.name, "must have pixels (images, height, width, channels)", images.pixels.shape)
    _, height, width, _ = images.pixels.shape
    positive_int(crop, "crop", min(height, width), f"images of {images.name} are {height}×{width}")


def _scaled(images: Images, pixels: str) -> Floats:
    x = np.asarray(images.pixels, dtype=np.float64)
    if images.pixels.dtype == np.uint8:
        x /= 255
    if not np.isfinite(x).all():
        raise InputError(images.name, "must hold finite pixels", None, "drop or impute images with NaN or infinity")
    if pixels != "unit":
        x = x - x.mean(axis=(0, 1, 2))
    if pixels == "standardize":
        spread = x.std(axis=(0, 1, 2))
        x = x / np.where(spread > 0, spread, 1)
    return x


def _random_crops(x: Floats, crop: int, rng: np.random.Generator) -> Floats:
    n, height, width, _ = x.shape
    top, left = rng.integers(height - crop + 1, size=n), rng.integers(width - crop + 1, size=n)
    windows = np.lib.stride_tricks.sliding_window_view(
        x, (crop, crop), axis=(1, 2)
    )  # (n, H', W', channels, crop, crop)
    return windows[np.arange(n), top, left].transpose(0, 2, 3, 1).reshape(n, -1)
