"""Runs of a case: in Lightning's Trainer, in a plain loop, in Hugging Face's Trainer."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

import stairwise as sw
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


def built(case: Case) -> tuple[torch.nn.Module, Spy]:
    torch.manual_seed(0)
    model = case.build()
    return model, Spy(model, *watched_modules(case))


def ended(model: torch.nn.Module, spy: Spy, folder: Path, error: Exception | None, said: list[str]) -> Run:
    log = folder / "metrics.jsonl"
    records = read_log(log)[0] if log.exists() else []
    return Run([p.detach().clone() for p in model.state_dict().values()], records, said, spy, error)


def in_lightning(case: Case, folder: Path, line: dict[str, Any] | None) -> Run:
    """Train with the callback, or without it if the line is None."""
    model, spy = built(case)
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

    return ended(model, spy, folder, *observed(train))


def in_plain_loop(case: Case, folder: Path, line: dict[str, Any] | None) -> Run:
    """Train an own loop; the line names modules of the model. A line without modules hands embeddings over by hand."""
    model, spy = built(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    batches = [case.batch(step) for step in range(STEPS)]

    def train():
        watch = None
        if line is not None:
            given = {role: attrgetter(name)(model) if isinstance(name, str) else name for role, name in line.items()}
            watch = sw.SpectrumMonitor().attach(**given, optimizer=optimizer, log=folder, every=STEPS)
            model.watch = watch if not line else None
        torch.manual_seed(1)
        for batch in batches:
            spy.begin()
            optimizer.zero_grad()
            model.step(batch)
            optimizer.step()
        if watch is not None:
            watch.close()

    return ended(model, spy, folder, *observed(train))
