"""A step recorded as a CUDA graph: one launch instead of thousands, which decides the speed of small batches."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

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

    The warm-up steps are steps of the run like any other. Two recordings are kept, with and without measuring. Where a
    step cannot be recorded (some modules of users look at values on the host), it goes on being taken one by one.
    """

    def __init__(self, step: Callable[[Tensor, bool], None], generator: torch.Generator) -> None:
        self.step, self.generator = step, generator
        self.recordings: dict[bool, torch.cuda.CUDAGraph] = {}
        self.taken = {True: 0, False: 0}
        self.impossible = False
        self.buffer: Tensor | None = None
        self.side = torch.cuda.Stream()

    def __call__(self, batch: Tensor, measure: bool) -> None:
        if self.impossible:
            self.step(batch, measure)
            return
        if self.buffer is None:
            self.buffer = torch.empty_like(batch)
        self.buffer.copy_(batch)
        if measure not in self.recordings:
            if self.taken[measure] < WARM:
                self._take_aside(self.buffer, measure)
                return
            self._record(self.buffer, measure)
        if self.impossible:
            self.step(batch, measure)
        else:
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
            with torch.cuda.graph(graph, pool=pool):
                self.step(batch, measure)
            self.recordings[measure] = graph
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"this step cannot be recorded as a CUDA graph ({reason}); it runs without", stacklevel=3)
            torch.cuda.synchronize()
            self.recordings.clear()
            self.impossible = True
