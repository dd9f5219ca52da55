"""Two augmented views of every batch, a function of seed and step alone, so that a run can continue anywhere."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stairwise.data.augment import View, augment
from stairwise.data.feed import START, VIEWS, AbstractFeed, mixed
from stairwise.distributed import rank

Pair = tuple[Tensor, Tensor]
Both = Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]]


def _in_order(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    return first(), second()


class ViewPairs:
    """Two views of the images of a feed; made by `data.pairs.view_pairs`.

    Attributes:
        feed, pipeline, size, mean, std, seed: images, augmentations, side of a view, channel statistics, seed.
        half: leave float16 views as they are.
        both: computes the two views; a GPU may do that on two streams.
        draw: batch and side → two views; may be replaced by a recording of itself.
        generator: its random numbers.
    """

    def __init__(
        self,
        feed: AbstractFeed,
        pipeline: tuple[View, View],
        size: int,
        mean: Tensor,
        std: Tensor,
        seed: int,
        half: bool = False,
    ) -> None:
        self.feed, self.pipeline, self.size, self.mean, self.std = feed, pipeline, size, mean, std
        self.seed, self.half = seed, half
        self.both: Both = _in_order
        self.draw: Callable[..., Pair] = self._draw
        self.generator = torch.Generator(feed.device)

    def copy(self) -> "ViewPairs":
        """The same pairs with their own random numbers, to use while these are being drawn."""
        return self.with_seed(self.seed)

    def with_seed(self, seed: int) -> "ViewPairs":
        """Pairs of the same images with other random numbers."""
        return ViewPairs(self.feed, self.pipeline, self.size, self.mean, self.std, seed, self.half)

    def stream(self, rows: Iterator[Tensor], first: int, side: Callable[[int], int] | None = None) -> Iterator[Pair]:
        """Views of the images in each tensor of row numbers, for steps `first`, `first` + 1, …

        `side`: that of the views of a step, if it is not always `size`.
        """
        for step, batch in enumerate(self.feed.stream(rows), first):
            self.generator.manual_seed(mixed(VIEWS, self.seed, step, rank()))
            yield self.draw(batch, size=side(step) if side else self.size)

    def fixed(self, rows: Tensor, *numbers: int) -> Pair:
        """Views that no step draws: to measure with, or to train on again and again."""
        self.generator.manual_seed(mixed(START, self.seed, *numbers))
        return self._draw(self.feed.take(rows), self.size)

    def fixed_batches(self, rows: Tensor, batch: int = 256, least: int = 1) -> Iterator[Pair]:
        """`fixed` views of many images, batch by batch; a batch of fewer than `least` images is left out."""
        for i, some in enumerate(part for part in rows.split(batch) if len(part) >= least):
            yield self.fixed(some, i)

    def _draw(self, batch: Tensor, size: int) -> Pair:
        def one(view: View) -> Tensor:
            x = augment(batch, view, size, self.generator, self.mean, self.std)
            return x if self.half else x.float()

        a, b = self.pipeline
        return self.both(lambda: one(a), lambda: one(b))
