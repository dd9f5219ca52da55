"""The monitor as a Lightning callback; it takes one line in a training script.

    trainer = L.Trainer(callbacks=[SpectrumCallback()])

It works with the Trainers of `lightning` and `pytorch_lightning`, whichever is installed.
"""

import math
from pathlib import Path
from typing import Any

from stairwise.checks import InputError
from stairwise.monitor.attachable import Modules, Teller
from stairwise.monitor.hooks import Attachment
from stairwise.monitor.loggers import STEP, Values, only_numbers
from stairwise.monitor.names import checked_settings, named
from stairwise.monitor.spectrum import SpectrumMonitor

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        Callback = None


class SpectrumCallback(Callback or object):  # type: ignore[misc]
    """Records the spectra of a LightningModule during training; `SpectrumMonitor.attach` explains the arguments.

    Arguments:
        loss, projector, backbone: names of submodules, such as "criterion" or "model.backbone". Without loss and
            projector they are searched for: z comes from the arguments of a loss (`criterion`, `loss`, `loss_fn`,
            `*_loss`) if the first update shows that it is called once with two views, otherwise from a projector
            (`projection_head`, `projector`, `student_head`, `head`, …) that is called for two views. If you call
            `callback.watch.update(z_a, z_b, loss=…)` in your training_step, z comes from that.
        every: steps between records.
        folder: where metrics.jsonl is written; default: the logger's folder, or the trainer's.
        joined: both views pass through projector and backbone as one batch.
        views: number of global crops, or a function that returns (z_a, z_b).
        monitor: your own monitor, for example with a window.

    Numbers, but no text, are also sent to the trainer's loggers, under stairwise/; `print(callback.watch.advice)` shows
    the text. Lightning's checkpoints hold the callback's state.
    """

    def __init__(
        self,
        loss: str | None = None,
        projector: str | None = None,
        backbone: str | None = None,
        *,
        every: int = 50,
        folder: str | Path | None = None,
        joined: bool = False,
        views: Any = None,
        monitor: SpectrumMonitor | None = None,
    ) -> None:
        if Callback is None:
            raise InputError("lightning", "must be installed", None, "pip install lightning")
        self.names = {"loss": loss, "projector": projector, "backbone": backbone}
        self.options, self.monitor = checked_settings(self.names, every, joined, views, monitor)
        self.tell = Teller()
        self.folder = folder
        self.watch: Attachment | None = None
        self.stored: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, now that the optimizers exist and a checkpoint has been read."""
        try:
            self._attach(trainer, pl_module)
        except Exception as error:  # the training goes on without a monitor
            self.watch = Attachment(self.monitor, Modules(), None, None, **self.options)  # takes updates by hand
            self.tell(f"nothing is recorded: {error}")

    def _attach(self, trainer: Any, pl_module: Any) -> None:
        modules = named(pl_module, self.names, "SpectrumCallback")
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        log = [folder, *(_Relay(logger, trainer) for logger in trainer.loggers)]
        if self.watch is not None and self.stored is None:
            self.stored = self.watch.state()  # `fit` was called again: continue
        self.watch = Attachment(self.monitor, modules, optimizer, log, **self.options)
        if self.stored is not None:
            self.watch.load(self.stored)
            self.stored = None
        if pl_module.automatic_optimization and (left := _updates_left(trainer)) is not None:
            self.watch.recorder.updates = self.watch.step + left

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish writing."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish writing, so that nothing measured is lost."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """State for Lightning's checkpoints."""
        try:
            return self.watch.state() if self.watch is not None else {}
        except Exception as error:  # the checkpoint is worth more than the records
            self.tell(f"the checkpoint does not hold the monitor: {error}")
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read the state from Lightning's checkpoints."""
        self.stored = state_dict or None

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()


def _updates_left(trainer: Any) -> int | None:
    """Number of updates to come; None if Lightning does not know it, or if there are several optimizers."""
    if len(trainer.optimizers) != 1:
        return None
    try:
        left = float(trainer.estimated_stepping_batches) - trainer.global_step
    except Exception:  # it asks the user's own loaders
        return None
    return int(left) if 0 < left < math.inf else None


class _Relay:
    """Wraps a Lightning logger as an object with `.log(dict)`."""

    def __init__(self, logger: Any, trainer: Any) -> None:
        self.logger, self.trainer = logger, trainer

    def log(self, values: Values) -> None:
        numbers = only_numbers(values)  # Lightning's loggers take no text
        shown = {name: value for name, value in numbers.items() if name != STEP}  # the step is the axis
        self.logger.log_metrics(shown, step=int(numbers[STEP]))
