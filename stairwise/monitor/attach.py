"""One line in anybody's training loop: hooks that feed a monitor, and records that it leaves.

    sw.SpectrumMonitor().attach(loss=criterion, backbone=model.backbone, optimizer=optimizer, log="run")

The loss module is called with both views of z, so a hook on it sees them as they are; where the loss is a function,
hook the projector. Records go to RUN/metrics.jsonl (and to any object with `.log(dict)`) in the form that
`stairwise.train` writes, decomposed in the background.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stairwise.checks import InputError, positive_int
from stairwise.monitor.log import MetricsLog
from stairwise.monitor.spectrum import SpectrumMonitor, decompose

__all__ = ["Attachment"]


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
        self.step, self.t = 0, 0.0
        self.log, self.sink = _sinks(log)
        self.background = ThreadPoolExecutor(1)
        self.writing: list[Future[str]] = []
        self.seen_z: list[Tensor] = []
        self.seen_h: list[Tensor] = []
        for module in (loss, projector, backbone):
            _warn_if_compiled(module)
        self.hooks = []
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
        if self.log is not None:
            self.log.close()

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

    def _take(self, z_a: Tensor, z_b: Tensor) -> None:
        hidden = self._pair(self.seen_h)
        self.monitor.update(z_a, z_b, *(hidden or ()))
        self.step += 1
        self.t += self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else 1.0
        if self.step % self.every == 0:
            sums, record = self.monitor.snapshot(), {"step": self.step, "t": float(self.t)}
            if self.monitor.window is None and self.monitor.half_life is None:
                self.monitor.reset()
            self._settle(finished_only=True)
            self.writing.append(self.background.submit(self._write, record, sums))

    def _write(self, record: dict[str, Any], sums: dict[str, Any]) -> str:
        """Decompose and write, in the background; returns what the user should be warned of."""
        warning = ""
        if not all(np.isfinite(value).all() for value in sums.values()):
            first, last = record["step"] - self.every + 1, record["step"]
            warning = f"embeddings were not finite between steps {first} and {last}; earlier records are kept"
            record["finite"] = False
            self.monitor.reset()
        else:
            record |= {k: v for k, v in vars(decompose(sums, self.monitor.normalized)).items() if v is not None}
        self.records.append(record)
        if self.log is not None:
            self.log.write(dict(record))
        if self.sink is not None:
            self.sink.log({k: v for k, v in record.items() if np.ndim(v) == 0})
        return warning

    def _settle(self, finished_only: bool = False) -> None:
        """Let errors and warnings of the background surface."""
        waiting = []
        for job in self.writing:
            if finished_only and not job.done():
                waiting.append(job)
            elif warning := job.result():
                warnings.warn(warning, stacklevel=2)
        self.writing = waiting


def _sinks(log: Any) -> tuple[MetricsLog | None, Any]:
    if log is None:
        return None, None
    if isinstance(log, str | Path):
        return MetricsLog(Path(log) / "metrics.jsonl"), None
    if not callable(getattr(log, "log", None)):
        raise InputError("log", "must be a folder or have a method .log(dict)", type(log).__name__)
    return None, log


def _warn_if_compiled(module: nn.Module | None) -> None:
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if module is not None and (compiled or type(module).__name__ == "OptimizedModule"):
        warnings.warn(
            f"{type(module).__name__} has been compiled: hooks that are attached afterwards may see nothing; "
            "attach before torch.compile",
            stacklevel=5,
        )
