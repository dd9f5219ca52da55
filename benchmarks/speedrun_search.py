"""Choose the settings of the speedrun: one change after the other, in runs of equal seconds on held-out images.

A change stays if it is better than the best so far. What comes next follows from the stored results, so a search can
stop and continue anywhere. The number of updates that fit into the seconds is measured for every setting.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
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
from stairwise.training.recipe import Recipe

Settings = dict[str, Any]

SPARE = 0.97  # share of the seconds that is planned with
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


def next_trial(score: Callable[[Settings], float | None]) -> tuple[Settings, Settings | None]:
    """The best settings so far, and those to try next: None if all have been tried.

    `score` gives the accuracy of settings that have been tried, 0 if they diverged.
    """
    best, height = START, score(START)
    if height is None:
        return START, START
    for change, losses in CHANGES:
        candidate = best | change
        if candidate == best or (losses and best["loss"] not in losses):
            continue
        reached = score(candidate)
        if reached is None:
            return best, candidate
        if reached > height:
            best, height = candidate, reached
    return best, None


def steps_in(recipe: Recipe, device: torch.device, seconds: float) -> int:
    """Updates that fit into so many seconds, rounded down to fifties, by the measured time to start and rate."""
    began = perf_counter()
    trainer = make(recipe, device)
    call = run_call(trainer)
    for _ in range(WARM):
        call()
    sync(device)
    start = perf_counter() - began
    per_second = rate(device, call, 1, min(2.0, seconds / 20))
    trainer.close()
    del trainer, call
    free_memory(device)
    return max(50, int((SPARE * seconds - start) * per_second) // 50 * 50)


def steps_in_new_process(recipe: Recipe, seconds: float) -> int:
    """The same with the start of a process, which chooses its algorithms anew, and without the images."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_steps_alone, recipe, seconds).result()


def _steps_alone(recipe: Recipe, seconds: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "images.npy"
        np.save(stored, smooth_images(4096, 32))
        alike = replace(recipe, data=f"array:{stored}", probes=[], held_out=0)
        return steps_in(alike, device_for_runs("auto"), seconds)


def accuracy(results: dict[str, Result], key: str) -> float | None:
    """The logistic probe's accuracy of a stored run; 0 if it diverged, None if it is not there."""
    if key not in results:
        return None
    return 0.0 if results[key]["diverged"] else float(results[key]["logistic"])


def without_steps(recipe: Recipe) -> Recipe:
    return replace(recipe, steps=10**6)
