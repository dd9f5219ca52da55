"""Monitor any training loop with one line: hooks collect embeddings, and records are written in the background.

    sw.SpectrumMonitor().attach(loss=criterion, backbone=model.backbone, optimizer=optimizer, log="run")

The loss module is called with both views of z, so hook it if you can. If the loss is a function, or compares
predictions with targets (BYOL, SimSiam, DINO), hook the projector; or hook nothing and hand over the embeddings once
per step:

    watch = sw.SpectrumMonitor().attach(optimizer=optimizer, log="run")
    watch.update(z_a, z_b, loss=loss)

Records go to RUN/metrics.jsonl, in the format of `stairwise.train`, and to loggers. After `attach` has returned,
nothing that goes wrong in hooks and records stops the training: it is said once, as a warning.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, flag, positive_int
from stairwise.distributed import rank, world
from stairwise.monitor.attachable import Modules, Teller, checked_optimizer, checked_views, warn_if_compiled
from stairwise.monitor.passes import BY_HAND, EITHER, LOSS, PROJECTOR, PairFinder
from stairwise.monitor.recorder import Recorder
from stairwise.monitor.rollcall import RollCall
from stairwise.monitor.views import pooled, representation, value_of_loss
from stairwise.runs.record import Record
from stairwise.runs.writer import BackgroundWriter
from stairwise.staircase.advice import Advice

if TYPE_CHECKING:
    from stairwise.monitor.spectrum import SpectrumMonitor

PATIENCE = 10  # number of updates without any view before a warning
STILL = 500  # number of batches without any update before a warning
PAIRED, ALIKE, CLOSE = 4, 0.02, 0.9  # first records of joined views, and cosines by which paired rows seem unrelated
TO_SEE_CALLS = "attach before torch.compile, and checkpoint activations with use_reentrant=False"

_alive: set["Attachment"] = set()  # open attachments, so that the user need not keep a reference


class Attachment:
    """Hooks on the modules of a training loop, and their records; made by `SpectrumMonitor.attach`.

    A step is an update of the optimizer if one is given, otherwise a call of the loss (or of the projector on both
    views, or of `update`).
    """

    def __init__(
        self,
        monitor: "SpectrumMonitor",
        modules: Modules,
        optimizer: Any,
        log: Any,
        every: int,
        joined: bool,
        views: Any = None,
        updates: int | None = None,
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        monitor.load({})  # forget what it saw in an earlier loop
        # modules are not kept: an attachment that is never closed must not keep the model in memory
        self.monitor, self.automatic, self.expects_h = monitor, modules.automatic, modules.backbone is not None
        self.nameless = modules.automatic and modules.loss is None and not modules.projectors
        self.in_training: set[int] = set()  # ids of modules that have been called in training mode
        self.evaluating = False  # the last call of backbone or projector was in evaluation mode, with gradients
        self.loss_id = id(modules.loss)
        self.tell, self.process = Teller(), os.getpid()
        every = positive_int(every, "every", remedy="write every=50")
        joined, views = flag(joined, "joined"), checked_views(views)
        if updates is not None:
            updates = positive_int(updates, "updates", remedy="give the number of updates of the whole run")
        kinds = "-".join(type(module).__name__ for module in modules.all())
        self.recorder = Recorder(monitor, log, every, RollCall(f"{every}-{kinds}"), self.tell, updates)
        names = {id(module): name for name, module in modules.projectors.items()}
        source = EITHER if modules.automatic else PROJECTOR if names else LOSS if modules.loss is not None else BY_HAND
        self.finder = PairFinder(source, names, views, joined, modules.lines, self._take, self.tell, self._decided)
        self.taken, self.updates, self.since_update = 0, 0, 0
        self.compared = False  # whether the rows that `joined` pairs have been compared
        self.counts_updates = hasattr(optimizer, "register_step_post_hook")
        self.optimizer = None if self.counts_updates else optimizer  # kept only if needed, because it holds the model
        warn_if_compiled(modules.all(), self.tell)
        self.hooks = self._hook(modules, optimizer)
        _alive.add(self)

    def _hook(self, modules: Modules, optimizer: Any) -> list[Any]:
        loss, backbone, hook = modules.loss, modules.backbone, partial(_Hook, self)
        handles = []
        if self.counts_updates:
            handles.append(optimizer.register_step_pre_hook(hook("_before_update")))
            handles.append(optimizer.register_step_post_hook(hook("_after_update")))
        if backbone is not None:
            handles.append(backbone.register_forward_hook(hook("_after_backbone")))
        if loss is not None:
            handles.append(loss.register_forward_pre_hook(hook("_before_loss"), with_kwargs=True))
            handles.append(loss.register_forward_hook(hook("_after_loss")))
        for projector in modules.projectors.values():
            handles.append(projector.register_forward_hook(hook("_after_projector")))
        return handles

    @property
    def records(self) -> list[Record]:
        """Everything recorded so far; see `runs.record.Record`."""
        return self.recorder.records

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self.recorder.step

    @property
    def writer(self) -> BackgroundWriter:
        """Thread that completes and writes the records."""
        return self.recorder.writer

    @property
    def advice(self) -> Advice:
        """What the run is doing now, judged by the records so far: `print(watch.advice)`."""
        return self.recorder.commentary.advice

    def close(self) -> None:
        """Remove the hooks, record what has been collected since the last record, and finish writing."""
        self._close(joint=True)

    def _close(self, joint: bool) -> None:
        if self not in _alive or self._forked():
            return
        _alive.discard(self)
        for hook in self.hooks:
            hook.remove()
        for part in (self.finder.end, partial(self.recorder.close, joint)):
            self._carefully(part)
        self._say_what_is_missing("were seen")

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

        Wrong arguments are errors until a first pair has been taken; later they are warnings.
        """
        if self._forked():
            return
        if self.automatic:
            self.finder.by_hand()
        first = not self.taken and not self.step
        if self.finder.source != BY_HAND:
            error = InputError("update", "must not be called when loss or projector is hooked", None, "leave these out")
            if first:
                raise error
            self.tell(str(error))
            return
        add_loss = partial(self.recorder.add_loss, loss, getattr(z_a, "device", None))
        hidden = partial(self._collect_hidden, h_a, h_b)
        for part in (hidden, add_loss, partial(self._take, z_a, z_b), self._count_call):
            if first:
                part()
            else:
                self._carefully(part)

    def _collect_hidden(self, h_a: Tensor | None, h_b: Tensor | None) -> None:
        if (h_a is None) != (h_b is None):
            raise InputError("h_a and h_b", "must be given together")
        for h in (h_a, h_b):
            if h is not None:
                self.monitor.collect_hidden(pooled(h.detach() if isinstance(h, Tensor) else h))

    def state(self) -> dict[str, Any]:
        """Numbers and tensors for your checkpoint, from which `load` continues."""
        return {} if self._forked() else self.recorder.state()

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`, before the first step; lines of metrics.jsonl written after it are removed."""
        self.recorder.load(state)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # hooks

    def _counts(self, module: nn.Module) -> bool:
        """Whether a call of a module belongs to training: not if it is in evaluation mode and was in training mode.

        A loss is seldom put into evaluation mode. It is left out if the last call of backbone or projector was in
        evaluation mode, and none since the last update was in training mode.
        """
        if module.training:
            self.in_training.add(id(module))
        evaluates = not module.training and id(module) in self.in_training
        if id(module) != self.loss_id:
            self.evaluating = evaluates and torch.is_grad_enabled()
        elif self.evaluating and self.counts_updates and not self.finder.in_pass():
            return False
        return not evaluates and self.finder.counts()

    def _after_backbone(self, backbone: nn.Module, _: Any, output: Any) -> None:
        if not self._counts(backbone) or self.finder.hidden_calls >= 2:  # of more crops h need not be averaged
            return
        h = representation(output)
        if not self.finder.hidden(output, None if h is None else h.detach()):
            return
        if h is not None:
            self.monitor.collect_hidden(h.detach())
        else:
            self.tell(f"h is not recorded, because the backbone returns a {type(output).__name__} and not a tensor")

    def _before_loss(self, loss: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._counts(loss):
            self.finder.loss_called(loss, args, kwargs, by_call=not self.counts_updates)

    def _after_loss(self, loss: nn.Module, _: Any, output: Any) -> None:
        if not self._counts(loss):
            return
        value = value_of_loss(output)
        self.finder.watch_backward(value)
        if value is not None and value.numel() == 1:
            self.recorder.add_loss(value)
        if self.finder.source == LOSS and self.finder.loss_calls == 1:
            self._count_call()

    def _after_projector(self, projector: nn.Module, _: Any, output: Any) -> None:
        if self._counts(projector) and self.finder.projected(projector, output):
            self._count_call()

    def _before_update(self, *_: Any) -> None:
        self.finder.before_update()

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        self.updates, self.since_update = self.updates + 1, 0
        self._carefully(self.finder.after_update)
        if self.evaluating:  # an update followed, so it was training, with frozen statistics for example
            self.in_training, self.evaluating = set(), False
        if self.updates == PATIENCE:
            self._say_what_is_missing("seen so far")
        self._count(optimizer)

    # embeddings

    def _take(self, z_a: Tensor, z_b: Tensor) -> None:
        self.monitor.collect(z_a, z_b)
        h = self.finder.second_hidden(2 * len(z_a))
        if h is not None:
            self.monitor.collect_hidden(h)
        self.taken += 1
        self.recorder.took()
        self.since_update += 1
        if self.since_update == STILL and self.counts_updates:
            self.tell(
                f"the optimizer that was attached made no update in {STILL} batches, so nothing is recorded: attach "
                "the one whose step() is called (of SAM the base_optimizer), or leave optimizer= out"
            )
        if self.finder.joined and not self.compared and len(self.records) >= PAIRED:
            self._compare_pairs()
        window = self.monitor.window
        if self.taken == 1 and window is not None and window < self.monitor.pairs_wanted():
            self.tell(f"a window of {window} pairs is short for {z_a.shape[1]} dimensions: use at least 4 d")

    def _compare_pairs(self) -> None:
        """Warn if the rows that are paired are no more alike than any others."""
        self.compared = True
        cosines = [(r.positive, r.negative) for r in self.records[1:PAIRED]]
        if all(a is not None and b is not None and a - b < ALIKE and b < CLOSE for a, b in cosines):
            self.tell(
                "joined=True pairs the first half of a batch with the second, but these are no more alike than "
                "embeddings of different samples: if views are interleaved, give the projector and "
                "views=lambda z: (z[0::2], z[1::2]); if the batch holds one view only, use watch.update(z_a, z_b)"
            )

    def _decided(self, source: str) -> None:
        """Say in one line where z comes from, if that was found by itself."""
        if rank() == 0:
            print(f"stairwise: z is recorded from {source}", file=sys.stderr)
        if not self.counts_updates:
            self._count_call()

    def _count_call(self) -> None:
        """Count a step, unless the optimizer's updates are counted."""
        if not self.counts_updates:
            self._count(self.optimizer)

    def _count(self, optimizer: Any) -> None:
        """Count a step, and add its learning rate to t, that of the first group that moves; 1 if there is none."""
        groups = [] if optimizer is None else optimizer.param_groups
        lr = next((group["lr"] for group in groups if group.get("lr")), groups[0]["lr"] if groups else 1.0)
        if lr is None:
            self.tell("the optimizer has no learning rate, so t counts updates")
        self.recorder.count(1.0 if lr is None else float(lr))

    def _settle(self, wait: bool = False) -> None:
        self.recorder.settle(wait)

    # nothing may stop the training

    def _forked(self) -> bool:
        """Whether this is a copy in a forked process, which lacks the thread that writes."""
        return os.getpid() != self.process

    def _carefully(self, part: Callable[[], None]) -> None:
        """Call a function; an error becomes a warning."""
        try:
            part()
        except Exception as error:
            self.tell(f"the monitor skipped a step: {error}")

    def _say_what_is_missing(self, when: str) -> None:
        if self.taken == 0 and self.tell.said:  # the reason is known
            if self not in _alive:
                self.tell(f"no embeddings {when}, for the reason that was given before")
        elif self.taken == 0 and self.finder.source == BY_HAND:
            remedy = "call watch.update(z_a, z_b, loss=…) once per step, or attach with loss= or projector="
            self.tell(f"no embeddings {when}: {remedy}")
        elif self.taken == 0 and self.nameless:
            self.tell(
                f"no embeddings {when}: no loss or projector was found by name: use {self.finder.lines.projector}"
            )
        elif self.taken == 0:
            why = f"the hooked modules are not called, or not with two views; {TO_SEE_CALLS}"
            self.tell(f"no embeddings {when}: {why}")
        elif self.expects_h and self.monitor.dimensions("h") is None:
            self.tell(f"the backbone was not seen in a pass with gradients, so h is left out: {TO_SEE_CALLS}")


@atexit.register
def _close_all() -> None:
    """At the end of the interpreter, write what was collected; processes do not wait for each other any more."""
    for watch in list(_alive):
        watch._close(joint=world() == 1)


class _Hook:
    """Calls a method of an attachment while it exists; in copies and pickles of the hooked module it does nothing."""

    def __init__(self, watch: "Attachment | None", name: str) -> None:
        self.watch, self.name = weakref.ref(watch) if watch is not None else None, name

    def __call__(self, *args: Any) -> None:
        if "torch._dynamo" in sys.modules:
            _uncompiled()(self, *args)
        else:  # nothing is compiled, and importing the compiler costs seconds
            self.call(*args)

    def call(self, *args: Any) -> None:
        watch = self.watch() if self.watch is not None else None
        if watch is not None and not watch._forked():
            watch._carefully(partial(getattr(watch, self.name), *args))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self.name)


_left_alone: list[Callable[..., None]] = []


def _uncompiled() -> Callable[..., None]:
    """`_Hook.call`, which the compiler leaves alone: it would guard the monitor's counters, and compile every call."""
    if not _left_alone:  # not functools.cache, of which the compiler warns
        reason = "stairwise: with fullgraph=True, hook a module outside of what is compiled"
        _left_alone.append(torch.compiler.disable(_Hook.call, reason=reason))
    return _left_alone[0]
