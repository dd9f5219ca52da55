"""The one way from data to pairs of views: features or crops as rows (`read_pairs`), or augmented images on a device
(`view_pairs`). Only the latter needs torch."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of, positive_int
from stairwise.data.crops import fitting, two_crops
from stairwise.data.images import Images, load
from stairwise.files import regular

if TYPE_CHECKING:
    import torch

    from stairwise.data.views import ViewPairs


class RowPairs(NamedTuple):
    """Two views of n samples as rows, (n, features) each, and a name for them."""

    name: str
    x_a: NDArray
    x_b: NDArray


def read_pairs(
    source: str,
    source_b: str | None = None,
    *,
    n: int | None = None,
    crop: int | None = None,
    pixels: str = "standardize",
    size: int = 64,
    seed: int = 0,
) -> RowPairs:
    """Pairs from two .npy files of features (memory-mapped), or two crops of each of n images of a dataset.

    Arguments:
        source, source_b: two files whose rows i are views of sample i, which are used whole; or one dataset, as
            `data.images.load` takes it.
        n, crop: for images, see `data.crops.two_crops`; None: 500 images and crops of 20 pixels, or what fits the data.
        pixels, seed: for images, too.
        size: side to which images of a folder are scaled.
    """
    if source_b is not None:
        options = {"n": (n, None), "crop": (crop, None), "pixels": (pixels, "standardize"), "size": (size, 64)}
        for name, (value, default) in options.items():
            if value != default:
                raise InputError(name, "is for images; rows of features are used as they are", value, "leave it out")
        paths = Path(source), Path(source_b)
        return RowPairs(f"{paths[0].name}, {paths[1].name}", *(read_features(path) for path in paths))
    if source.endswith(".npy") and ":" not in source:
        remedy = "give the file of the second view too, or array:FILE for images"
        raise InputError("x_b.npy", "is needed with the features of the first view", source, remedy)
    images = load(source, size=positive_int(size, "size"))
    return RowPairs(images.name, *two_crops(images, *fitting(images, n, crop), pixels, seed))


def read_features(path: Path) -> NDArray:
    """Features (n, m) from a .npy file, memory-mapped."""
    try:
        x = np.load(regular(path), mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        remedy = "give two .npy files of features, or one dataset alone"
        raise InputError(str(path), "must exist", None, remedy) from None
    except InputError:
        raise
    except (ValueError, EOFError, OSError) as error:
        words = "pickled objects or another format" if "pickle" in str(error) else error
        raise InputError(str(path), "must be a whole .npy file without objects", words) from error
    if not isinstance(x, np.ndarray) or x.ndim != 2:
        shape = f"shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(str(path), "must be a 2-D .npy array, rows are samples", shape)
    return x


def view_pairs(
    images: Images,
    views: str,
    size: int = 0,
    seed: int = 0,
    device: "torch.device | str" = "cpu",
    *,
    training: int = 0,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> "ViewPairs":
    """Augmented pairs of images.

    Arguments:
        views: name of a pipeline of augmentations.
        size: side of a view; 0: that of the images.
        training: number of images, from the first on, whose channel statistics standardize the views; 0: all.
        mean, std: of the channels, instead of those statistics.
    """
    import torch

    from stairwise.data.augment import PIPELINES
    from stairwise.data.feed import build_feed, channel_statistics
    from stairwise.data.views import ViewPairs

    pipeline = PIPELINES[one_of(views, "views", PIPELINES)]
    # augmentations that clamp need pixels from 0 to 1; plain crops take any
    clamps = any(view.scale is not None for view in pipeline)
    where = torch.device(device)
    feed = build_feed(images, where)
    statistics = channel_statistics(images.pixels[: training or None], unit=clamps)
    channels = images.pixels.shape[3]
    if {len(given) for given in (mean, std) if given} - {channels}:
        raise InputError("mean and std", f"must have {channels} numbers, one per channel", (mean, std))
    given = [torch.tensor(own) if own else its for own, its in zip((mean, std), statistics, strict=True)]
    side = size or min(images.pixels.shape[1:3])
    return ViewPairs(feed, pipeline, side, given[0].to(where), given[1].to(where), seed)
