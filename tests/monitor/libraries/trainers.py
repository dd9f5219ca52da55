"""Runs of a case: in Lightning's Trainer, in a plain loop, in Hugging Face's Trainer."""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn

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


def built(case: Case) -> tuple[nn.Module, Spy]:
    pl.seed_everything(0, verbose=False)
    model = case.build()
    return model, Spy(model, *watched_modules(case))


def ended(model: nn.Module, spy: Spy, folder: Path, error: Exception | None, said: list[str]) -> Run:
    log = folder / "metrics.jsonl"
    records = read_log(log)[0] if log.exists() else []
    return Run([p.detach().clone() for p in model.state_dict().values()], records, said, spy, error)


def in_lightning(case: Case, folder: Path, line: dict[str, Any] | None) -> Run:
    """Train with the callback, or without it if the line is None."""
    model, spy = built(case)
    callbacks: list[Any] = [Begin(spy)]
    if line is not None:
        callbacks.append(SpectrumCallback(**line, every=STEPS, folder=folder))
        if case.by_hand:
            model.callback = callbacks[-1]
    batches = torch.utils.data.DataLoader([case.batch(step) for step in range(STEPS)], batch_size=None)

    def train():
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **QUIET)
        pl.seed_everything(1, verbose=False)
        trainer.fit(model, batches)

    return ended(model, spy, folder, *observed(train))


def in_plain_loop(case: Case, folder: Path, line: dict[str, Any] | None) -> Run:
    """Train an own loop; the line names modules of the model."""
    model, spy = built(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    batches = [case.batch(step) for step in range(STEPS)]

    def train():
        watch = None
        if line is not None:
            given = {role: attrgetter(name)(model) if isinstance(name, str) else name for role, name in line.items()}
            watch = sw.SpectrumMonitor().attach(**given, optimizer=optimizer, log=folder, every=STEPS)
            if case.by_hand:
                model.watch = watch
        pl.seed_everything(1, verbose=False)
        for batch in batches:
            spy.begin()
            optimizer.zero_grad()
            model.step(batch) if hasattr(model, "step") else model(*batch).backward()
            optimizer.step()
        if watch is not None:
            watch.close()

    return ended(model, spy, folder, *observed(train))


def under_ddp(case: Case, folder: Path, line: dict[str, Any] | None) -> Run:
    """A plain loop with DistributedDataParallel, one process; modules are those of `model.module`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = replace(case, build=lambda: nn.parallel.DistributedDataParallel(case.build()))
        return in_plain_loop(wrapped, folder, line)
    finally:
        dist.destroy_process_group()


def in_hugging_face(case: Case, folder: Path, line: dict[str, Any] | None) -> Run:
    """Train in transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from stairwise.monitor.huggingface import SpectrumTrainerCallback

    class Begins(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            spy.begin()

    model, spy = built(case)
    callbacks: list[Any] = [Begins()]
    if line is not None:
        callbacks.append(SpectrumTrainerCallback(**line, every=STEPS, folder=folder))
    views = [torch.cat(view) for view in zip(*map(case.batch, range(STEPS)), strict=True)]
    samples = [{"view_a": a, "view_b": b} for a, b in zip(*views, strict=True)]

    def train():
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=len(samples) // STEPS,
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        Trainer(model, arguments, train_dataset=samples, callbacks=callbacks).train()

    return ended(model, spy, folder, *observed(train))
