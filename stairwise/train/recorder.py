"""What a run measures: summed on the device in every step, decomposed and written in the background, in order."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stairwise.checks import InputError
from stairwise.monitor.sinks import RunFolder, loggers, send
from stairwise.monitor.spectrum import SpectrumMonitor, decompose_aside
from stairwise.train.objective import Embedded

__all__ = ["Recorder", "tensorboard_in"]


class Recorder:
    """Loss, gradient and spectra since the last record; the first step that was not finite.

    Numbers stay on the device, so that `observe` waits for nothing and can be part of a recorded graph.
    """

    NAMES = ("loss", "steps", "gradient", "step", "bad_step")

    def __init__(self, device: torch.device, normalized: bool, hidden: bool, board: Any = None) -> None:
        self.device, self.hidden, self.board = device, hidden, board
        self.loggers = loggers(board)[1]
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.monitor = SpectrumMonitor(normalized=normalized)
        self.folder: RunFolder | None = None  # of the first process only
        self.background = ThreadPoolExecutor(1)
        self.writing: deque[Future[None]] = deque()

    def observe(self, out: Embedded, gradient: Tensor, measure: bool) -> None:
        """Take in one step."""
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
        """Mean loss since the last spectrum, length of the last gradient, first bad step or 0; waits for the device."""
        found = dict(zip(self.NAMES, self.values.tolist(), strict=True))
        return found | {"loss": found["loss"] / max(1.0, found["steps"])}

    def record(self, facts: dict[str, Any], spectrum: bool) -> None:
        """Write a line of facts, with the spectra of what has been observed since the last one if asked."""
        sums = None
        if spectrum:
            sums = self.monitor.snapshot(joint=True)
            self.monitor.reset()
            self.values[:2] = 0
        self.settle(finished_only=True)
        self.writing.append(self.background.submit(self._write, facts, sums))

    def _write(self, facts: dict[str, Any], sums: dict[str, Any] | None) -> None:
        if self.folder is None:
            return
        if sums is not None:
            found = vars(decompose_aside(sums, self.monitor.normalized))
            facts |= {name: value for name, value in found.items() if value is not None}
        self.folder.write(facts)
        send(facts, self.loggers)

    def settle(self, finished_only: bool = False) -> None:
        """Let errors of background writing surface; wait for it before its results are counted on."""
        while self.writing and not (finished_only and not self.writing[0].done()):
            self.writing.popleft().result()

    def state(self) -> dict[str, Tensor]:
        """Tensors from which `load` continues."""
        return {"numbers": self.values} | {f"monitor.{k}": v for k, v in self.monitor.state().items()}

    def load(self, numbers: Tensor, monitor: dict[str, Tensor]) -> None:
        """Continue from `state`."""
        self.values.copy_(numbers)
        self.monitor.load(monitor, self.device)

    def close(self) -> None:
        """Let go of threads and files."""
        self.background.shutdown()
        if self.folder is not None:
            self.folder.metrics.close()
        if self.board is not None:
            self.board.close()


def tensorboard_in(folder: Path, step: int) -> Any:
    """A TensorBoard writer that goes on after `step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("tensorboard", "must be installed", None, "pip install tensorboard") from error
    return SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
