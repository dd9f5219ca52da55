"""One run of the race: train, stop the clock for probes, measure."""

import gc
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.race.entrants import RACED, RaceRun
from benchmarks.race.images import RaceImages
from benchmarks.race.store import Result
from stairwise.data.feed import build_feed
from stairwise.data.images import DATASETS, Images
from stairwise.distributed import choose_device
from stairwise.evaluate.classifiers import logistic_probe
from stairwise.evaluate.representations import represent
from stairwise.runs.record import spectrum_of_loss
from stairwise.staircase.growth import learned
from stairwise.theory.spectra import effective_rank
from stairwise.training.loop import Trainer
from stairwise.training.measure import held_out_spectra, probe_accuracies
from stairwise.training.recipe import Recipe

WARM = 10  # steps before the clock starts: cuDNN chooses its algorithms, steps are recorded as graphs
CHECK = 100  # steps between two looks for a loss that is not finite
LEADING = 64  # stored eigenvalues


class Clock:
    """Seconds of training; waits for the device when it is read."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.total, self.began = device, 0.0, 0.0

    def go(self) -> None:
        self._wait()
        self.began = perf_counter()

    def pause(self) -> float:
        self._wait()
        self.total += perf_counter() - self.began
        return self.total

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def recipe_of(run: RaceRun, changes: dict[str, Any]) -> Recipe:
    """The recipe of a run; its images must have been offered."""
    images = DATASETS[run.settings(changes)["data"]].load(Path())
    return run.recipe(changes, images.training or 0)


def described(run: RaceRun, changes: dict[str, Any], device: torch.device, alone: bool) -> Result:
    """A result without measurements yet: lists over the checkpoints."""
    about: Result = {"key": run.key(changes), **asdict(run), "alone": alone, "batch": run.settings(changes)["batch"]}
    about |= {name: [] for name in ("step", "seconds", "loss_value", "logistic", "knn", "rank", "grown")}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about |= {"start_s": None, "measured_s": 0.0}  # seconds until the clock starts, and off the clock
    return about | {"diverged": False, "device": name, "torch": torch.__version__}


def device_for_runs(name: str) -> torch.device:
    """The device, set for many runs of equal shapes on a machine that others may use."""
    where = choose_device(name)
    if where.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_num_threads(1)  # threads would wait for one another, and little is done on the CPU
    return where


def race(run: RaceRun, images: RaceImages, changes: dict[str, Any], alone: bool, device: str = "auto") -> Result:
    """Train one run and return its result."""
    images.offer()
    where = device_for_runs(device)
    began = perf_counter()
    result = described(run, changes, where, alone)
    trainer = Trainer(recipe_of(run, changes), Path("unused"), where)  # only Trainer.run writes to the folder
    try:
        _train(trainer, run, result, began)
        finish(trainer, run, result, images)
    finally:
        trainer.close()
        del trainer
        free_memory(where)
    return result


def free_memory(device: torch.device) -> None:
    """Free the recordings of earlier runs, which hold gigabytes: they and their trainer refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        if free < total / 2:  # to allocate again takes time
            torch.cuda.empty_cache()


def transfer(trainer: Trainer, images: RaceImages) -> float:
    """Accuracy of a logistic probe on images of another dataset, scaled to the size of the views."""
    pairs, material = trainer.material.pairs, trainer.material
    feed = build_feed(Images(images.name, images.pixels), trainer.device)
    precision = torch.bfloat16 if material.bf16 else None
    rows = torch.arange(len(images.labels))
    h, _ = represent(trainer.network, feed, rows, pairs.size, pairs.mean, pairs.std, precision=precision)
    y, n = torch.as_tensor(images.labels, device=h.device), images.training
    return logistic_probe(h[:n], y[:n], h[n:], y[n:])


def checkpoints(run: RaceRun) -> list[int]:
    """Steps at which a run is measured: L/16, L/8, … for the first seed of a final run, else the end only."""
    halvings = 4 if run.stage == "final" and run.seed == 0 else 0
    return sorted({max(1, run.steps >> k) for k in range(halvings + 1)})


def _train(trainer: Trainer, run: RaceRun, result: Result, began: float) -> None:
    trainer.objective.train()
    pairs = trainer.remaining_pairs()
    clock, due = Clock(trainer.device), checkpoints(run)
    warm = min(WARM, run.steps - 1)
    for step in range(1, run.steps + 1):
        trainer.advance(pairs)
        if step == warm:
            clock.go()
            result["start_s"] = round(clock.began - began, 2)
        if step in due or step % CHECK == 0:
            elapsed = clock.pause() * step / (step - warm) if step in due and step > warm else None
            paused = perf_counter()
            measure(trainer, run, result, step, elapsed, step in due)
            if step in due:
                clock.go()
                result["measured_s"] = round(result["measured_s"] + clock.began - paused, 2)
        if result["diverged"]:
            return


def finish(trainer: Trainer, run: RaceRun, result: Result, images: RaceImages) -> None:
    """Measurements at the end of final runs only."""
    if run.stage == "final" and images.elsewhere is not None and not result["diverged"]:
        result["elsewhere"] = images.elsewhere.name
        result["transfer"] = [round(transfer(trainer, images.elsewhere), 5)]


def measure(trainer: Trainer, run: RaceRun, result: Result, step: int, seconds: float | None, due: bool) -> None:
    """Note whether training has diverged; if measurements are due, add them to the result, off the clock."""
    numbers = trainer.recorder.numbers()
    if numbers["bad_step"]:
        result |= {"diverged": True, "bad_step": int(numbers["bad_step"])}
    if numbers["bad_step"] or not due:
        return
    result["step"].append(step)
    result["seconds"].append(seconds and round(seconds, 3))
    result["loss_value"].append(numbers["loss"])
    trainer.recorder.values[:2] = 0
    if run.stage == "clock":
        return
    for name, value in probe_accuracies(trainer.network, trainer.recipe, trainer.material).items():
        result[name.removesuffix("_tuned")].append(round(value, 5))
    if run.stage == "tune" and run.loss in RACED:  # only the accuracy decides, and there are many of them
        return
    followed = spectrum_of_loss(trainer.recipe.loss, trainer.recipe.loss_options)
    spectra = held_out_spectra(trainer.network, trainer.recipe, trainer.material)
    result["rank"].append(round(float(effective_rank(spectra["held_covariance"])), 2))
    result["grown"].append(learned(spectra[f"held_{followed}"], 1.0 if followed == "eigenvalues" else None))
    result["spectrum"] = [float(f"{value:.4g}") for value in spectra["held_covariance"][:LEADING]]
