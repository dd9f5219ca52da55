"""The training loop: views, embeddings, loss, update, measurement; it can resume after any step.

`train` is the entry point; `Trainer` holds the state, and `Trainer.step` is one step of training.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import repeat
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stairwise.checks import RunWarning, instance, number
from stairwise.data.feed import batch_rows
from stairwise.data.views import Pair
from stairwise.distributed import agreed, choose_device, process_group, rank, world
from stairwise.files import save_json
from stairwise.monitor.loggers import tensorboard_in
from stairwise.nets.encoder import Network
from stairwise.progress import Progress, silent
from stairwise.provenance import provenance
from stairwise.runs.folder import CHECKPOINTS, METRICS, RECIPE, WEIGHTS, RunFolder, discard, rename_log
from stairwise.runs.reader import Run
from stairwise.runs.record import Record, spectrum_of_loss
from stairwise.training import checkpoint, description
from stairwise.training.continuing import check_same, continued_calendar, note_of_length
from stairwise.training.following import follow
from stairwise.training.graph import Recorded, beside, prefetch
from stairwise.training.measure import held_out_spectra, probe_accuracies, scale_initially
from stairwise.training.networks import network_of
from stairwise.training.objective import AbstractObjective, Embedded, build_objective, capturable
from stairwise.training.optimizer import FlatOptimizer
from stairwise.training.process import StopRequest, locked
from stairwise.training.recipe import Recipe, load_recipe
from stairwise.training.recorder import Recorder
from stairwise.training.schedule import Schedule, Sizes
from stairwise.training.setup import fastest_convolutions, prepare, with_joint_norms
from stairwise.training.watchdog import Watchdog

ASK_EVERY = 10  # steps between two agreements of several processes on saving or stopping
GO_ON, SAVE, STOP = 0, 1, 2


class Stopped(RuntimeError):
    """A signal stopped the run; a checkpoint was written."""


class Diverged(RuntimeError):
    """The loss or the gradient is no longer finite."""


def train(
    recipe: Recipe | str,
    folder: str | Path | None = None,
    *,
    device: str = "auto",
    checkpoint_minutes: float = 5.0,
    restart: bool = False,
    tensorboard: bool = False,
    progress: Progress = silent,
    patience: float = 120.0,
) -> Run:
    """Train a recipe, or continue its training, and return the run.

    Arguments:
        recipe: a recipe or the name of one.
        folder: of the run; default `runs/NAME`, or `runs/LOSS` for a recipe object. An unfinished run of this recipe in
            the folder continues, and so does a shorter one, finished or not (its later learning rates follow the
            schedule of the new length); a finished one is returned unchanged.
        checkpoint_minutes: time between checkpoints; one is also written at the end and on Ctrl-C or SIGTERM.
        restart: discard the run in the folder.
        tensorboard: also write TensorBoard files (needs `tensorboard`).
        progress: called with the step, the number of steps and a short text.
        patience: seconds without progress in the first steps after which a warning names likely causes; 0: never.
    """
    remedy = "give its name, or make one: sw.load_recipe(NAME)"
    name = Path(recipe).stem if isinstance(recipe, str) else instance(recipe, "recipe", Recipe, remedy).loss
    default = folder is None or (isinstance(folder, str) and not folder)
    folder = Path("runs") / name if default else Path(instance(folder, "folder", (str, Path)))
    checkpoint_minutes = number(checkpoint_minutes, "checkpoint_minutes", least=0)
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    where = choose_device(device)
    with ExitStack() as stack:
        stack.enter_context(process_group(where))
        if rank() == 0:
            stack.enter_context(locked(folder))
            if restart:
                discard(folder)
        if world() > 1:
            dist.barrier()
        stack.enter_context(fastest_convolutions(where))
        stack.enter_context(torch.random.fork_rng(devices=[where] if where.type == "cuda" else []))
        trainer = Trainer(recipe, folder, where, tensorboard)
        stack.callback(trainer.close)
        if world() > 1:
            dist.barrier()  # all have read the checkpoint before the first process may replace it
        trainer.resume()
        stop = stack.enter_context(StopRequest())  # until here, Ctrl-C loses nothing
        stack.enter_context(Watchdog(lambda: trainer.step_number, patience, where.type == "cpu"))
        trainer.run(stop, 60 * checkpoint_minutes, progress)
    return Run(folder)


class Trainer:
    """The state of a run, and the operations on it."""

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device, tensorboard: bool = False) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.stored = checkpoint.newest(folder / CHECKPOINTS, checkpoint.RESUMABLE)
        if self.stored is not None:
            check_same(self.stored, recipe)
        torch.manual_seed(recipe.seed)
        self.material = prepare(recipe, device)
        network = network_of(recipe, self.material.view_shape).to(device)
        if recipe.channels_last and device.type == "cuda":
            cast(Any, network).to(memory_format=torch.channels_last)  # in place; missing from torch's type stubs
        self.alpha = self.stored.facts["alpha"] if self.stored else scale_initially(network, recipe, self.material)
        loss = recipe.loss, recipe.loss_options, recipe.precondition
        self.objective: AbstractObjective = build_objective(
            network, recipe.d, *loss, recipe.together, recipe.repeats
        ).to(device)
        if world() > 1:
            self.objective = with_joint_norms(self.objective, device)
        if recipe.compile:
            self.objective.compile_network()
        self.optimizer = FlatOptimizer(
            self.objective, recipe.optimizer, recipe.momentum, recipe.weight_decay, recipe.clip, recipe.scaling
        )
        self.calendar, self.continued = continued_calendar(recipe, self.material, self.stored)
        self.schedule = Schedule(recipe.schedule, self.calendar.total, self.calendar.warmup, recipe.final_lr)
        self.sizes = Sizes(recipe.sizes, self.calendar.total, self.material.pairs.size)
        self.step_number, self.t, self.seconds = 0, 0.0, 0.0
        self.about: dict[str, Any] = {}  # contents of recipe.json
        standardizes = recipe.loss == "barlow_twins" and recipe.loss_options.get("batch_norm", True)
        begun = self.stored.facts["step"] if self.stored else 0
        board = tensorboard_in(folder, begun) if tensorboard and rank() == 0 else None
        self.recorder = Recorder(
            device, bool(standardizes), recipe.hidden_spectrum, board, *(self._outlook() if board else ())
        )
        self.take = Recorded(self.step) if self.material.graph and capturable(recipe.loss) else self.step

    def _outlook(self) -> tuple[str, NDArray[np.float64]]:
        """The spectrum in which the loss takes its steps, and t = Σ lr after every step of the schedule, (steps,)."""
        return spectrum_of_loss(self.recipe.loss, self.recipe.loss_options), self.schedule.times(self.recipe.lr)

    # one step of training

    @property
    def network(self) -> Network:
        return self.objective.network

    def step(self, x_a: Tensor, x_b: Tensor, measure: bool) -> None:
        """Embed two views, compute loss and gradient, and update, without waiting for the device."""
        if not self.recipe.channels_last:  # a view in that order would make all that follows channels-last
            x_a, x_b = x_a.contiguous(), x_b.contiguous()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.material.bf16, cache_enabled=False):
            out: Embedded = self.objective(x_a, x_b)
        with beside(lambda: self.recorder.keep(out)) if measure else nullcontext():
            out.loss.backward()
            if world() > 1:
                dist.all_reduce(self.optimizer.gradient)
                self.optimizer.gradient.div_(world())
            gradient = self.optimizer.step()
            self.objective.after_step()
        self.recorder.observe(out.loss.detach(), gradient)

    def take_step(self, x_a: Tensor, x_b: Tensor, measure: bool) -> None:
        """Take a step, recorded or not, and count what it has measured."""
        self.take(x_a, x_b, measure=measure)
        if measure:
            self.recorder.observed()

    def fixed_pairs(self) -> Pair:
        """The pairs on which a recipe with `fixed_views` trains: this process's share."""
        x_a, x_b = self.material.pairs.fixed(torch.arange(self.material.training))
        return x_a.chunk(world())[rank()], x_b.chunk(world())[rank()]

    def remaining_pairs(self) -> Iterator[Pair]:
        """Pairs of views for all remaining steps."""
        if self.recipe.fixed_views:
            return repeat(self.fixed_pairs())
        material = self.material
        share = rank(), world(), self.recipe.repeats
        rows = batch_rows(material.training, material.batch, self.recipe.seed, self.step_number, *share)
        pairs = material.pairs.stream(rows, self.step_number, self.sizes.at)
        return prefetch(pairs) if self.device.type == "cuda" else pairs

    def advance(self, pairs: Iterator[Pair], measure: bool = False) -> None:
        """Take the next step of the run, on the next of its pairs; `measure`: add it to the spectra."""
        x_a, x_b = next(pairs)
        self.set_rates()
        self.take_step(x_a, x_b, measure=measure)
        self.step_number += 1

    # the run

    def run(self, stop: StopRequest, checkpoint_seconds: float, progress: Progress) -> None:
        calendar = self.calendar
        if self.step_number >= calendar.total:
            return
        self.objective.train()
        pairs = self.remaining_pairs()
        saved = began = time.perf_counter()
        first, earlier = self.step_number, self.seconds
        while self.step_number < calendar.total:
            self.advance(pairs, calendar.measures(self.step_number + 1))
            self.seconds = earlier + time.perf_counter() - began
            if self.step_number in calendar.records or self.step_number in calendar.probes:
                rate = 2 * self.material.batch * (self.step_number - first) / max(self.seconds - earlier, 1e-9)
                progress(self.step_number, calendar.total, self._record(rate))
            elif self.step_number % ASK_EVERY == 0:
                progress(self.step_number, calendar.total, "")
            if self.step_number in calendar.kept and rank() == 0:
                self._keep_weights()
            action = self._agree(stop, time.perf_counter() - saved > checkpoint_seconds)
            if action or self.step_number == calendar.total:
                path = self.save()
                saved = time.perf_counter()
            if action == STOP and self.step_number < calendar.total:
                raise Stopped(
                    f"stopped by {Signals(stop.signal or SIGTERM).name} after step {self.step_number} of "
                    f"{calendar.total}; {path} is complete: run the same command again to continue"
                )

    def close(self) -> None:
        self.recorder.close()

    def _agree(self, stop: StopRequest, due: bool) -> int:
        """The next action, the same on all processes: GO_ON, SAVE or STOP (after saving)."""
        if world() > 1 and self.step_number % ASK_EVERY:
            return GO_ON
        return agreed(STOP if stop.signal else SAVE if due else GO_ON, self.device)

    def set_rates(self) -> None:
        """Set the learning rates of the next step, and add that of the weights to t."""
        factor = self.schedule.factor(self.step_number)
        lr, lr_bias = self.recipe.lr * factor, (self.recipe.lr_bias or self.recipe.lr) * factor
        self.optimizer.lr[0].fill_(lr)
        self.optimizer.lr[1].fill_(lr_bias)
        self.t += lr

    def _record(self, rate: float) -> str:
        """Record everything that is due, and return a short text about it."""
        numbers = self.recorder.numbers()
        self._check_finite(numbers)
        accuracies: dict[str, float] = {}
        spectra: dict[str, Any] = {}
        if self.step_number in self.calendar.probes:
            accuracies = probe_accuracies(self.network, self.recipe, self.material)
            spectra = held_out_spectra(self.network, self.recipe, self.material)
        record = Record(
            step=self.step_number,
            t=self.t,
            epoch=self.step_number * self.material.batch / self.material.training,
            loss=numbers["loss"],
            gradient=numbers["gradient"],
            lr=self.recipe.lr * self.schedule.factor(self.step_number - 1),
            seconds=self.seconds,
            views_per_second=rate,
            extra=accuracies,
            **spectra,
        )
        self.recorder.write(record, self.step_number in self.calendar.records)
        if self.step_number in self.calendar.records:
            follow(self.objective, self.recipe, self.material, self.folder, self.step_number, self.t)
        return f"loss {numbers['loss']:.4g}, {rate:,.0f} views/s"

    def _check_finite(self, numbers: dict[str, float]) -> None:
        if not numbers["bad_step"]:
            return
        kept = checkpoint.every(self.folder / CHECKPOINTS)
        finite = bool(torch.isfinite(self.optimizer.values).all())
        first = int(numbers["bad_step"])
        since = self.step_number - first + 1
        # for the page of the run
        failed = {"failed": "the loss or the gradient was not finite"}
        record = Record(
            step=self.step_number,
            t=self.t,
            seconds=self.seconds,
            skipped=since,
            first_skipped=first,
            extra=failed,
        )
        self.recorder.write(record, spectrum=False)
        raise Diverged(
            f"training diverged: the loss or the gradient was first not finite at step {numbers['bad_step']:.0f} "
            f"(last gradient length {numbers['gradient']:.3g}, weights are {'' if finite else 'not '}finite, "
            f"lr {float(self.optimizer.lr[0]):.3g}); "
            + (f"last good checkpoint: {kept[0]}; " if kept else "no checkpoint was written; ")
            + "lower lr, lengthen warmup_epochs or set clip"
        )

    # initialization, saving, resuming

    def _keep_weights(self) -> None:
        self._check_finite(self.recorder.numbers())
        facts = {"t": self.t, "view_shape": self.material.view_shape}
        tensors = {f"objective.network.{k}": v for k, v in self.network.state_dict().items()}
        checkpoint.keep(self.folder / WEIGHTS, self.step_number, facts, tensors)

    def save(self) -> Path:
        """Write a checkpoint, unless training has diverged."""
        self._check_finite(self.recorder.numbers())
        self.recorder.settle()
        path, log = self.folder / CHECKPOINTS, self.recorder.writer.folder
        measured = self.recorder.state()
        if log is not None:
            log.sync()
            tensors = {f"objective.{k}": v for k, v in self.objective.state_dict().items()}
            tensors |= self.optimizer.state() | measured
            tensors["rng.cpu"] = torch.get_rng_state()
            if self.device.type == "cuda":
                tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
            facts = {
                "recipe": self.recipe.plain(),
                "about": {name: value for name, value in self.about.items() if name != "recipe"},
                "t": self.t,
                "alpha": self.alpha,
                "seconds": self.seconds,
                "log_size": log.size,
                "momentum": "contiguous",
                "images": self.material.identity(self.recipe.data),
                "continued": self.continued,
                "view_shape": self.material.view_shape,
            }
            path = checkpoint.save(path, self.step_number, facts, tensors)
        if world() > 1:
            dist.barrier()
        return path

    def resume(self) -> None:
        """Continue from the newest complete checkpoint, or begin a new run."""
        stored = self.stored
        if stored is None:
            if rank() == 0:
                self._begin()
            return
        self.material.check_same(self.recipe.data, stored.facts["images"])
        self.objective.load_state_dict(stored.part("objective"))
        in_memory_order = stored.facts.get("momentum") != "contiguous" and stored.facts["recipe"]["channels_last"]
        self.optimizer.load(stored.tensors, channels_last=in_memory_order)
        self.recorder.load(stored.tensors["numbers"], stored.part("monitor"), stored.part("shelf"))
        torch.set_rng_state(stored.tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in stored.tensors:
            torch.cuda.set_rng_state(stored.tensors["rng.cuda"], self.device)
        self.step_number, self.t = stored.facts["step"], stored.facts["t"]
        self.seconds, self.alpha = stored.facts["seconds"], stored.facts["alpha"]
        if rank() == 0 and self.step_number < self.calendar.total:
            log = self.recorder.writer.folder = RunFolder(self.folder, stored.facts["log_size"])
            if self.recorder.loggers:
                self.recorder.commentary.recall(self.folder / METRICS)
            if log.size < stored.facts["log_size"]:
                warnings.warn(f"{self.folder / METRICS} has lost earlier records; continuing", RunWarning, stacklevel=3)
        if rank() == 0:
            self.about, problem = description.renewed(self.folder, stored, self._facts())
        if self.continued != stored.facts.get("continued", []):
            self._lengthen(stored)
        if rank() == 0:
            description.write(self.folder, self.about, problem)

    def _lengthen(self, stored: checkpoint.Checkpoint) -> None:
        """Store the new length at once, so that the run continues with it whatever happens next."""
        if rank() == 0:
            note = note_of_length(self.recipe, self.material, stored, self.schedule)
            warnings.warn(note, RunWarning, stacklevel=4)
        self.recorder.reset()  # half a window of the old calendar is none of the new one
        self.save()

    def _facts(self) -> dict[str, Any]:
        """What recipe.json says besides its origin."""
        facts = {"recipe": self.recipe.plain(), "alpha": self.alpha, "steps": self.calendar.total}
        facts |= {"batch": self.material.batch, "training_images": self.material.training}
        return facts | ({"continued": self.continued} if self.continued else {})

    def _begin(self) -> None:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        self.about = self._facts() | provenance(device, ("torch", "numpy", "safetensors"))
        save_json(self.folder / RECIPE, self.about, durable=True)
        if checkpoint.every(self.folder / CHECKPOINTS):  # all of them are damaged
            rename_log(self.folder)
        self.recorder.writer.folder = RunFolder(self.folder, 0)
