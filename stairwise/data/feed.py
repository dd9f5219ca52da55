"""Batches of images on the training device: kept there if they fit, otherwise loaded by background threads."""

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stairwise.checks import InputError
from stairwise.data.augment import to_layout
from stairwise.data.images import Images

Pixels = NDArray[np.generic]
ORDER, VIEWS, START = 1, 2, 3  # one seed stream per purpose of random numbers


class AbstractFeed(ABC):
    """Images as batches (N, H, channels, W) on a device, uint8 or float32."""

    def __init__(self, pixels: Pixels, device: torch.device) -> None:
        self.pixels, self.device = pixels, device

    @abstractmethod
    def stream(self, rows: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the images of each tensor of row numbers, in order."""

    def take(self, rows: Tensor) -> Tensor:
        """The images of one tensor of row numbers."""
        return next(self.stream(iter([rows])))


class Resident(AbstractFeed):
    """All images are stored on the device."""

    def __init__(self, pixels: Pixels, device: torch.device) -> None:
        super().__init__(pixels, device)
        self.stored = to_layout(_tensor(pixels).to(device))

    def stream(self, rows: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in rows:
            yield self.stored[batch.to(self.device, non_blocking=True)]


class Streamed(AbstractFeed):
    """Images stay on the host (or in a memory-mapped file); threads prefetch the next `ahead` batches."""

    def __init__(self, pixels: Pixels, device: torch.device, workers: int = 4, ahead: int = 4) -> None:
        super().__init__(pixels, device)
        self.workers, self.ahead = workers, ahead

    def stream(self, rows: Iterator[Tensor]) -> Iterator[Tensor]:
        waiting: deque[Future[Tensor]] = deque()
        in_flight: deque[Tensor] = deque(maxlen=2)  # keep pinned memory alive during the copy
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for batch in rows:
                    waiting.append(pool.submit(self._gather, batch))
                    if len(waiting) > self.ahead:
                        yield self._sent(waiting.popleft().result(), in_flight)
                while waiting:
                    yield self._sent(waiting.popleft().result(), in_flight)
            finally:
                for left in waiting:
                    left.cancel()

    def _gather(self, rows: Tensor) -> Tensor:
        batch = to_layout(_tensor(self.pixels[rows.numpy()]))
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def _sent(self, batch: Tensor, in_flight: deque[Tensor]) -> Tensor:
        in_flight.append(batch)
        return batch.to(self.device, non_blocking=True)


def build_feed(images: Images, device: torch.device, budget: float | None = None) -> AbstractFeed:
    """`Resident` if the images take at most `budget` bytes (default: a quarter of the free GPU memory, or 4 GB)."""
    if images.pixels.ndim != 4 or len(images.pixels) == 0:
        raise InputError(images.name, "must have pixels (images, height, width, channels)", images.pixels.shape)
    if images.pixels.dtype != np.uint8 and images.pixels.dtype.kind != "f":
        remedy = "convert them to uint8, or to floats from 0 to 1"
        raise InputError(images.name, "must hold pixels of type uint8 or float", images.pixels.dtype, remedy)
    if budget is None:
        budget = torch.cuda.mem_get_info(device)[0] / 4 if device.type == "cuda" else 4e9
    size = images.pixels.size * (1 if images.pixels.dtype == np.uint8 else 4)
    kind = Resident if size <= budget else Streamed
    return kind(images.pixels, device)


def batch_rows(
    total: int, batch: int, seed: int, first: int = 0, rank: int = 0, world: int = 1, repeats: int = 1
) -> Iterator[Tensor]:
    """Yield the row numbers of batches `first`, `first` + 1, … forever; they depend only on the seed.

    Each epoch is a new shuffle; its last, incomplete batch is dropped. Process `rank` gets its part of each batch, and
    the whole part is repeated, so that `batch` / `repeats` images differ.

    >>> [rows.tolist() for rows, _ in zip(batch_rows(5, 2, seed=0), range(2))]
    [[4, 1], [3, 2]]
    """
    batch //= repeats
    per_epoch = total // batch
    if per_epoch == 0:
        raise InputError("batch", f"must be at most {total}, the number of training images", batch)
    share = batch // world
    generator = torch.Generator()
    epoch, place = divmod(first, per_epoch)
    while True:
        order = torch.randperm(total, generator=generator.manual_seed(mixed(ORDER, seed, epoch)))
        for i in range(place, per_epoch):
            start = i * batch + rank * share
            yield order[start : start + share].repeat(repeats)
        epoch, place = epoch + 1, 0


def mixed(*numbers: int) -> int:
    """Combine several numbers into one seed of 63 bits."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def channel_statistics(pixels: Pixels, most: int = 5000, unit: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, over at most `most` evenly spaced images.

    With `unit`, pixels below 0 or above 1 are an error.
    """
    chosen = pixels[np.linspace(0, len(pixels) - 1, min(most, len(pixels))).astype(int)]
    if pixels.dtype == np.uint8:
        mean, variance = _moments_of_bytes(chosen)
    else:
        chosen = np.asarray(chosen, dtype=np.float64)
        if not np.isfinite(chosen).all():
            raise InputError("images", "must hold finite pixels", None, "drop or impute images with NaN or infinity")
        if unit and (chosen.min() < 0 or chosen.max() > 1):
            extremes = f"{chosen.min():g} to {chosen.max():g}"
            raise InputError("images", "must hold floats from 0 to 1", extremes, "scale them, or use views=crop")
        mean, variance = chosen.mean(axis=(0, 1, 2)), chosen.var(axis=(0, 1, 2))
    std = np.where(variance > 0, np.sqrt(variance), 1)
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)


def _moments_of_bytes(pixels: Pixels) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and variance per channel of uint8 pixels over 255, several times faster than in float64."""
    sums = np.zeros((2, *pixels.shape[1:]))
    for start in range(0, len(pixels), 256):  # so few squares add up to less than 2²⁴: exact in float32
        some = pixels[start : start + 256].astype(np.float32)
        sums += some.sum(axis=0), np.square(some, out=some).sum(axis=0)
    mean, square = sums.sum(axis=(1, 2)) / (pixels.size / pixels.shape[3])
    return mean / 255, (square - mean**2) / 255**2


def _tensor(pixels: Pixels) -> Tensor:
    kind = np.uint8 if pixels.dtype == np.uint8 else np.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about read-only arrays, which are only read here
        return torch.from_numpy(np.ascontiguousarray(pixels, dtype=kind))
