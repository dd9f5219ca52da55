"""A step recorded as a CUDA graph: one launch instead of thousands, which decides the speed of small batches."""

from collections.abc import Callable

import torch
from torch import Tensor

from stairwise.checks import InputError

__all__ = ["GraphedStep", "beside"]

WARM = 3  # steps that are taken one by one, on a side stream, before recording


def beside(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Both results, computed side by side on two streams; inside a recording."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        b = second()
    a = first()
    here.wait_stream(aside)
    return a, b


class GraphedStep:
    """Calls step(batch, measure), and replays its recording once it has been taken a few times.

    The warm-up steps are steps of the run like any other. Two recordings are kept, with and without measuring.
    """

    def __init__(self, step: Callable[[Tensor, bool], None], generator: torch.Generator) -> None:
        self.step, self.generator = step, generator
        self.recordings: dict[bool, torch.cuda.CUDAGraph] = {}
        self.taken = {True: 0, False: 0}
        self.buffer: Tensor | None = None
        self.side = torch.cuda.Stream()

    def __call__(self, batch: Tensor, measure: bool) -> None:
        if self.buffer is None:
            self.buffer = torch.empty_like(batch)
        self.buffer.copy_(batch)
        if measure in self.recordings:
            self.recordings[measure].replay()
        elif self.taken[measure] < WARM:
            self._take_aside(self.buffer, measure)
        else:
            self._record(self.buffer, measure)
            self.recordings[measure].replay()

    def _take_aside(self, batch: Tensor, measure: bool) -> None:
        self.taken[measure] += 1
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.step(batch, measure)
        torch.cuda.current_stream().wait_stream(self.side)

    def _record(self, batch: Tensor, measure: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        pool = next(iter(self.recordings.values())).pool() if self.recordings else None
        try:
            # thread_local: threads that feed images may pin memory meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.step(batch, measure)
        except RuntimeError as error:
            # random numbers cannot be trusted after a failed recording, so there is no going on in this process
            reason = str(error).splitlines()[0]
            raise InputError(
                "graph", "must be false for a network whose step looks at values on the host", reason, "set graph=false"
            ) from error
        self.recordings[measure] = graph
