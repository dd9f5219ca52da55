"""Choose the settings of the speedrun: one change after the other, in runs of equal seconds, without test images.

CHANGES were judged by a probe on the last tenth of the training images, which training does not see: 5,000 images, so
the standard error is 0.5 points. FURTHER and LONGER begin with the best of these and are judged by `folded_accuracy`,
on all 50,000 training images, of which training has seen nine tenths, without labels: 0.2 points; and a change must
gain MARGIN, about as much as seeds differ. What comes next follows from the stored results, so a search can stop and
continue anywhere. The number of updates that fit into the seconds is measured for every setting, and every size.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
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
from stairwise.evaluate.classifiers import PROBES
from stairwise.evaluate.representations import represent
from stairwise.training.loop import Trainer
from stairwise.training.recipe import Recipe

Settings = dict[str, Any]

SPARE = 0.98  # share of the seconds that is planned with
MARGIN, FOLDS = 0.002, 5
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
SHORT = 60.0  # trials of more seconds are a search of their own
JOINT = HEADS["joint"] | {"head_norm": True, "head_bias": False}
START: Settings = HEADS["simclr"] | {"loss": "simclr", "lr": 0.08, "batch": 256}  # Muon's best short trial of the race
# a change, and the losses to which it applies, if not to all
CHANGES: list[tuple[Settings, tuple[str, ...]]] = [
    ({"loss": "vicreg", **JOINT}, ()),
    ({"loss": "barlow_twins", **JOINT}, ()),
    ({"views": "simclr-small"}, ("simclr",)),
    ({"hidden": [2048], "d": 1024}, ("vicreg", "barlow_twins")),
    ({"batch": 512}, ()),
    ({"weight_decay": 0.05}, ()),
    ({"loss_options": {"temperature": 0.5}}, ("simclr",)),
    ({"lr": 0.04}, ()),
    ({"lr": 0.16}, ()),
    ({"hidden": [2048], "d": 256, "head_norm": True}, ("simclr",)),
    ({"batch": 1024}, ()),
]
JOINTLY = ("vicreg", "barlow_twins")
FURTHER: list[tuple[Settings, tuple[str, ...]]] = [  # the likely gains first
    ({"encoder": "benchmarks.fused_norms:resnet18"}, ()),
    ({"sizes": [[0.0, 20], [0.4, 24], [0.75, 32]]}, ()),
    ({"sizes": [[0.0, 24], [0.6, 32]]}, ()),
    ({"views_per_image": 4}, ()),
    ({"views": "simclr-small"}, JOINTLY),
    ({"lr": 0.02}, ()),
    ({"loss_options": {"covariance": 2.0}}, ("vicreg",)),
    ({"momentum": 0.9}, ()),
    ({"batch": 512}, ()),
    ({"views": "simclr-small-wide"}, JOINTLY),
    ({"hidden": [2048]}, JOINTLY),
    ({"weight_decay": 0.02}, ()),
    ({"loss_options": {"covariance": 0.5}}, ("vicreg",)),
]
LONGER: list[tuple[Settings, tuple[str, ...]]] = [
    ({"hidden": [2048], "d": 1024}, JOINTLY),
    ({"batch": 512}, ()),
    ({"weight_decay": 0.05}, ()),
    ({"lr": 0.02}, ()),
    ({"sizes": [[0.0, 24], [0.6, 32]]}, ()),
]
Score = Callable[[Settings], float | None]


def next_trial(
    score: Score,
    start: Settings = START,
    changes: list[tuple[Settings, tuple[str, ...]]] | None = None,
    margin: float = 0.0,
) -> tuple[Settings, Settings | None]:
    """The best settings so far, and those to try next: None if all have been tried.

    Arguments:
        score: the accuracy of settings that have been tried, 0 if they diverged.
        margin: what a change must gain.
    """
    best, height = start, score(start)
    if height is None:
        return start, start
    for change, losses in CHANGES if changes is None else changes:
        candidate = best | change
        if candidate == best or (losses and best["loss"] not in losses):
            continue
        reached = score(candidate)
        if reached is None:
            return best, candidate
        if reached > height + margin:
            best, height = candidate, reached
    return best, None


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


def accuracy(results: dict[str, Result], key: str, judge: str = "logistic") -> float | None:
    """The accuracy of a stored run, by one of its probes; 0 if it diverged, None if it is not there."""
    if key not in results:
        return None
    return 0.0 if results[key]["diverged"] else float(results[key][judge])


def folded_accuracy(trainer: Trainer) -> float:
    """Mean accuracy of FOLDS logistic probes, each judged on its part of all images and fitted on the others."""
    material, pairs = trainer.material, trainer.material.pairs
    precision = torch.bfloat16 if material.bf16 else None
    labels, rows = np.asarray(material.images.labels, dtype=np.int64), torch.arange(len(material.images.pixels))
    h, _ = represent(
        trainer.network, pairs.feed, rows, pairs.size, pairs.mean, pairs.std, batch=2048, precision=precision
    )
    y = torch.as_tensor(labels, device=h.device)
    part = torch.randperm(len(h), generator=torch.Generator().manual_seed(0)).to(h.device) % FOLDS
    probe, parts = PROBES["logistic_tuned"], [part == i for i in range(FOLDS)]
    return float(np.mean([probe(h[~held], y[~held], h[held], y[held]) for held in parts]))


def without_steps(recipe: Recipe) -> Recipe:
    return replace(recipe, steps=10**6)
