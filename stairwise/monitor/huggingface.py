"""The monitor as a callback of Hugging Face's Trainer.

    trainer = Trainer(model, args, train_dataset=pairs, callbacks=[SpectrumTrainerCallback()])

The model computes its loss from two views in `forward`, with submodules for the loss or the projector.
"""

from pathlib import Path
from typing import Any

from stairwise.checks import InputError
from stairwise.monitor.attachable import Modules, Teller
from stairwise.monitor.hooks import Attachment
from stairwise.monitor.names import checked_settings, named
from stairwise.monitor.spectrum import SpectrumMonitor

try:
    from transformers import TrainerCallback
except ImportError:
    TrainerCallback = None


class SpectrumTrainerCallback(TrainerCallback or object):  # type: ignore[misc]
    """Records the spectra of a model that transformers' Trainer trains.

    Arguments:
        loss, projector, backbone: names of submodules of the model; without loss and projector they are searched for,
            as by `SpectrumCallback`.
        every: steps between records.
        folder: where metrics.jsonl is written; default: `output_dir` of the trainer's arguments.
        log: a wandb run, a TensorBoard writer, or a list of such, beside the folder.
        joined: both views pass through projector and backbone as one batch.
        views: number of global crops, or a function that returns (z_a, z_b).
        monitor: your own monitor, for example with a window.

    `callback.watch` is the attachment: `print(callback.watch.advice)`. Trainer's checkpoints do not hold it; store
    `callback.watch.state()` yourself to continue.
    """

    def __init__(
        self,
        loss: str | None = None,
        projector: str | None = None,
        backbone: str | None = None,
        *,
        every: int = 50,
        folder: str | Path | None = None,
        log: Any = None,
        joined: bool = False,
        views: Any = None,
        monitor: SpectrumMonitor | None = None,
    ) -> None:
        if TrainerCallback is None:
            raise InputError("transformers", "must be installed", None, "pip install transformers")
        self.names = {"loss": loss, "projector": projector, "backbone": backbone}
        self.options, self.monitor = checked_settings(self.names, every, joined, views, monitor)
        self.folder, self.log = folder, log
        self.tell = Teller()
        self.watch: Attachment | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Attach, now that the optimizer exists."""
        try:
            modules = named(parts["model"], self.names, "SpectrumTrainerCallback")
            others = self.log if isinstance(self.log, list | tuple) else [] if self.log is None else [self.log]
            log = [Path(self.folder or args.output_dir), *others]
            left = state.max_steps - state.global_step  # this monitor counts from 0, also if the trainer goes on
            updates = left if left > 0 else None
            self.watch = Attachment(self.monitor, modules, parts.get("optimizer"), log, **self.options, updates=updates)
        except Exception as error:  # the training goes on without a monitor
            self.watch = Attachment(self.monitor, Modules(), None, None, **self.options)  # takes updates by hand
            self.tell(f"nothing is recorded: {error}")

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Finish writing."""
        if self.watch is not None:
            self.watch.close()
