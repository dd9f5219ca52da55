"""Prepare a run before its first step: load images, set up views, check sizes against the recipe."""

import math
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from stairwise.checks import InputError, RunWarning
from stairwise.data.images import Images, fingerprint, load
from stairwise.data.pairs import view_pairs
from stairwise.data.views import ViewPairs
from stairwise.distributed import world
from stairwise.evaluate.representations import probe_rows
from stairwise.training.graph import Recorded, on_two_streams
from stairwise.training.objective import AbstractObjective
from stairwise.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Material:
    """The data of a run on its device.

    Attributes:
        training: number of images to train on, from the first.
        batch: images per step, over all processes.
        pairs: draws the views.
        bf16: whether the encoder runs in bf16.
        graph: whether steps are recorded as CUDA graphs.
    """

    images: Images
    training: int
    batch: int
    pairs: ViewPairs
    bf16: bool
    graph: bool

    @property
    def view_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a view."""
        return self.images.pixels.shape[3], self.pairs.size, self.pairs.size

    def identity(self, data: str) -> list[str]:
        """Identify these images by shape and type (must match) and by the state of the files (should match)."""
        return [f"{self.images.pixels.shape} {self.images.pixels.dtype}", fingerprint(data)]

    def check_same(self, data: str, there: list[str]) -> None:
        """Refuse images whose shape or type differs from the start of the run; warn if the files have changed since."""
        here = self.identity(data)
        if here[0] != there[0]:
            remedy = "restore the old data, or --restart"
            raise InputError("data", "must be the same as when the run began", f"{here[0]}, was {there[0]}", remedy)
        if here[1] != there[1]:
            warnings.warn(f"the files of {data} have changed since the run began", RunWarning, stacklevel=4)


def prepare(recipe: Recipe, device: torch.device) -> Material:
    """Load the images of a recipe and check that there are enough."""
    images = load(recipe.data, size=recipe.size or 64)
    have = len(images.pixels)
    training = recipe.pretrain or images.training or have
    if training > have:
        raise InputError("pretrain", f"must be at most {have}, the number of images of {images.name}", training)
    batch = training if recipe.fixed_views else recipe.batch
    if batch % (world() * recipe.repeats):
        raise InputError("batch", f"must be divisible by the {world()} processes", batch // recipe.repeats)
    if batch > training:
        raise InputError("batch", f"must be at most {training}, the number of training images", batch)
    if recipe.follow > training:
        raise InputError("follow", f"must be at most {training}, the number of training images", recipe.follow)
    if recipe.held_out and have - training < 2:
        raise InputError("held_out", "needs images that are not used for training", training, "lower pretrain")
    if recipe.probes:
        _check_classes(*probe_rows(images, training, recipe.probe_images), images)
    pairs = view_pairs(images, recipe.views, recipe.size, recipe.seed, device, training=training)
    least = min(images.pixels.shape[1:3])
    if pairs.pipeline[0].scale is None and any(side > least for _, side in recipe.sizes):
        raise InputError("sizes", f"must be at most {least}, the side of the images, for crops", recipe.sizes)
    pairs.half = bf16 = recipe.precision == "bf16" and device.type == "cuda"
    graph = recipe.graph and device.type == "cuda" and world() == 1
    if graph:
        pairs.both = on_two_streams
        pairs.draw = Recorded(pairs.draw, pairs.generator)
    return Material(images, training, batch, pairs, bf16, graph)


class Calendar:
    """The steps at which a run records, fits probes and keeps its weights.

    Attributes:
        total: steps of the run.
        warmup: steps of the learning rate's warm-up.
        window: number of steps in a measured spectrum.
        records, probes, kept: steps after which each of these happens.

    `begun`: the step after which a run was made longer; the window of its next record begins after that.
    """

    def __init__(self, recipe: Recipe, training: int, batch: int, begun: int = 0) -> None:
        per_epoch = training // batch
        self.total = recipe.steps or max(1, round(recipe.epochs * per_epoch))
        self.warmup = round(recipe.warmup_epochs * per_epoch)
        images = recipe.window or max(4 * recipe.d, 512)
        self.window = min(math.ceil(images / batch), self.total)
        count = max(1, min(recipe.records, self.total // self.window))
        whole = {step for step in self._spaced(self._evenly(count)) if step >= begun + self.window}
        self.records = whole or {self.total}
        self._in_order = sorted(self.records)
        measures = recipe.probes or recipe.held_out
        self.probes = set(self._evenly(recipe.probe_times)) if measures else set()
        self.kept = set(self._evenly(recipe.keep))

    def measures(self, step: int) -> bool:
        """Whether step number `step` (from 1) lies in the window of a record."""
        following = bisect_left(self._in_order, step)
        return following < len(self._in_order) and self._in_order[following] < step + self.window

    def _evenly(self, count: int) -> list[int]:
        return [round(i * self.total / count) for i in range(1, count + 1)]

    def _spaced(self, steps: list[int]) -> set[int]:
        """Steps at which to record, at least one window apart; the first is at the end of the first window."""
        kept = [self.window]
        for step in steps:
            if step - kept[-1] >= self.window:
                kept.append(step)
        return set(kept)


def with_joint_norms(objective: AbstractObjective, device: torch.device) -> AbstractObjective:
    """Make batch norms use the batches of all processes; torch supports this on GPUs only."""
    if device.type == "cuda":
        joint: AbstractObjective = torch.nn.SyncBatchNorm.convert_sync_batchnorm(objective)
        return joint
    if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in objective.modules()):
        warnings.warn("on CPUs, each process normalizes its share of the batch separately", RunWarning, stacklevel=3)
    return objective


def _check_classes(rows: torch.Tensor, held: torch.Tensor, images: Images) -> None:
    if len(rows) < 2 or len(held) < 1 or len(np.unique(np.asarray(images.labels)[rows.numpy()])) < 2:
        raise InputError("probes", "need images of at least two classes to fit and one to score", images.name)


@contextmanager
def fastest_convolutions(device: torch.device) -> Iterator[None]:
    """Enable cudnn.benchmark; leave TF32 and determinism as the caller has set them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
