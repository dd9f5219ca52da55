"""Choose the settings of the speedrun in runs of equal seconds, without test images.

START is the best of a first search, which made one change after the other in trials of 45 s, judged by a probe on the
last tenth of the training images. The levels of all FACTORS are tried at once, in eight trials (`design`): every level
of a factor meets all levels of the others equally often, so the mean over its trials is compared, which is as exact as
repeating each change four times (twice for sizes). It assumes that gains add up; a ninth trial of the best levels
together says whether they did. Trials are judged by `folded_accuracy`, on all 50,000 training images, of which training
has seen nine tenths, without labels: a standard error of 0.2 points, and less between two trials.

What comes next follows from the stored results, so a search can stop and continue anywhere. The number of updates that
fit into the seconds is measured for every setting, and every size.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.bench_engine import WARM, make, rate, run_call
from benchmarks.bench_train import smooth_images, sync
from benchmarks.race.entrants import HEADS
from benchmarks.race.single import device_for_runs, free_memory
from benchmarks.race.store import Result
from stairwise.evaluate.classifiers import logistic_probe
from stairwise.evaluate.representations import represent
from stairwise.training.loop import Trainer
from stairwise.training.recipe import Recipe

Settings = dict[str, Any]

SPARE = 0.98  # share of the seconds that is planned with
MARGIN, DIVERGED, FOLDS = 0.001, 0.02, 5
STRENGTH = 0.01  # of the probes of folds
OTHER_SIZES = (28, 36, 40)  # at which images are probed too, by one fold
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
JOINT = HEADS["joint"] | {"head_norm": True, "head_bias": False}
START: Settings = JOINT | {"loss": "vicreg", "lr": 0.04, "batch": 256}
ENGINES: dict[str, Settings] = {"plain": {}, "fused": {"encoder": "benchmarks.fused_norms:resnet18"}}
FACTORS: tuple[tuple[Settings, ...], ...] = (  # the first level changes nothing
    ({}, {"sizes": [[0.0, 24], [0.5, 32]]}, {"sizes": [[0.0, 24], [0.75, 32]]}, {"sizes": [[0.0, 28]]}),
    ({}, {"views_per_image": 4}),
    ({}, {"hidden": [1024, 1024]}),
    ({}, {"lr": 0.025}),
    ({}, {"loss_options": {"covariance": 2.0}}),
)
Score = Callable[[Settings], float | None]


def design() -> list[tuple[int, ...]]:
    """The level of every factor in eight trials; the first trial changes nothing.

    >>> design()[:3]
    [(0, 0, 0, 0, 0), (0, 1, 1, 1, 1), (1, 0, 0, 1, 1)]
    """
    bits = product((0, 1), repeat=3)
    return [(2 * a + b, c, a ^ c, b ^ c, a ^ b ^ c) for a, b, c in bits]


def combined(start: Settings, levels: Sequence[int]) -> Settings:
    """The settings with these levels of the factors."""
    for factor, level in zip(FACTORS, levels, strict=True):
        start = start | factor[level]
    return start


def best_levels(scores: Sequence[float]) -> tuple[int, ...]:
    """Of every factor the level with the best mean over its trials, if that is MARGIN above the first level's.

    A trial that diverged (0) counts as DIVERGED below the worst of the others.
    """
    worst = min((s for s in scores if s > 0), default=0.0)
    counted, trials = np.array([s if s > 0 else worst - DIVERGED for s in scores]), np.array(design())
    chosen = []
    for i, factor in enumerate(FACTORS):
        means = [counted[trials[:, i] == level].mean() for level in range(len(factor))]
        best = int(np.argmax(means))
        chosen.append(best if means[best] > means[0] + MARGIN else 0)
    return tuple(chosen)


def next_trial(score: Score, start: Settings = START) -> tuple[Settings, Settings | None]:
    """The best settings so far, and those to try next: the trials of the design, then the best levels together.

    Together they win, unless a single trial was better by MARGIN.

    Arguments:
        score: the accuracy of settings that have been tried, 0 if they diverged.
    """
    trials = [combined(start, levels) for levels in design()]
    scores = [score(settings) for settings in trials]
    known = [s for s in scores if s is not None]
    best = trials[scores.index(max(known))] if known else start
    if len(known) < len(trials):
        return best, trials[scores.index(None)]
    together = combined(start, best_levels(known))
    reached = score(together)
    if reached is None:
        return best, together
    return together if reached >= max(known) - MARGIN else best, None


def steps_in(recipe: Recipe, device: torch.device, seconds: float) -> int:
    """Updates that fit into so many seconds, rounded down to fifties, by the measured time to start and rate."""
    began = perf_counter()
    trainer = make(recipe, device)
    starts, total = trainer.sizes.starts, trainer.calendar.total
    start = per_step = 0.0
    for first, following in pairwise([*starts, total]):
        trainer.step_number = first
        call = run_call(trainer)
        for _ in range(WARM):
            call()
        sync(device)
        start += perf_counter() - began
        per_second = rate(device, call, 1, min(2.0, seconds / 20) / len(starts))
        per_step += (following - first) / total / per_second
        began = perf_counter()
    trainer.close()
    del trainer, call
    free_memory(device)
    return max(50, int((SPARE * seconds - start) / per_step) // 50 * 50)


def steps_in_new_process(recipe: Recipe, seconds: float) -> int:
    """The same with the start of a process, which chooses its algorithms anew, and without the images."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_steps_alone, recipe, seconds).result()


def _steps_alone(recipe: Recipe, seconds: float) -> int:
    with tempfile.TemporaryDirectory() as folder, nothing_compiled():
        stored = Path(folder) / "images.npy"
        np.save(stored, smooth_images(4096, 32))
        alike = replace(recipe, data=f"array:{stored}", probes=[], held_out=0)
        return steps_in(alike, device_for_runs("auto"), seconds)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Compile anew, because what earlier runs have compiled is no part of the time of this one."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= dict.fromkeys(CACHES, folder)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def accuracy(results: dict[str, Result], key: str) -> float | None:
    """The accuracy of a stored trial; 0 if it diverged, None if it is not there."""
    if key not in results:
        return None
    return 0.0 if results[key]["diverged"] else float(results[key]["folded"])


def folded_accuracy(trainer: Trainer, size: int = 0, folds: int = FOLDS) -> float:
    """Mean accuracy of logistic probes, each judged on its part of all images and fitted on the others.

    `size`: side of the images, if not that of the recipe; `folds`: probe so many of the FOLDS parts.
    """
    material, pairs = trainer.material, trainer.material.pairs
    precision = torch.bfloat16 if material.bf16 else None
    labels, rows = np.asarray(material.images.labels, dtype=np.int64), torch.arange(len(material.images.pixels))
    about = size or pairs.size, pairs.mean, pairs.std
    h, _ = represent(trainer.network, pairs.feed, rows, *about, batch=2048, precision=precision)
    y = torch.as_tensor(labels, device=h.device)
    part = torch.randperm(len(h), generator=torch.Generator().manual_seed(0)).to(h.device) % FOLDS
    parts = [part == i for i in range(folds)]
    return float(np.mean([logistic_probe(h[~held], y[~held], h[held], y[held], STRENGTH) for held in parts]))


def without_steps(recipe: Recipe) -> Recipe:
    return replace(recipe, steps=10**6)
