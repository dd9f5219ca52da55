"""CUDA graphs, which replace thousands of launches by one and so speed up small batches, and CUDA streams."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stairwise.checks import InputError

WARM = 3  # number of ordinary calls on a side stream before recording
FIRST = -1  # priority of recorded work, before that of the next views
Pair = tuple[Tensor, Tensor]


def on_two_streams(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Both results; inside a recording they are computed in parallel, which is faster for many small kernels."""
    if not torch.cuda.is_current_stream_capturing():
        return first(), second()
    here, side = torch.cuda.current_stream(), torch.cuda.Stream(priority=FIRST)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        a = first()
    b = second()  # launched second, so that random numbers are drawn in this order
    here.wait_stream(side)
    return a, b


def in_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls; inside a recording each gets a stream of its own, so they must not depend on one another."""
    if len(calls) < 2 or not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        for call in calls:
            call()
        return
    here = torch.cuda.current_stream()
    sides = [torch.cuda.Stream(priority=FIRST) for _ in calls[1:]]
    for side in sides:
        side.wait_stream(here)
    for side, call in zip(sides, calls[1:], strict=True):
        with torch.cuda.stream(side):
            call()
    calls[0]()
    for side in sides:
        here.wait_stream(side)


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do the work; inside a recording on a stream of its own, while the body of `with` runs."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        work()
        yield
        return
    here, side = torch.cuda.current_stream(), torch.cuda.Stream(priority=FIRST)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        work()
    yield
    here.wait_stream(side)


def prefetch(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """The same pairs, each computed on a second stream while the previous one is in use."""
    side = torch.cuda.Stream()

    def launch() -> Pair | None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return next(pairs, None)

    following = launch()
    while following is not None:
        torch.cuda.current_stream().wait_stream(side)
        current = following[0].clone(), following[1].clone()  # a recording writes the next pair to the same memory
        following = launch()
        yield current


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection during a recording, because freeing an earlier recording would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recorded:
    """Calls work(*tensors, **options) a few times, then records it as a CUDA graph and replays that.

    There is one recording per combination of options and shapes. A replay overwrites the previous result of `work`.
    """

    def __init__(self, work: Callable[..., Any], generator: torch.Generator | None = None) -> None:
        self.work, self.generator = work, generator
        self.recordings: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.calls: dict[tuple[Any, ...], int] = {}
        self.inputs: dict[tuple[torch.Size, ...], tuple[Tensor, ...]] = {}
        self.side = torch.cuda.Stream()
        self.capture = torch.cuda.Stream(priority=FIRST)

    def __call__(self, *tensors: Tensor, **options: Any) -> Any:
        shapes = tuple(x.shape for x in tensors)
        if shapes not in self.inputs:
            self.inputs[shapes] = tuple(torch.empty_like(x) for x in tensors)
        inputs = self.inputs[shapes]
        for mine, x in zip(inputs, tensors, strict=True):
            mine.copy_(x)
        key = (shapes, *sorted(options.items()))
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= WARM:
            return self._call_on_side(inputs, options)
        if key not in self.recordings:
            self.recordings[key] = self._record(inputs, options)
        graph, out = self.recordings[key]
        graph.replay()
        return out

    def _call_on_side(self, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            out = self.work(*inputs, **options)
        torch.cuda.current_stream().wait_stream(self.side)
        return out

    def _record(self, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        pool = next(iter(self.recordings.values()))[0].pool() if self.recordings else None
        try:
            # thread_local, because threads that load images may pin memory at the same time
            recording = torch.cuda.graph(graph, pool, self.capture, capture_error_mode="thread_local")
            with _no_collection(), recording, warnings.catch_warnings():
                # gradients of passes on two streams are summed on one stream, as intended
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
                out = self.work(*inputs, **options)
        except RuntimeError as error:
            # a failed recording leaves the random state undefined, so this process cannot continue
            reason = str(error).splitlines()[0]
            raise InputError(
                "graph", "must be false if the step reads tensor values on the CPU (.item())", reason, "set graph=false"
            ) from error
        return graph, out
