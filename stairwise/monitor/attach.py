"""One line in anybody's training loop: hooks that feed a monitor, and records that it leaves.

    sw.SpectrumMonitor().attach(loss=criterion, backbone=model.backbone, optimizer=optimizer, log="run")

The loss module is called with both views of z, so a hook on it sees them as they are; where the loss is a function,
hook the projector. Records go to RUN/metrics.jsonl in the form that `stairwise.train` writes, and to loggers; spectra
are decomposed in the background.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, positive_int
from stairwise.losses.ranks import rank
from stairwise.monitor.sinks import RunFolder, loggers, send
from stairwise.monitor.spectrum import SpectrumMonitor, decompose

__all__ = ["Attachment"]

FEWEST = 4  # times d: pairs behind a spectrum


class Attachment:
    """Hooks on modules of a training loop, and what they have recorded; made by `SpectrumMonitor.attach`.

    Attributes:
        records: one dict a record: step, t, samples, eigenvalues, covariance, hidden.
    """

    def __init__(
        self,
        monitor: SpectrumMonitor,
        *,
        loss: nn.Module | None = None,
        projector: nn.Module | None = None,
        backbone: nn.Module | None = None,
        optimizer: Any = None,
        log: Any = None,
        every: int = 50,
        joined: bool = False,
    ) -> None:
        if (loss is None) == (projector is None):
            raise InputError("loss and projector", "must be given one and not the other", None, "prefer the loss")
        self.monitor, self.optimizer, self.joined = monitor, optimizer, joined
        self.every = positive_int(every, "every")
        self.records: list[dict[str, Any]] = []
        self.step, self.t, self.seconds = 0, 0.0, 0.0
        self.began = time.perf_counter()
        self.folder, self.loggers = loggers(log) if rank() == 0 else (None, [])
        self.run: RunFolder | None = None
        self.background = ThreadPoolExecutor(1)
        self.writing: deque[Future[dict[str, Any]]] = deque()
        self.skipped = 0
        self.seen_z: list[Tensor] = []
        self.seen_h: list[Tensor] = []
        for module in (loss, projector, backbone):
            _warn_if_compiled(module)
        self.hooks: list[Any] = []
        self.counts_updates = hasattr(optimizer, "register_step_post_hook")
        if self.counts_updates:
            self.hooks.append(optimizer.register_step_post_hook(self._after_update))
        if backbone is not None:
            self.hooks.append(backbone.register_forward_hook(self._collect(self.seen_h)))
        if loss is not None:
            self.hooks.append(loss.register_forward_pre_hook(self._before_loss))
        if projector is not None:
            self.hooks.append(projector.register_forward_hook(self._after_projector))

    def close(self) -> None:
        """Remove the hooks, finish writing."""
        for hook in self.hooks:
            hook.remove()
        self.background.shutdown()
        self._settle()
        if self.run is not None:
            self.run.log.close()

    def state(self) -> dict[str, Any]:
        """What `load` continues from, for your checkpoint: numbers and tensors."""
        self._settle()
        numbers = {"step": self.step, "t": self.t, "seconds": self._elapsed(), "log_size": 0}
        if self.run is not None:
            numbers["log_size"] = self.run.log.size
        return numbers | {f"monitor.{name}": value.clone() for name, value in self.monitor.state().items()}

    def load(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Continue from `state`, before the first step; later lines of the run folder's metrics are dropped."""
        self.step, self.t, self.seconds = int(state["step"]), float(state["t"]), float(state["seconds"])
        self.began = time.perf_counter()
        tensors = {k.removeprefix("monitor."): v for k, v in state.items() if k.startswith("monitor.")}
        self.monitor.load(tensors, torch.device(device))
        if self.folder is not None:
            self.run = RunFolder(self.folder, int(state["log_size"]))

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, seen: list[Tensor]) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if torch.is_grad_enabled() and isinstance(output, Tensor):
                seen.append(output.detach().flatten(1))

        return hook

    def _before_loss(self, _: nn.Module, views: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():  # evaluation
            return
        if len(views) < 2 or not all(isinstance(z, Tensor) for z in views[:2]):
            raise InputError(
                "loss", "must be called with (z_a, z_b)", [type(v).__name__ for v in views], "hook projector="
            )
        self._take(views[0].detach(), views[1].detach())

    def _after_projector(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not isinstance(output, Tensor):
            raise InputError("projector", "must return a tensor", type(output).__name__, "hook another module")
        self.seen_z.append(output.detach())
        pair = self._pair(self.seen_z)
        if pair is not None:
            self._take(*pair)

    def _pair(self, seen: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Both views out of what a hook has collected; leaves nothing behind."""
        if self.joined and seen:
            a, b = seen.pop().chunk(2)
            seen.clear()
            return a, b
        if len(seen) < 2:
            return None
        a, b = seen[-2:]
        seen.clear()
        return a, b

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        self.t += float(optimizer.param_groups[0]["lr"])

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.began

    def _take(self, z_a: Tensor, z_b: Tensor) -> None:
        hidden = self._pair(self.seen_h)
        self.monitor.update(z_a, z_b, *(hidden or ()))
        self.step += 1
        if self.optimizer is None:
            self.t += 1.0
        elif not self.counts_updates:
            self.t += float(self.optimizer.param_groups[0]["lr"])
        if self.step % self.every == 0 and self._enough(z_a.shape[1]):
            self._record()

    def _enough(self, d: int) -> bool:
        """Spectra of fewer pairs than a few times d are mostly noise: collect until the next record then."""
        ours = self.monitor.window is None and self.monitor.half_life is None
        return not ours or self.monitor.seen >= FEWEST * d

    def _record(self) -> None:
        sums = self.monitor.snapshot(joint=True)
        record = {"step": self.step, "t": self.t, "seconds": self._elapsed()}
        if self.monitor.window is None and self.monitor.half_life is None:
            self.monitor.reset()
        self._settle(finished_only=True)
        if rank() == 0:
            self.writing.append(self.background.submit(self._decompose, record, sums))

    def _decompose(self, record: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
        """In the background."""
        if float(sums["zz"][-1, -1]) >= 2:
            found = vars(decompose(sums, self.monitor.normalized))
            record |= {name: value for name, value in found.items() if value is not None}
        else:
            record |= {"skipped": int(sums["flaws"][1]), "first_skipped": int(sums["flaws"][2])}
        return record

    def _settle(self, finished_only: bool = False) -> None:
        """Write the records that the background has finished, in order; let errors and warnings surface."""
        while self.writing and not (finished_only and not self.writing[0].done()):
            record = self.writing.popleft().result()
            self.records.append(record)
            if self.folder is not None and self.run is None:
                self.run = RunFolder(self.folder)
            if self.run is not None:
                self.run.write(record)
            send(record, self.loggers)
            if record["skipped"] > self.skipped:
                more, first = record["skipped"] - self.skipped, record["first_skipped"]
                self.skipped = record["skipped"]
                warnings.warn(
                    f"embeddings were not finite: {more} batches up to step {record['step']} are left out, the first "
                    f"ever was that of step {first}; what was recorded before is kept",
                    stacklevel=4,
                )


def _warn_if_compiled(module: nn.Module | None) -> None:
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if module is not None and (compiled or type(module).__name__ == "OptimizedModule"):
        warnings.warn(
            f"{type(module).__name__} has been compiled: hooks that are attached afterwards may see nothing; "
            "attach before torch.compile",
            stacklevel=5,
        )
