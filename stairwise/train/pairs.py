"""Two views of every batch, a function of seed and step alone, so that a run can go on anywhere."""

from collections.abc import Iterator

import torch
from torch import Tensor

from stairwise.data.augment import PIPELINES, View, augment
from stairwise.data.feed import START, VIEWS, AbstractFeed, mixed
from stairwise.losses.ranks import rank
from stairwise.train.graph import Pair, Recorded, ahead, beside

__all__ = ["Pairs"]


class Pairs:
    """Views of the images of a feed; on a GPU those of the next step are drawn while the network learns from this one.

    Arguments:
        pipeline: name of the views.
        size: their side.
        mean, std: of the channels.
        half: leave float16 views as they are.
        graph: record the drawing as a CUDA graph.
    """

    def __init__(
        self,
        feed: AbstractFeed,
        pipeline: str,
        size: int,
        mean: Tensor,
        std: Tensor,
        seed: int,
        *,
        half: bool = False,
        graph: bool = False,
    ) -> None:
        self.feed, self.size, self.mean, self.std, self.seed, self.half = feed, size, mean, std, seed, half
        self.views = PIPELINES[pipeline]
        self.generator = torch.Generator(feed.device)
        self.draw = Recorded(self._draw, self.generator) if graph else self._draw

    def stream(self, rows: Iterator[Tensor], first: int) -> Iterator[Pair]:
        """Views of the images in each tensor of row numbers, for steps `first`, `first` + 1, …"""
        pairs = self._stream(rows, first)
        return ahead(pairs) if self.feed.device.type == "cuda" else pairs

    def at_start(self, rows: Tensor, *numbers: int) -> Pair:
        """Views that no step draws, to measure with before training; or to train on again and again."""
        self.generator.manual_seed(mixed(START, self.seed, *numbers))
        return self._draw(self.feed.take(rows))

    def _stream(self, rows: Iterator[Tensor], first: int) -> Iterator[Pair]:
        for step, batch in enumerate(self.feed.stream(rows), first):
            self.generator.manual_seed(mixed(VIEWS, self.seed, step, rank()))
            yield self.draw(batch)

    def _draw(self, batch: Tensor) -> Pair:
        def one(view: View) -> Tensor:
            x = augment(batch, view, self.size, self.generator, self.mean, self.std)
            return x if self.half else x.float()

        a, b = self.views
        if batch.is_cuda and torch.cuda.is_current_stream_capturing():
            return beside(lambda: one(a), lambda: one(b))  # many small kernels: two at a time
        return one(a), one(b)
