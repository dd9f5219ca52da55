"""The training loop: views, embed, loss, step, measure; resumable at any moment.

`train` is the whole story; `Trainer` keeps its state, and `Trainer.step` is one step of learning.
"""

import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stairwise.checks import InputError, RunWarning
from stairwise.data.augment import PIPELINES
from stairwise.data.feed import AbstractFeed, batch_rows, build_feed, channel_statistics
from stairwise.data.images import Images, fingerprint, load
from stairwise.evaluate.classifiers import PROBES
from stairwise.evaluate.representations import eval_mode, probe_rows, represent
from stairwise.files import save_json
from stairwise.losses import OF_CORRELATION
from stairwise.losses.ranks import rank, world
from stairwise.monitor.sinks import METRICS, PICTURE, RunFolder
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.nets.encoder import Network, build_encoder, build_network
from stairwise.nets.initial import find_alpha, scale_parameters
from stairwise.provenance import provenance
from stairwise.train import checkpoint
from stairwise.train.graph import Recorded
from stairwise.train.objective import AbstractObjective, Embedded, build_objective, capturable
from stairwise.train.optimizer import FlatOptimizer
from stairwise.train.pairs import Pairs
from stairwise.train.process import StopRequest, agreed, choose_device, locked, process_group
from stairwise.train.recipe import Recipe, load_recipe
from stairwise.train.recorder import Recorder, tensorboard_in
from stairwise.train.run import CHECKPOINTS, RECIPE, WEIGHTS, Run
from stairwise.train.schedule import Schedule

__all__ = ["Diverged", "Stopped", "Trainer", "initial_network", "rebuild", "train"]

Progress = Callable[[int, int, str], None]
ASK_EVERY = 10  # steps between agreements of several processes
GO_ON, SAVE, STOP = 0, 1, 2


class Stopped(RuntimeError):
    """A signal ended the run after a checkpoint."""


class Diverged(RuntimeError):
    """Loss or gradient are no longer finite."""


def train(
    recipe: Recipe | str,
    folder: str | Path | None = None,
    *,
    device: str = "auto",
    checkpoint_minutes: float = 5.0,
    restart: bool = False,
    tensorboard: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train, or go on training, and return the run.

    Arguments:
        recipe: a recipe or the name of one.
        folder: where the run is kept; default `runs/NAME`, or `runs/LOSS` for a recipe object. If it holds an
            unfinished run of this recipe, that continues; a finished one is returned as it is.
        checkpoint_minutes: time between checkpoints; one is also written at the end and on Ctrl-C or SIGTERM.
        restart: discard what the folder holds.
        tensorboard: also write TensorBoard files (needs `tensorboard`).
        progress: called with step, steps and a few words.
    """
    name = Path(recipe).stem if isinstance(recipe, str) else recipe.loss
    folder = Path(folder) if folder else Path("runs") / name
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    where = choose_device(device)
    with ExitStack() as stack:
        stack.enter_context(process_group(where))
        if rank() == 0:
            stack.enter_context(locked(folder))
            if restart:
                _discard(folder)
        if world() > 1:
            dist.barrier()
        stack.enter_context(_fastest_convolutions(where))
        stack.enter_context(torch.random.fork_rng(devices=[where] if where.type == "cuda" else []))
        trainer = Trainer(recipe, folder, where, tensorboard)
        stack.callback(trainer.close)
        trainer.resume()
        stop = stack.enter_context(StopRequest())  # before this, Ctrl-C loses nothing
        trainer.run(stop, 60 * checkpoint_minutes, progress or (lambda *_: None))
    return Run(folder)


@contextmanager
def _fastest_convolutions(device: torch.device) -> Iterator[None]:
    """cuDNN tries its ways and keeps the fastest; whether they may use TF32 or must be deterministic, the user says."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def rebuild(recipe: Recipe, state: checkpoint.Checkpoint) -> Network:
    """The network of a checkpoint, in evaluation mode on the CPU."""
    cut = state.facts["view_shape"]
    network = _network(recipe, torch.zeros(2, *cut))
    network.load_state_dict(state.part("objective.network"))
    return network.eval()


def initial_network(run: Run) -> Network:
    """The network with which a run began, in evaluation mode on the CPU: a function of its recipe and its α."""
    state = checkpoint.newest(run.folder / CHECKPOINTS)
    if state is None:
        raise InputError("run", "must have a checkpoint", run.folder, "let it train for a while")
    network = _network(run.recipe, torch.zeros(2, *state.facts["view_shape"]))
    if run.facts["alpha"] != 1:
        scale_parameters(network, float(run.facts["alpha"]), run.recipe.scope)
    return network.eval()


class Trainer:
    """The state of a run, and what can be done with it."""

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device, tensorboard: bool = False) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.found = checkpoint.newest(folder / CHECKPOINTS)
        if self.found is not None:
            _check_same(self.found.facts["recipe"], recipe.plain(), self.found.path)
        torch.manual_seed(recipe.seed)
        self.images = load(recipe.data, size=recipe.size or 64)
        self.feed: AbstractFeed = build_feed(self.images, device)
        pixels = self.images.pixels
        self.training = _count(recipe, self.images)
        self.batch = self.training if recipe.fixed_views else recipe.batch
        if self.batch % world():
            raise InputError("batch", f"must be divisible by the {world()} processes", self.batch)
        if self.batch > self.training:
            raise InputError("batch", f"must be at most {self.training}, the number of training images", self.batch)
        if recipe.held_out and len(pixels) - self.training < 2:
            raise InputError("held_out", "needs images besides those for training", self.training, "lower pretrain")
        if recipe.probes:
            _check_classes(*probe_rows(self.images, self.training, recipe.probe_images), self.images)
        self.size = recipe.size or min(pixels.shape[1:3])
        clamps = any(view.scale is not None for view in PIPELINES[recipe.views])
        self.mean, self.std = (s.to(device) for s in channel_statistics(pixels[: self.training], unit=clamps))
        self.bf16 = recipe.precision == "bf16" and device.type == "cuda"
        network = _network(recipe, torch.zeros(2, pixels.shape[3], self.size, self.size)).to(device)
        if recipe.channels_last and device.type == "cuda":
            network = network.to(memory_format=torch.channels_last)
        graph = recipe.graph and device.type == "cuda" and world() == 1
        self.pairs = Pairs(
            self.feed, recipe.views, self.size, self.mean, self.std, recipe.seed, half=self.bf16, graph=graph
        )
        self.alpha = self.found.facts["alpha"] if self.found else self._scale(network)
        self.objective: AbstractObjective = build_objective(
            network, recipe.d, recipe.loss, recipe.loss_options, recipe.precondition, recipe.together
        ).to(device)
        if world() > 1:
            self.objective = _with_joint_norms(self.objective, device)
        self.optimizer = FlatOptimizer(
            self.objective, recipe.optimizer, recipe.momentum, recipe.weight_decay, recipe.clip
        )
        per_epoch = self.training // self.batch
        self.steps = recipe.steps or max(1, round(recipe.epochs * per_epoch))
        self.schedule = Schedule(recipe.schedule, self.steps, round(recipe.warmup_epochs * per_epoch), recipe.final_lr)
        window = recipe.window or max(4 * recipe.d, 512)
        self.window = min(math.ceil(window / self.batch), self.steps)
        records = max(1, min(recipe.records, self.steps // self.window))
        self.record_steps = _spaced([round(i * self.steps / records) for i in range(1, records + 1)], self.window)
        self.probe_steps = {round((i + 1) * self.steps / recipe.probe_times) for i in range(recipe.probe_times)}
        self.keep_steps = {round((i + 1) * self.steps / recipe.keep) for i in range(recipe.keep)}
        self.step_number, self.t, self.seconds = 0, 0.0, 0.0
        standardizes = recipe.loss == "barlow_twins" and recipe.loss_options.get("batch_norm", True)
        begun = self.found.facts["step"] if self.found else 0
        board = tensorboard_in(folder, begun) if tensorboard and rank() == 0 else None
        self.recorder = Recorder(device, bool(standardizes), recipe.hidden_spectrum, board)
        self.take = Recorded(self.step) if graph and capturable(recipe.loss) else self.step

    # one step of learning

    @property
    def network(self) -> Network:
        return self.objective.network

    def step(self, x_a: Tensor, x_b: Tensor, measure: bool) -> None:
        """Embeddings of two views, loss, gradient, update; nothing here waits for the device."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            out: Embedded = self.objective(x_a, x_b)
        out.loss.backward()
        if world() > 1:
            dist.all_reduce(self.optimizer.gradient)
            self.optimizer.gradient.div_(world())
        gradient = self.optimizer.step()
        self.objective.after_step()
        self.recorder.observe(out, gradient, measure)

    def fixed_pairs(self) -> tuple[Tensor, Tensor]:
        """The pairs on which a recipe with `fixed_views` trains; every process keeps its share."""
        x_a, x_b = self.pairs.at_start(torch.arange(self.training))
        return x_a.chunk(world())[rank()], x_b.chunk(world())[rank()]

    def _pairs_from_here(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Two views for every step that is left."""
        if self.recipe.fixed_views:
            return repeat(self.fixed_pairs())
        rows = batch_rows(self.training, self.batch, self.recipe.seed, self.step_number, rank(), world())
        return self.pairs.stream(rows, self.step_number)

    # the run

    def run(self, stop: StopRequest, checkpoint_seconds: float, progress: Progress) -> None:
        """All remaining steps."""
        if self.step_number >= self.steps:
            return
        self.objective.train()
        pairs = self._pairs_from_here()
        saved = time.perf_counter()
        began, first, earlier = saved, self.step_number, self.seconds
        coming = iter(sorted(s for s in self.record_steps if s > self.step_number))
        record = next(coming)
        while self.step_number < self.steps:
            x_a, x_b = next(pairs)
            self.t += self._set_rates()
            self.take(x_a, x_b, measure=self.step_number + 1 > record - self.window)
            self.step_number += 1
            self.seconds = earlier + time.perf_counter() - began
            probe = self.step_number in self.probe_steps and (self.recipe.probes or self.recipe.held_out)
            if self.step_number == record or probe:
                rate = 2 * self.batch * (self.step_number - first) / max(self.seconds - earlier, 1e-9)
                words = self._record(self.step_number == record, bool(probe), rate)
                progress(self.step_number, self.steps, words)
                if self.step_number == record:
                    record = next(coming, 0)
            elif self.step_number % ASK_EVERY == 0:
                progress(self.step_number, self.steps, "")
            if self.step_number in self.keep_steps and rank() == 0:
                self._keep_weights()
            wish = self._agree(stop, time.perf_counter() - saved > checkpoint_seconds)
            if wish or self.step_number == self.steps:
                path = self.save()
                saved = time.perf_counter()
            if wish == STOP and self.step_number < self.steps:
                raise Stopped(
                    f"stopped by {Signals(stop.signal or SIGTERM).name} after step {self.step_number} of {self.steps}; "
                    f"{path} is whole: the same command continues"
                )

    def close(self) -> None:
        """Let go of threads and files."""
        self.recorder.close()

    def _agree(self, stop: StopRequest, due: bool) -> int:
        """What to do now, the same on all processes: GO_ON, SAVE or STOP (after saving)."""
        if world() > 1 and self.step_number % ASK_EVERY:
            return GO_ON
        return agreed(STOP if stop.signal else SAVE if due else GO_ON, self.device)

    def _set_rates(self) -> float:
        factor = self.schedule.factor(self.step_number)
        lr, lr_bias = self.recipe.lr * factor, (self.recipe.lr_bias or self.recipe.lr) * factor
        self.optimizer.lr[0].fill_(lr)
        self.optimizer.lr[1].fill_(lr_bias)
        return lr

    def _record(self, spectrum: bool, probe: bool, rate: float) -> str:
        """Measure, and say how it goes."""
        numbers = self.recorder.numbers()
        self._check_finite(numbers)
        facts: dict[str, Any] = {
            "step": self.step_number,
            "t": self.t,
            "epoch": self.step_number * self.batch / self.training,
            "loss": numbers["loss"],
            "gradient": numbers["gradient"],
            "lr": self.recipe.lr * self.schedule.factor(self.step_number - 1),
        }
        if probe:
            facts |= self._probe() | self._held_out()
        self.recorder.record(facts | {"seconds": self.seconds, "views_per_second": rate}, spectrum)
        return f"loss {numbers['loss']:.4g}, {rate:,.0f} views/s"

    def _check_finite(self, numbers: dict[str, float]) -> None:
        if not numbers["bad_step"]:
            return
        kept = sorted((self.folder / CHECKPOINTS).glob("step-*.safetensors"))
        weights = (
            "weights are finite" if bool(torch.isfinite(self.optimizer.values).all()) else "weights are not finite"
        )
        raise Diverged(
            f"training diverged: loss or gradient were not finite for the first time at step {numbers['bad_step']:.0f} "
            f"(last gradient length {numbers['gradient']:.3g}, {weights}, lr {float(self.optimizer.lr[0]):.3g}); "
            + (f"last good checkpoint: {kept[-1]}; " if kept else "no checkpoint had been written; ")
            + "lower lr, lengthen warmup_epochs or set clip"
        )

    def _held_out(self) -> dict[str, Any]:
        """Spectra of images that it did not train on."""
        rows = torch.arange(self.training, len(self.images.pixels))[: self.recipe.held_out]
        if len(rows) == 0:
            return {}
        monitor, recipe = SpectrumMonitor(), self.recipe
        # not self.pairs, which may be drawing the next step's views at this moment
        pairs = Pairs(self.feed, recipe.views, self.size, self.mean, self.std, recipe.seed, half=self.bf16)
        with eval_mode(self.network), torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            for i, some in enumerate(part for part in rows.split(256) if len(part) > 1):
                (h_a, z_a), (h_b, z_b) = (self.network(x) for x in pairs.at_start(some, i))
                monitor.update(z_a, z_b, h_a, h_b)
        found = monitor.compute()
        return {f"held_{name}": getattr(found, name) for name in ("eigenvalues", "covariance", "hidden")}

    def _probe(self) -> dict[str, float]:
        """Accuracies of the recipe's probes on representations."""
        if not self.recipe.probes:
            return {}
        rows, held = probe_rows(self.images, self.training, self.recipe.probe_images)
        labels = torch.as_tensor(np.asarray(self.images.labels, dtype=np.int64))
        crop = PIPELINES[self.recipe.views][0].scale is None
        precision = torch.bfloat16 if self.bf16 else None
        (h, y), (h_test, y_test) = (
            (
                represent(self.network, self.feed, some, self.size, self.mean, self.std, crop, precision=precision)[0],
                labels[some].to(self.device),
            )
            for some in (rows, held)
        )
        return {name: PROBES[name](h, y, h_test, y_test) for name in self.recipe.probes}

    # initialization, saving, resuming

    def _scale(self, network: Network) -> float:
        recipe = self.recipe
        if recipe.alpha != "auto":
            alpha = float(recipe.alpha)
        else:
            alpha = find_alpha(network, lambda: self._top_eigenvalue(network), recipe.start, recipe.scope)
            if world() > 1:
                shared = torch.tensor(alpha, dtype=torch.float64, device=self.device)
                dist.broadcast(shared, 0)
                alpha = float(shared)
        if alpha != 1:
            scale_parameters(network, alpha, recipe.scope)
        return alpha

    @torch.no_grad()
    def _top_eigenvalue(self, network: Network) -> float:
        """The largest eigenvalue at initialization: of C for Barlow Twins and its kin, else of the covariance."""
        buffers = {name: b.clone() for name, b in network.named_buffers()}
        monitor = SpectrumMonitor()
        rows = torch.arange(self.training)[: max(512, 4 * self.recipe.d)]
        for i, some in enumerate(part for part in rows.split(256) if len(part) > 1):
            x_a, x_b = self.pairs.at_start(some, i)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                monitor.update(network(x_a)[1], network(x_b)[1])
        for name, b in network.named_buffers():
            b.copy_(buffers[name])
        found = monitor.compute()
        return float((found.eigenvalues if self.recipe.loss in OF_CORRELATION else found.covariance)[0])

    def _keep_weights(self) -> None:
        self._check_finite(self.recorder.numbers())
        facts = {"t": self.t, "view_shape": self._view_shape()}
        tensors = {f"objective.network.{k}": v for k, v in self.network.state_dict().items()}
        checkpoint.keep(self.folder / WEIGHTS, self.step_number, facts, tensors)

    def _view_shape(self) -> list[int]:
        return [self.images.pixels.shape[3], self.size, self.size]

    def save(self) -> Path:
        """Write a checkpoint, unless training has diverged."""
        self._check_finite(self.recorder.numbers())
        self.recorder.settle()
        path = self.folder / CHECKPOINTS
        if rank() == 0:
            assert self.recorder.folder is not None
            self.recorder.folder.metrics.sync()
            tensors = {f"objective.{k}": v for k, v in self.objective.state_dict().items()}
            tensors |= {"momentum": self.optimizer.momentum_buffer} | self.recorder.state()
            tensors["rng.cpu"] = torch.get_rng_state()
            if self.device.type == "cuda":
                tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
            facts = {
                "recipe": self.recipe.plain(),
                "t": self.t,
                "alpha": self.alpha,
                "seconds": self.seconds,
                "log_size": self.recorder.folder.metrics.size,
                "images": self._images_seen(),
                "view_shape": self._view_shape(),
            }
            path = checkpoint.save(path, self.step_number, facts, tensors)
        if world() > 1:
            dist.barrier()
        return path

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, or begin."""
        found = self.found
        if found is None:
            if rank() == 0:
                facts = {"recipe": self.recipe.plain(), "alpha": self.alpha, "steps": self.steps}
                facts |= {"batch": self.batch, "training_images": self.training}
                cuda = self.device.type == "cuda"
                device = torch.cuda.get_device_name(self.device) if cuda else None
                save_json(self.folder / RECIPE, facts | provenance(device, ("torch", "numpy", "safetensors")))
                self.recorder.folder = RunFolder(self.folder, 0)
            return
        self._check_same_images(found.facts["images"])
        self.objective.load_state_dict(found.part("objective"))
        self.optimizer.momentum_buffer.copy_(found.tensors["momentum"])
        self.recorder.load(found.tensors["numbers"], found.part("monitor"))
        torch.set_rng_state(found.tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in found.tensors:
            torch.cuda.set_rng_state(found.tensors["rng.cuda"], self.device)
        self.step_number, self.t = found.facts["step"], found.facts["t"]
        self.seconds, self.alpha = found.facts["seconds"], found.facts["alpha"]
        if rank() == 0 and self.step_number < self.steps:
            self.recorder.folder = RunFolder(self.folder, found.facts["log_size"])
            if self.recorder.folder.metrics.size < found.facts["log_size"]:
                warnings.warn(f"{self.folder / METRICS} has lost earlier records; going on", RunWarning, stacklevel=3)

    def _images_seen(self) -> list[str]:
        """What tells these data from others: surely, and perhaps (files that were only copied differ in it too)."""
        return [f"{self.images.pixels.shape} {self.images.pixels.dtype}", fingerprint(self.recipe.data)]

    def _check_same_images(self, there: list[str]) -> None:
        here = self._images_seen()
        if here[0] != there[0]:
            remedy = "bring the old data back, or --restart"
            raise InputError("data", "must be that with which the run began", f"{here[0]}, it was {there[0]}", remedy)
        if here[1] != there[1]:
            warnings.warn(f"{self.recipe.data} has been written since the run began", RunWarning, stacklevel=4)


def _network(recipe: Recipe, sample: Tensor) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        encoder = build_encoder(recipe.encoder, recipe.encoder_options)
        return build_network(encoder, sample, recipe.hidden, recipe.d, recipe.head_norm, recipe.head_bias).float()


def _with_joint_norms(objective: AbstractObjective, device: torch.device) -> AbstractObjective:
    """Batch norm over all processes, which torch has for GPUs only."""
    if device.type == "cuda":
        joint: AbstractObjective = torch.nn.SyncBatchNorm.convert_sync_batchnorm(objective)
        return joint
    if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in objective.modules()):
        warnings.warn("on CPUs every process normalizes its own share of the batch", RunWarning, stacklevel=3)
    return objective


def _spaced(steps: list[int], window: int) -> set[int]:
    """Steps at which to record, each with a whole window since the one before; the first window ends with one too."""
    kept = [window]
    for step in steps:
        if step - kept[-1] >= window:
            kept.append(step)
    return set(kept)


def _check_classes(rows: Tensor, held: Tensor, images: Images) -> None:
    if len(rows) < 2 or len(held) < 1 or len(np.unique(np.asarray(images.labels)[rows.numpy()])) < 2:
        raise InputError("probes", "need images of at least two classes to fit and one to score", images.name)


def _count(recipe: Recipe, images: Images) -> int:
    have = len(images.pixels)
    count = recipe.pretrain or images.training or have
    if count > have:
        raise InputError("pretrain", f"must be at most {have}, the number of images of {images.name}", count)
    return count


def _check_same(stored: dict[str, Any], asked: dict[str, Any], path: Path) -> None:
    stored = Recipe().plain() | stored  # settings that the run's version did not have
    differing = [k for k in asked if k not in {"label", "keep", "held_out"} and stored.get(k) != asked[k]]
    if differing:
        changes = ", ".join(f"{k} = {stored.get(k)!r} there, {asked[k]!r} here" for k in differing[:4])
        raise InputError(
            "run folder", "holds a run of another recipe", f"{path}: {changes}", "give another --out, or --restart"
        )


def _discard(folder: Path) -> None:
    for name in (CHECKPOINTS, WEIGHTS, "ntk"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (METRICS, PICTURE, RECIPE):
        (folder / name).unlink(missing_ok=True)
