"""Runs of a case: in Lightning's Trainer, in a plain loop."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from stairwise.monitor.lightning import SpectrumCallback
from stairwise.runs.log import read_log
from tests.monitor.libraries.harness import STEPS, Case, Run, Spy, observed

QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)


class Begin(pl.Callback):
    """Tells the spy where steps begin."""

    def __init__(self, spy: Spy):
        self.spy = spy

    def on_train_batch_start(self, *_: Any) -> None:
        self.spy.begin()


def watched_modules(case: Case) -> list[str]:
    z = (case.z,) if isinstance(case.z, str) else case.z or ()
    return [*z, *([case.h] if case.h is not None else [])]


def in_lightning(case: Case, folder: Path, line: dict[str, Any] | None) -> Run:
    """Train with the callback, or without it if the line is None."""
    torch.manual_seed(0)
    model = case.build()
    spy = Spy(model, *watched_modules(case))
    callbacks: list[Any] = [Begin(spy)]
    if line is not None:
        callbacks.append(SpectrumCallback(**line, every=STEPS, folder=folder))
    batches = torch.utils.data.DataLoader([case.batch(step) for step in range(STEPS)], batch_size=None)

    def train():
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **QUIET
        )
        torch.manual_seed(1)
        trainer.fit(model, batches)

    error, said = observed(train)
    log = folder / "metrics.jsonl"
    records = read_log(log)[0] if log.exists() else []
    return Run([p.detach().clone() for p in model.state_dict().values()], records, said, spy, error)
