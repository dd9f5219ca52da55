"""Do the pending runs of a race until the time is up, here or in several processes that share the machine."""

import gc
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.race.entrants import LOSSES, RaceRun
from benchmarks.race.images import RaceImages, read_images
from benchmarks.race.plan import Race, Rules
from benchmarks.race.store import Result, Store
from stairwise.training.objective import capturable

STEPS_PER_SECOND, MUON_COST, OVERHEAD = 109.0, 1.07, 2.0  # of one H200, to plan with; seconds to set up and to probe
UNRECORDED = 4.0  # times as long as a step that is recorded as a graph: not measured, to plan with


def seconds_of(run: RaceRun, results: dict[str, Result], alone: bool = True) -> float:
    """Expected duration, alone on the machine or beside others: the upper quartile of runs of the same loss and method
    under the same load. Without such runs it is assumed."""
    same = [r for r in results.values() if (r["loss"], r["method"]) == (run.loss, run.method)]
    same = [r for r in same if r["alone"] == alone and any(r["seconds"])]
    assumed = (MUON_COST if run.method.startswith("muon") else 1.0) / STEPS_PER_SECOND
    if not capturable(LOSSES[run.loss]["loss"]):
        assumed *= UNRECORDED
    times = [r["seconds"][-1] / r["step"][-1] for r in same if r["seconds"][-1]]
    return OVERHEAD + run.steps * (float(np.quantile(times, 0.75)) if times else assumed)


def _next(parts: Sequence[Rules], store: Store, deadline: float, busy: set[RaceRun], alone: bool) -> RaceRun | None:
    """The first pending run that fits into the time, of the first part that has one."""
    results = store.results()
    for rules in parts:
        for run in Race(rules, results).pending():
            if run not in busy and time.monotonic() + seconds_of(run, results, alone) < deadline:
                return run
    return None


def _without_clocks(parts: Sequence[Rules]) -> list[Rules]:
    return [replace(rules, stages=tuple(s for s in rules.stages if s != "clock")) for rules in parts]


def _timed(run: RaceRun, images: RaceImages, changes: dict[str, Any], alone: bool, device: str) -> Result | None:
    """The result of a run; None if it fails for another reason than divergence, which must not end the race."""
    from benchmarks.race.single import race

    began = time.monotonic()
    try:
        result = race(run, images, changes, alone, device)
    except Exception:
        print(f"{run} failed:\n{traceback.format_exc()}", flush=True)
        return None
    result["duration"] = round(time.monotonic() - began, 2)
    end = result["logistic"][-1:] or ["diverged" if result["diverged"] else "-"]
    parts = f"{result['seconds'][-1:]} s of training, start {result['start_s']} s, measured in {result['measured_s']} s"
    print(f"{result['key']}: {end[0]}, {parts}, {result['duration']} s in all", flush=True)
    return result


def run_here(
    parts: Sequence[Rules], store: Store, images: RaceImages, deadline: float, device: str, alone: bool = True
) -> None:
    """One run after the other; of several races, all with the same changes to their recipes, the first comes first. If
    other programs use the machine, clocks are left out."""
    failed: set[RaceRun] = set()
    parts = parts if alone else _without_clocks(parts)
    gc.freeze()  # what is loaded by now stays, and need not be searched for garbage after every run
    while run := _next(parts, store, deadline, failed, alone):
        result = _timed(run, images, parts[0].changes, alone, device)
        if result is None:
            failed.add(run)
        else:
            store.add(result)


def run_teams(rules: Rules, store: Store, images: RaceImages, deadline: float, device: str, most: int) -> bool:
    """Runs of equal length at once, recorded in one graph; False if that failed. Clocks need the machine alone."""
    from benchmarks.race.team import race_together, teams

    slowest = 1.0  # of the estimates so far
    while True:
        results = store.results()
        left = [r for r in Race(rules, results).pending() if r.stage != "clock"]
        fitting = [r for r in left if time.monotonic() + slowest * seconds_of(r, {}) < deadline]
        if not fitting:
            return True
        team, began = teams(fitting, most), time.monotonic()
        try:
            found = race_together(team, images, rules.changes, device)
        except Exception:
            # a failed recording leaves the device unusable for this process
            print(f"{team} failed, try --team 1 instead:\n{traceback.format_exc()}", flush=True)
            return False
        took = time.monotonic() - began
        slowest = max(slowest, took / seconds_of(team[0], {}))
        for result in found:
            store.add(result | {"duration": round(took, 2)})
            end = result["logistic"][-1:] or ["diverged"]
            print(f"{result['key']}: {end[0]}", flush=True)
        print(f"{len(team)} runs together took {took:.1f} s", flush=True)


def _work(
    stored: list[Path], names: list[str], changes: dict[str, Any], device: str, jobs: int, orders: Any, done: Any
) -> None:
    """A process of its own: takes runs until it is told to stop."""
    torch.set_num_threads(
        max(1, (os.cpu_count() or 1) // jobs)
    )  # more would compete for cores; a run on a GPU uses one
    images, *others = (read_images([path], name) for path, name in zip(stored, names, strict=True))
    images = replace(images, elsewhere=others[0]) if others else images
    while (run := orders.get()) is not None:
        done.put((run, _timed(run, images, changes, False, device)))


def run_jobs(parts: Sequence[Rules], store: Store, images: RaceImages, deadline: float, device: str, jobs: int) -> None:
    """As `run_here`, with several processes that are kept busy. Clocks need the machine alone and are left out. If a
    process dies, the others end their runs, which are stored."""
    parts = _without_clocks(parts)
    context = multiprocessing.get_context("spawn")
    orders, done = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [images] if images.elsewhere is None else [images, images.elsewhere]
        stored = [one.save(Path(folder) / f"{i}.npz") for i, one in enumerate(kinds)]
        arguments = (stored, [one.name for one in kinds], parts[0].changes, device, jobs, orders, done)
        workers = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(jobs)]
        for worker in workers:
            worker.start()
        busy: set[RaceRun] = set()
        failed: set[RaceRun] = set()

        def take(found: tuple[RaceRun, Result | None]) -> None:
            run, result = found
            busy.discard(run)
            if result is None:
                failed.add(run)
            else:
                store.add(result)

        while all(worker.is_alive() for worker in workers):
            while len(busy) < jobs and (run := _next(parts, store, deadline, busy | failed, alone=False)):
                busy.add(run)
                orders.put(run)
            if not busy:
                break
            with suppress(queue.Empty):
                take(done.get(timeout=10))
        died = [worker.exitcode for worker in workers if not worker.is_alive()]
        for _ in workers:
            orders.put(None)
        with suppress(queue.Empty):
            while len(busy) > len(died):
                take(done.get(timeout=max(60.0, deadline - time.monotonic())))
        for worker in workers:
            worker.join(timeout=60)
    if died:
        raise SystemExit(f"{len(died)} of {jobs} processes died, exit code {died[0]}: the same command continues")
