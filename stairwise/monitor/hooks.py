"""Monitor any training loop with one line: hooks collect embeddings, and records are written in the background.

    sw.SpectrumMonitor().attach(loss=criterion, backbone=model.backbone, optimizer=optimizer, log="run")

The loss module is called with both views of z, so hook it if you can. If the loss is a function, hook the projector, or
hook nothing and hand over the embeddings once per step:

    watch = sw.SpectrumMonitor().attach(optimizer=optimizer, log="run")
    watch.update(z_a, z_b, loss=loss)

Records go to RUN/metrics.jsonl, in the format of `stairwise.train`, and to loggers.
"""

import math
import time
import warnings
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, RunWarning, flag, positive_int
from stairwise.distributed import rank, total, world
from stairwise.monitor.attachable import check_modules, check_optimizer, warn_if_compiled
from stairwise.monitor.commentary import Commentary
from stairwise.monitor.decompose import decompose_on_one_core, pairs_in
from stairwise.monitor.loggers import destinations, send
from stairwise.runs.folder import METRICS, RunFolder
from stairwise.runs.record import Record
from stairwise.runs.writer import BackgroundWriter
from stairwise.staircase.advice import Advice

if TYPE_CHECKING:
    from stairwise.monitor.spectrum import SpectrumMonitor

FEWEST = 4  # a spectrum needs at least this many pairs per dimension
WAITING = 4  # number of records that may be queued; while the queue is full, no record is made
PATIENCE = 10  # number of updates without any view before a warning

_alive: set["Attachment"] = set()  # open attachments, so that the user need not keep a reference


class Attachment:
    """Hooks on the modules of a training loop, and their records; made by `SpectrumMonitor.attach`.

    A step is an update of the optimizer if one is given, otherwise a call of the loss (or of the projector on both
    views, or of `update`).

    Attributes:
        records: everything recorded so far; see `runs.record.Record`.
    """

    def __init__(
        self,
        monitor: "SpectrumMonitor",
        loss: nn.Module | None,
        projector: nn.Module | None,
        backbone: nn.Module | None,
        optimizer: Any,
        log: Any,
        every: int,
        joined: bool,
    ) -> None:
        check_modules(loss, projector, backbone)
        check_optimizer(optimizer)
        self.monitor, self.joined = monitor, flag(joined, "joined")
        self.every = positive_int(every, "every", remedy="write every=50")
        self.records: list[Record] = []
        self.step, self.t, self.seconds = 0, 0.0, 0.0
        self.began = time.perf_counter()
        folder, self.loggers = destinations(log) if rank() == 0 else (None, [])
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.commentary = Commentary(self.loggers)
        self.writer = BackgroundWriter(RunFolder(folder) if folder is not None else None)
        self.skipped, self.updates, self.taken, self.said = 0, 0, 0, set[str]()
        self.loss: Tensor | None = None  # sum since the last record
        self.losses = 0
        self.by_hand, self.watches_backbone = loss is None and projector is None, backbone is not None
        # views of one step; bounded, in case they are never paired
        self.seen_z: deque[Tensor] = deque(maxlen=4)
        self.seen_h: deque[Tensor] = deque(maxlen=4)
        for module in (loss, projector, backbone):
            warn_if_compiled(module)
        self.counts_updates = hasattr(optimizer, "register_step_post_hook")
        self.optimizer = None if self.counts_updates else optimizer  # kept only if needed, because it holds the model
        self.hooks = self._hook(loss, projector, backbone, optimizer)
        _alive.add(self)

    def _hook(
        self, loss: nn.Module | None, projector: nn.Module | None, backbone: nn.Module | None, optimizer: Any
    ) -> list[Any]:
        handles = []
        if self.counts_updates:
            handles.append(optimizer.register_step_post_hook(_Hook(self, "_after_update")))
        if backbone is not None:
            handles.append(backbone.register_forward_hook(_Hook(self, "_after_backbone")))
        if loss is not None:
            handles.append(loss.register_forward_pre_hook(_Hook(self, "_before_loss"), with_kwargs=True))
            handles.append(loss.register_forward_hook(_Hook(self, "_after_loss")))
        if projector is not None:
            handles.append(projector.register_forward_hook(_Hook(self, "_after_projector")))
        return handles

    def close(self) -> None:
        """Remove the hooks and finish writing."""
        for hook in self.hooks:
            hook.remove()
        _alive.discard(self)
        self._settle(wait=True)
        try:
            self.writer.close()
        except OSError as error:
            self._warn(f"records are not written: {error}")
        if self.taken == 0:
            self._warn(f"no embeddings were seen: {self._why_none()}")

    def update(
        self,
        z_a: Tensor,
        z_b: Tensor,
        h_a: Tensor | None = None,
        h_b: Tensor | None = None,
        *,
        loss: Tensor | float | None = None,
    ) -> None:
        """Hand over a batch of pairs, (N, d) each, once per step, if neither loss nor projector is hooked.

        Arguments:
            z_a, z_b: embeddings of the two views; h_a, h_b: representations, if wanted. Gradients are not needed.
            loss: of this batch. In data-parallel training every process must call this, with or without a loss alike.
        """
        if not self.by_hand:
            raise InputError("update", "must not be called when loss or projector is hooked", None, "leave these out")
        if (h_a is None) != (h_b is None):
            raise InputError("h_a and h_b", "must be given together")
        first = not self.taken
        hidden = None if h_a is None or h_b is None else (_pooled(h_a), _pooled(h_b))
        add_loss = partial(self._add_loss, loss, getattr(z_a, "device", None))
        for part in (add_loss, partial(self._take, z_a, z_b, hidden), self._count_call):
            try:
                part()
            except Exception as error:
                if first:
                    raise
                self._warn(f"the monitor skipped a step: {error}")  # once it has worked, it must not stop training

    @property
    def advice(self) -> Advice:
        """What the run is doing now, judged by the records so far: `print(watch.advice)`."""
        return self.commentary.advice

    def state(self) -> dict[str, Any]:
        """Numbers and tensors for your checkpoint, from which `load` continues."""
        self._settle(wait=True)
        numbers: dict[str, Any] = {
            "step": self.step,
            "t": self.t,
            "seconds": self._elapsed(),
            "skipped": self.skipped,
            "log_size": self.writer.folder.size if self.writer.folder is not None else 0,
        }
        if self.loss is not None:
            numbers["loss"] = [self.loss.item(), self.losses]
        return numbers | {f"monitor.{name}": value.clone() for name, value in self.monitor.state().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`, before the first step; lines of metrics.jsonl written after it are removed."""
        self.step, self.t, self.seconds = int(state["step"]), float(state["t"]), float(state["seconds"])
        self.skipped, self.began = int(state["skipped"]), time.perf_counter()
        tensors = {k.removeprefix("monitor."): v for k, v in state.items() if k.startswith("monitor.")}
        self.monitor.load(tensors)
        value, self.losses = state.get("loss", (None, 0))
        self.loss = None if value is None else torch.tensor(value, dtype=torch.float64)
        if self.writer.folder is not None:
            self.writer.folder = RunFolder(self.writer.folder.folder, int(state["log_size"]))
            self.commentary.recall(self.writer.folder.folder / METRICS)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # hooks

    def _after_backbone(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and isinstance(output, Tensor) and output.ndim > 1:
            self.seen_h.append(_pooled(output.detach()))

    def _before_loss(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # evaluation
            return
        views = (*args, *kwargs.values())[:2]
        if len(views) < 2 or not all(isinstance(z, Tensor) for z in views):
            raise InputError(
                "loss", "must be called with (z_a, z_b)", [type(v).__name__ for v in views], "hook projector="
            )
        self._take(views[0].detach(), views[1].detach())

    def _after_loss(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if isinstance(output, Tensor) and output.numel() == 1:
            self._add_loss(output)
        self._count_call()

    def _after_projector(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not isinstance(output, Tensor):
            raise InputError("projector", "must return a tensor", type(output).__name__, "hook another module")
        self.seen_z.append(output.detach())
        pair = self._pair(self.seen_z)
        if pair is not None:
            self._take(*pair)
            self._count_call()

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        self.t += float(optimizer.param_groups[0]["lr"])
        self.step += 1
        self.updates += 1
        if self.seen_z:  # a single view must not be paired with one of the next step
            self._warn("the projector must be called twice per step, once per view: hook the loss, or set joined=True")
        self.seen_z.clear()
        self.seen_h.clear()
        if self.updates == PATIENCE and self.taken == 0:
            self._warn(f"no embeddings seen so far: {self._why_none()}")
        self._record_if_due()

    def _pair(self, seen: deque[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Take both views from the outputs that a hook has collected, and clear these."""
        if self.joined and seen:
            a, b = seen.pop().chunk(2)
            seen.clear()
            return a, b
        if len(seen) < 2:
            return None
        b, a = seen.pop(), seen.pop()
        seen.clear()
        return a, b

    def _add_loss(self, loss: Tensor | float | None, device: torch.device | None = None) -> None:
        """Add the loss of a batch, without waiting; numbers are put on `device`."""
        if loss is None:
            return
        if isinstance(loss, bool) or not isinstance(loss, Tensor | int | float):
            raise InputError("loss", "must be a number or a tensor", type(loss).__name__, "write loss=loss.detach()")
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device=device)
        if value.numel() != 1:
            shape = f"shape {tuple(value.shape)}"
            raise InputError("loss", "must be a single number", shape, "take the mean over the batch")
        if self.loss is None:
            self.loss = value.new_zeros((), dtype=torch.float64)
        self.loss = self.loss.to(value.device) + value.reshape(())
        self.losses += 1

    def _take(self, z_a: Tensor, z_b: Tensor, hidden: tuple[Tensor, Tensor] | None = None) -> None:
        hidden = hidden or self._pair(self.seen_h)
        if hidden is not None and hidden[0].shape != hidden[1].shape:
            hidden = None
        if self.watches_backbone and hidden is None:
            self._warn(
                "the backbone was not called once per view, so its spectrum is left out: "
                "attach before torch.compile, or set joined=True"
            )
        try:
            self.monitor.collect(z_a, z_b, *(hidden or ()))
        except InputError as error:
            if hidden is None:
                raise
            self._warn(f"representations are left out: {error}")
            self.monitor.collect(z_a, z_b)
        self.taken += 1
        if self.taken == 1 and self.monitor.window is not None and self.monitor.window < FEWEST * z_a.shape[1]:
            self._warn(
                f"a window of {self.monitor.window} pairs is short for {z_a.shape[1]} dimensions: use at least 4 d"
            )

    def _count_call(self) -> None:
        """Count a step, unless the optimizer's updates are counted."""
        if not self.counts_updates:
            self.t += 1.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
            self.step += 1
            self._record_if_due()

    # records

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.began

    def _record_if_due(self) -> None:
        if self.step % self.every == 0 and self.taken and self._enough():
            self._record()
        self._settle()

    def _enough(self) -> bool:
        """Whether to record now: enough pairs (fewer give mostly noise), and room in the queue."""
        if world() > 1:  # all processes must decide alike, otherwise their collectives do not match
            return True
        if len(self.writer) >= WAITING:
            return False
        d = self.monitor.dimensions() or 0
        resets = self.monitor.window is None and self.monitor.half_life is None
        return not resets or self.monitor.seen >= FEWEST * d

    def _record(self) -> None:
        sums = self.monitor.snapshot(joint=True)
        record = Record(step=self.step, t=self.t, seconds=self._elapsed(), loss=self._mean_loss())
        if self.monitor.window is None and self.monitor.half_life is None:
            self.monitor.reset()
        if rank() == 0 and len(self.writer) < WAITING:
            self.writer.submit(lambda: self._made(record, sums))

    def _mean_loss(self) -> float | None:
        """Mean over all processes since the last record; None if no loss was seen or it is not finite."""
        if self.loss is None:
            return None
        value, number = total(torch.stack([self.loss, torch.full_like(self.loss, self.losses)])).tolist()
        self.loss, self.losses = None, 0
        return value / number if math.isfinite(value) else None

    def _made(self, record: Record, sums: dict[str, Any]) -> Record:
        record = self._measured(record, sums)
        self.commentary.hear(record)
        return record

    def _measured(self, record: Record, sums: dict[str, Any]) -> Record:
        """Add the spectra to a record; runs in the background."""
        try:
            if pairs_in(sums) < 2:
                raise InputError("the embeddings", "must be finite in at least two pairs")
            return replace(record, **vars(decompose_on_one_core(sums, self.monitor.normalized)))
        except Exception as error:  # must not stop the training
            skipped, first = int(sums["flaws"][1]), int(sums["flaws"][2])
            return replace(record, skipped=skipped, first_skipped=first, extra={"failed": str(error)})

    def _settle(self, wait: bool = False) -> None:
        """Collect finished records, in order; errors of the background become warnings."""
        for record, error in self.writer.wait() if wait else self.writer.finished():
            self._append(replace(record, leading=None))
            if error is not None:
                self._warn(f"records are not written: {error}")

    def _append(self, record: Record) -> None:
        self.records.append(record)
        send(record, self.loggers, self.commentary.about(record))
        if record.skipped > self.skipped:
            more, self.skipped = record.skipped - self.skipped, record.skipped
            warnings.warn(
                f"embeddings were not finite: {more} batches up to step {record.step} are left out; the first such "
                f"batch of the run was number {record.first_skipped}; earlier records are kept",
                RunWarning,
                stacklevel=5,
            )
        elif "failed" in record.extra:
            self._warn(f"no spectrum at step {record.step}: {record.extra['failed']}")

    def _why_none(self) -> str:
        if self.by_hand:
            return "call watch.update(z_a, z_b, loss=…) once per step, or attach with loss= or projector="
        return "the hooked modules are not called; attach before torch.compile"

    def _warn(self, message: str) -> None:
        """Warn, once per message."""
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, RunWarning, stacklevel=4)


def _pooled(h: Tensor) -> Tensor:
    """Average over positions: (N, channels, height, width) or (N, tokens, features) → (N, features)."""
    if not isinstance(h, Tensor):
        raise InputError("h", "must be a torch tensor", type(h).__name__, "use torch.as_tensor")
    return h.flatten(2).mean(dim=2) if h.ndim > 3 else h.mean(dim=1) if h.ndim == 3 else h


class _Hook:
    """Calls a method of an attachment while it exists; in copies and pickles of the hooked module it does nothing."""

    def __init__(self, watch: "Attachment | None", name: str) -> None:
        self.watch, self.name = weakref.ref(watch) if watch is not None else None, name

    def __call__(self, *args: Any) -> None:
        watch = self.watch() if self.watch is not None else None
        if watch is None:
            return
        try:
            getattr(watch, self.name)(*args)
        except Exception as error:
            if not watch.taken:  # it was attached wrongly, and the user must fix that
                raise
            watch._warn(f"the monitor skipped a step: {error}")  # once it has worked, it must not stop training

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self.name)
