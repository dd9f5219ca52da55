"""Measurements during training: summed on the device at every step, decomposed and written in the background."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stairwise.distributed import rank
from stairwise.monitor.commentary import Commentary, Floats
from stairwise.monitor.decompose import decompose_on_one_core
from stairwise.monitor.loggers import destinations, send
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.runs.record import Record
from stairwise.runs.writer import BackgroundWriter
from stairwise.training.objective import Embedded


class Recorder:
    """Loss, gradient and spectra since the last record, and the first step that was not finite.

    Numbers stay on the device, so that `observe` does not wait and can be part of a CUDA graph.
    """

    NAMES = ("loss", "steps", "gradient", "step", "bad_step")

    def __init__(
        self,
        device: torch.device,
        normalized: bool,
        hidden: bool,
        board: Any = None,
        followed: str = "covariance",
        planned: Floats | None = None,
    ) -> None:
        self.device, self.hidden, self.board = device, hidden, board
        self.loggers = destinations(board)[1]
        self.commentary = Commentary(self.loggers, followed, planned)
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.monitor = SpectrumMonitor(normalized=normalized)
        self.writer = BackgroundWriter()

    def observe(self, out: Embedded, gradient: Tensor, measure: bool) -> None:
        v, loss = self.values, out.loss.detach()
        v[0] += loss
        v[1] += 1
        v[2].copy_(gradient)
        v[3] += 1
        bad = ~(torch.isfinite(loss) & torch.isfinite(gradient)) & (v[4] == 0)
        v[4].copy_(torch.where(bad, v[3], v[4]))
        if measure:
            self.monitor.update(out.z_a, out.z_b, *((out.h_a, out.h_b) if self.hidden else ()))

    def numbers(self) -> dict[str, float]:
        """Mean loss since the last spectrum, norm of the last gradient, first bad step or 0; waits for the device."""
        numbers = dict(zip(self.NAMES, self.values.tolist(), strict=True))
        return numbers | {"loss": numbers["loss"] / max(1.0, numbers["steps"])}

    def write(self, record: Record, spectrum: bool) -> None:
        """Write a record; `spectrum` adds the spectra of all steps since the last one."""
        sums: dict[str, Any] = {}
        if spectrum:
            sums = self.monitor.snapshot(joint=True)
            self.monitor.reset()
            self.values[:2] = 0
        self.settle(wait=False)
        if rank() == 0:
            self.writer.submit(lambda: self._made(record, sums))

    def settle(self, wait: bool = True) -> None:
        """Raise errors of the background thread and send finished records to loggers; `wait`: wait for all records."""
        for record, error in self.writer.wait() if wait else self.writer.finished():
            if error is not None:
                raise error
            send(record, self.loggers, self.commentary.about(record))

    def _made(self, record: Record, sums: dict[str, Any]) -> Record:
        """Add the spectra to a record, and judge it; runs in the background."""
        if sums:
            record = replace(record, **vars(decompose_on_one_core(sums, self.monitor.normalized)))
        if self.loggers:
            self.commentary.hear(record)
        return record

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load` to continue from."""
        return {"numbers": self.values} | {f"monitor.{k}": v for k, v in self.monitor.state().items()}

    def load(self, numbers: Tensor, monitor: dict[str, Tensor]) -> None:
        self.values.copy_(numbers)
        self.monitor.load(monitor, self.device)

    def close(self) -> None:
        with suppress(Exception):  # a failed run has its own error
            self.settle()
        self.writer.close()
        if self.board is not None:
            self.board.close()
