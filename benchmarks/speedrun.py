"""How fast does a ResNet-18 reach 85, 90 and 92 % on CIFAR-10 without labels, by logistic regression on one view?

    python -m benchmarks.speedrun [--goals 85 90 92] [--seeds 3] [--data-file FILE …] [--out FILE.jsonl]
    python -m benchmarks.speedrun --search --seconds 20 --engine fused   to choose settings: see speedrun_search.py
    python -m benchmarks.speedrun --best --seconds 20 --engine fused     with the settings that this search has chosen
    python -m benchmarks.speedrun --goals 85 --held-out --set lr=0.04    one setting by hand

The recipes are in benchmarks/speedrun.toml; with `--best` a goal changes the chosen settings by its `longer` only. With
`--held-out` or `--search` a run does not see the last tenth of the training images and is judged on it (a search on all
training images, by probes that have not seen their labels), and the test images are not used; this is how settings
are chosen. Every result is one line of `--out`; a run that is there already is not repeated. Probes see images as they
are, 32 px; accuracies with images enlarged for the probe are noted beside that and decide nothing.

The time of a run begins when the images are in the memory of the host and ends with the last step. It includes building
the network, choosing algorithms, compiling and recording, and excludes the probe. Every run has a process of its own,
because in one process the later ones would find algorithms chosen; only the trials of a search share one. With
`--folder` a run may pause: its time includes every new start, its rate of views does not, and its pauses are counted.
Where the time of a step with full views goes is measured after the run, piece by piece: views (drawn on a second
stream, so not all of their time is added), loss and its gradient, optimizer, and the rest, which is the network.
"""

import argparse
import hashlib
import json
import multiprocessing
import tomllib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch

from benchmarks import speedrun_search
from benchmarks.bench_engine import optimizer_call, rate, step_call, views_call
from benchmarks.bench_muon_angle import growth_of_weights
from benchmarks.bench_train import sync
from benchmarks.race.images import RaceImages, named_images, read_images
from benchmarks.race.single import CHECK, WARM, device_for_runs, free_memory
from benchmarks.race.store import Result, Store
from benchmarks.speedrun_search import (
    ENGINES,
    OTHER_SIZES,
    START,
    Settings,
    accuracy,
    folded_accuracy,
    next_trial,
    steps_in,
    steps_in_new_process,
    without_steps,
)
from stairwise.files import atomic
from stairwise.theory.spectra import effective_rank
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer
from stairwise.training.measure import held_out_spectra, probe_accuracies
from stairwise.training.recipe import Recipe

GOALS = tomllib.loads((Path(__file__).parent / "speedrun.toml").read_text())
STORE = Path("docs/results/speedrun.jsonl")
STRETCHES = "stretches.json"
COMMON: dict[str, Any] = {
    **{"views": "barlow-small", "encoder": "resnet18", "encoder_options": {"stem": "small"}, "schedule": "cosine"},
    **{"optimizer": "muon", "momentum": 0.95, "warmup_epochs": 1.0, "final_lr": 0.0},
    **{"probes": ["knn", "logistic_tuned"], "held_out": 4096, "records": 1, "hidden_spectrum": False},
}


def recipe_of(goal: str, seed: int, held_out: bool, changes: Settings, chosen: Settings | None = None) -> Recipe:
    """The recipe of a goal, or with settings that were chosen instead of it."""
    settings = COMMON | (chosen | GOALS[goal].get("longer", {}) if chosen else GOALS[goal]["recipe"])
    settings |= {"seed": seed, "data": "race-tune" if held_out else "race-final"}
    return Recipe().with_settings(settings).with_settings(changes)


def key_of(goal: str, recipe: Recipe, training: int) -> str:
    """Names a run by all settings that are not defaults."""
    plain, default = recipe.plain(), Recipe().plain()
    changed = {k: v for k, v in plain.items() if v != default[k] and k not in ("label", "probes", "records")}
    return f"{goal}/{training}/" + json.dumps(changed, sort_keys=True)


@dataclass(frozen=True)
class Pause:
    """A run stops when the time is up (of `perf_counter`), with a checkpoint in the folder, and continues from it."""

    folder: Path
    deadline: float

    def of(self, key: str) -> "Pause":
        """The same with a folder for one run."""
        return Pause(self.folder / hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), self.deadline)


@dataclass(frozen=True)
class Stretch:
    """Steps of a run without a pause, after step `first` and up to `last`, and their seconds: of the start with the
    first WARM steps, and of the others."""

    first: int
    last: int
    start: float
    steady: float

    @property
    def steady_steps(self) -> int:
        return max(0, self.last - self.first - WARM)


def stretches(folder: Path, before: int) -> list[Stretch]:
    """The stretches of a paused run that its checkpoint, after step `before`, has in it."""
    stored = folder / STRETCHES
    found = [Stretch(**values) for values in json.loads(stored.read_text())] if stored.is_file() else []
    return [stretch for stretch in found if stretch.last <= before]


def speedrun(
    goal: str, recipe: Recipe, device: torch.device, pause: Pause | None = None, trial: bool = False
) -> Result | None:
    """Train, probe, and take the time, that of loading checkpoints and recording anew included; None after a pause.

    `trial`: only the probes that a search is judged by.
    """
    began = ready = perf_counter()
    trainer = Trainer(recipe, pause.folder if pause else Path("unused"), device)
    if pause:
        trainer.resume()
    trainer.objective.train()
    pairs, first, total = trainer.remaining_pairs(), trainer.step_number, trainer.calendar.total
    parted = stretches(pause.folder, first) if pause else []
    for step in range(first + 1, total + 1):
        trainer.advance(pairs)
        if step == min(first + WARM, total):
            sync(device)
            ready = perf_counter()
        if step % CHECK == 0:
            if trainer.recorder.numbers()["bad_step"]:
                break
            if pause and perf_counter() > pause.deadline:
                now = perf_counter()
                trainer.seconds += now - began
                parted.append(Stretch(first, step, ready - began, now - ready))
                with atomic(pause.folder / STRETCHES) as part:
                    part.write_text(json.dumps([asdict(stretch) for stretch in parted]))
                print(f"paused after step {step} of {total}: {trainer.save()}", flush=True)
                trainer.close()
                return None
    sync(device)
    done = perf_counter()
    trainer.seconds += done - began
    parted.append(Stretch(first, trainer.step_number, ready - began, done - ready))
    result = described(goal, trainer, parted)
    if not result["diverged"]:
        result |= judged(trainer) if trial else measured(trainer, device)
    trainer.close()
    return result


def described(goal: str, trainer: Trainer, parted: list[Stretch]) -> Result:
    """What a run took, over all of its stretches."""
    per_step, total = 2 * trainer.recipe.batch, trainer.calendar.total
    steps, seconds = sum(s.steady_steps for s in parted), sum(s.steady for s in parted if s.steady_steps)
    rate = per_step * steps / seconds if steps else per_step * trainer.step_number / trainer.seconds
    start = sum(s.start + (0.0 if s.steady_steps else s.steady) for s in parted)
    return {
        **{"goal": goal, "wanted": GOALS[goal]["accuracy"], "limit": GOALS[goal]["seconds"], "steps": total},
        **{"views": per_step * total, "seconds": round(trainer.seconds, 2), "views_per_second": round(rate)},
        **{"start": round(start, 2), "pauses": len(parted) - 1, "weights": growth_of_weights(trainer)},
        **{"training_images": trainer.material.training},
        "diverged": bool(trainer.recorder.numbers()["bad_step"]),
    }


def measured(trainer: Trainer, device: torch.device) -> Result:
    """Accuracies, effective rank and the time of parts of a step, after a run."""
    began = perf_counter()
    scores = probe_accuracies(trainer.network, trainer.recipe, trainer.material)
    result: Result = {name.removesuffix("_tuned"): value for name, value in scores.items()}
    spectrum = held_out_spectra(trainer.network, trainer.recipe, trainer.material)["held_covariance"]
    result["rank"] = round(float(effective_rank(spectrum)), 2)
    if trainer.recipe.data == "race-final":
        result["enlarged"] = enlarged(trainer)
    sync(device)
    return result | {"probe": round(perf_counter() - began, 2), "parts_ms": parts(trainer, device)}


def enlarged(trainer: Trainer, sides: tuple[int, ...] = (36, 40)) -> dict[str, float]:
    """Accuracies of the logistic probe if images are enlarged for it."""
    recipe, material = replace(trainer.recipe, probes=["logistic_tuned"]), trainer.material
    found = {}
    for side in sides:
        pairs = material.pairs.copy()
        pairs.size = side
        found[str(side)] = probe_accuracies(trainer.network, recipe, replace(material, pairs=pairs))["logistic_tuned"]
    return found


def judged(trainer: Trainer) -> Result:
    """What a trial of a search is judged by, and accuracies of images of other sizes."""
    began = perf_counter()
    result: Result = {"folded": round(folded_accuracy(trainer), 5)}
    result["sized"] = {str(side): round(folded_accuracy(trainer, side, folds=1), 5) for side in (0, *OTHER_SIZES)}
    return result | {"probe": round(perf_counter() - began, 2)}


def parts(trainer: Trainer, device: torch.device, seconds: float = 0.5) -> dict[str, float]:
    """Milliseconds per step of its parts, each measured alone."""
    batch, d = trainer.material.batch, trainer.recipe.d
    loss: Any = getattr(trainer.objective, "loss_of", None)
    z = [torch.randn(batch, d, device=device, requires_grad=True) for _ in range(2)]

    def of_loss() -> None:
        loss(*z).backward()

    calls = {"views": views_call(trainer), "step": step_call(trainer), "optimizer": optimizer_call(trainer)}
    if loss is not None:
        calls["loss"] = Recorded(of_loss) if trainer.material.graph else of_loss
    found = {name: 1e3 / rate(device, call, 1, seconds) for name, call in calls.items()}
    found["network"] = found["step"] - found["optimizer"] - found.get("loss", 0.0)
    return {name: round(value, 3) for name, value in found.items()}


class Searched:
    """The search in a store: trials of so many seconds on so many images, with an engine."""

    def __init__(self, store: Store, training: int, seconds: float, changes: Settings, engine: str = "plain") -> None:
        self.store, self.training, self.seconds, self.changes = store, training, seconds, changes
        self.start = START | ENGINES[engine]

    def recipe(self, settings: Settings) -> Recipe:
        return without_steps(recipe_of("85", 0, True, self.changes, settings))

    def key(self, settings: Settings) -> str:
        return key_of(f"design {self.seconds:g} s", self.recipe(settings), self.training)

    def state(self) -> tuple[Settings, Settings | None]:
        """The best settings so far, and those to try next."""
        results = self.store.results()
        return next_trial(lambda settings: accuracy(results, self.key(settings)), self.start)

    def run_next(self, device: torch.device) -> bool:
        """Run the next trial; False if there is none."""
        _, settings = self.state()
        if settings is None:
            return False
        recipe, key = self.recipe(settings), self.key(settings)
        try:
            steps_in(recipe, device, self.seconds)  # what a process compiles only once is no part of a trial's time
            timed = replace(recipe, steps=steps_in(recipe, device, self.seconds))
            _run_once("85", timed, key, self.store, device, held_out=True, trial=True)
        except Exception as error:  # counts as diverged, so that the same command continues with the next trial
            about = {"held_out": True, "diverged": True, "failed": repr(error)[:300], "views": 0, "alone": True}
            self.store.add({"key": key, **about})
            raise
        return True

    def fitted(self, goal: str, recipe: Recipe) -> Recipe:
        """The recipe with as many steps as the goal has time for; as many as other seeds of it had."""
        about = key_of(goal, without_steps(replace(recipe, seed=0)), self.training)
        known = [r["steps"] for r in self.store.results().values() if r.get("about") == about]
        if not known:
            known = [steps_in_new_process(recipe, GOALS[goal]["seconds"])]
            self.store.add(
                {"key": f"steps/{about}", "about": about, "steps": known[0], "held_out": True, "alone": True}
            )
        return replace(recipe, steps=known[0])


def main() -> None:
    options = _options()
    began, ends = perf_counter(), time() + 60 * options.minutes

    def in_time(seconds: float) -> bool:
        return perf_counter() - began + seconds < 60 * options.minutes

    images, store = _images(options), Store(options.out)
    changes = dict(text.split("=", 1) for text in options.set)
    searched = Searched(store, images.training, options.seconds, changes, options.engine)
    if options.search:
        images.offer()
        device = device_for_runs("auto")
        while in_time(options.seconds + 12) and searched.run_next(device):
            print(f"best so far: {searched.state()[0]}", flush=True)
        return
    if options.best:
        found, left = searched.state()
        print(f"settings of {'a search' if left is None else 'an unfinished search'}: {found}", flush=True)
    for goal in options.goals:
        for seed in range(options.seeds):
            if in_time(30 if options.folder else GOALS[goal]["seconds"]):
                run_goal(goal, seed, options, searched, partial(run_alone, options, ends))


def _images(options: argparse.Namespace) -> RaceImages:
    if options.data_file:
        return read_images(options.data_file, "cifar10", options.most)
    return named_images("cifar10", options.most)


def run_goal(
    goal: str, seed: int, options: argparse.Namespace, searched: Searched, run: Callable[[str, Recipe, str, str], None]
) -> None:
    """Call `run` with goal, recipe, key and what it is about, unless it has been run."""
    chosen = searched.state()[0] if options.best else None
    recipe = recipe_of(goal, seed, options.held_out, searched.changes, chosen)
    about = key_of(goal, without_steps(replace(recipe, seed=0)), searched.training)
    if options.best:
        recipe = searched.fitted(goal, without_steps(recipe))
    key = key_of(goal, recipe, searched.training)
    if key not in searched.store.results():
        run(goal, recipe, key, about)


def run_alone(options: argparse.Namespace, ends: float, goal: str, recipe: Recipe, key: str, about: str) -> None:
    """Run in a new process, which chooses its algorithms anew; `ends`: when a run must pause, as `time.time()`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_run_here, options, ends, goal, recipe, key, about).result()


def _run_here(options: argparse.Namespace, ends: float, goal: str, recipe: Recipe, key: str, about: str) -> None:
    _images(options).offer()
    pause = Pause(options.folder, perf_counter() + ends - time()) if options.folder else None
    device = device_for_runs("auto")
    with speedrun_search.nothing_compiled():
        _run_once(goal, recipe, key, Store(options.out), device, options.held_out, about, pause, cold=True)


def _run_once(
    goal: str,
    recipe: Recipe,
    key: str,
    store: Store,
    device: torch.device,
    held_out: bool,
    about: str = "",
    pause: Pause | None = None,
    cold: bool = False,
    trial: bool = False,
) -> None:
    """Run and store, unless it has been run; `cold`: it is the first run of its process."""
    if key in store.results():
        return
    found = speedrun(goal, recipe, device, pause.of(key) if pause else None, trial)
    free_memory(device)
    if found is None:
        return
    result = {"key": key, "about": about, "seed": recipe.seed, "held_out": held_out, "cold": cold, **found}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "alone": True}
    store.add(result)
    print(json.dumps(result), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goals", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", action="store_true", help="choose settings on held-out training images")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a trial of the search")
    parser.add_argument("--engine", default="plain", choices=list(ENGINES), help="how batch norms are computed")
    parser.add_argument("--best", action="store_true", help="use the settings that the search has chosen")
    parser.add_argument("--held-out", action="store_true", help="judge on held-out training images, to choose settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the recipe"
    )
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images, as for benchmarks.race")
    parser.add_argument("--most", type=int, default=0, help="use only so many images of each split")
    parser.add_argument("--out", type=Path, default=STORE)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run that would not end in this time")
    parser.add_argument("--folder", type=Path, help="start it all the same, pause it in this folder, continue it later")
    return parser.parse_args()


if __name__ == "__main__":
    main()
