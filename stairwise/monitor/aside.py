"""Work for which training does not wait: on a CUDA stream of its own, with results for a background thread."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The work is short, and training waits if its next embeddings have no place yet, so it comes before recorded training.
FIRST = -2


class Aside:
    """A stream beside the current one; on a CPU the work is done at once.

    Attributes:
        allowed: False in monitors that a captured graph updates, because a graph cannot wait for this stream.
    """

    def __init__(self) -> None:
        self.allowed = True
        self.stream: torch.cuda.Stream | None = None
        self.done: torch.cuda.Event | None = None

    @contextmanager
    def work(self, device: torch.device | None, uses: Iterable[Tensor | None] = ()) -> Iterator[None]:
        """Do what follows aside, after everything that the current stream has been given so far.

        uses: tensors of the current stream; if they are deleted meanwhile, their memory is not used again before the
            work is done.
        """
        if device is None or device.type != "cuda" or not self.allowed:
            del uses
            yield
            return
        if self.stream is None or self.stream.device != device:
            self.stream = torch.cuda.Stream(device, priority=FIRST)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in uses:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(self.stream)
            del tensor
        del uses  # the work may free some of them
        with torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self.done = self.stream.record_event()

    def wait(self, until: torch.cuda.Event | None = None) -> None:
        """Let the current stream, not the host, wait for the work. Call it before using tensors that the work uses.

        until: `done` as it was after an earlier part of the work; None waits for all of it.
        """
        until = self.done if until is None else until
        if self.allowed and until is not None and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(until)


class Copies:
    """Copies of tensors on the CPU, which may still be under way."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.copies: dict[str, Tensor] = {}
        for name, value in values.items():
            # page-locked memory: much faster than an ordinary copy, and all copies run at the same time
            self.copies[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self.copies[name].copy_(value, non_blocking=True)
        devices = {value.device for value in values.values() if value.is_cuda}
        self.events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """The copies, as soon as they are complete."""
        for event in self.events:
            event.synchronize()
        return {name: value.numpy() for name, value in self.copies.items()}
