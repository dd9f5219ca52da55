"""How fast does a ResNet-18 reach 85, 90 and 92 % on CIFAR-10 without labels, by logistic regression on one view?

    python -m benchmarks.speedrun [--goals 85 90 92] [--seeds 3] [--data-file FILE …] [--out FILE.jsonl]
    python -m benchmarks.speedrun --search --seconds 45                 to choose settings: see speedrun_search.py
    python -m benchmarks.speedrun --best --goals 85                     with the settings that a search has chosen
    python -m benchmarks.speedrun --goals 85 --held-out --set lr=0.04   one setting by hand

The recipes are in benchmarks/speedrun.toml. With `--held-out` or `--search` a run does not see the last tenth of the
training images and is judged on it, and the test images are not loaded; this is how settings are chosen. Every result
is one line of `--out`; a run that is there already is not repeated.

The time of a run begins when the images are in the memory of the host and ends with the last step. It includes building
the network, choosing algorithms, compiling and recording, and excludes the probe. Where the time of a step goes is
measured after the run, piece by piece: views (drawn on a second stream, so not all of their time is added), loss and
its gradient, optimizer, and the rest, which is the network.
"""

import argparse
import hashlib
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.bench_engine import optimizer_call, rate, step_call, views_call
from benchmarks.bench_train import sync
from benchmarks.race.images import named_images, read_images
from benchmarks.race.single import CHECK, device_for_runs, free_memory
from benchmarks.race.store import Result, Store
from benchmarks.speedrun_search import Settings, accuracy, next_trial, steps_in, steps_in_new_process, without_steps
from stairwise.theory.spectra import effective_rank
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer
from stairwise.training.measure import held_out_spectra, probe_accuracies
from stairwise.training.recipe import Recipe

GOALS = tomllib.loads((Path(__file__).parent / "speedrun.toml").read_text())
STORE = Path("docs/results/speedrun.jsonl")
COMMON: dict[str, Any] = {
    **{"views": "barlow-small", "encoder": "resnet18", "encoder_options": {"stem": "small"}, "schedule": "cosine"},
    **{"optimizer": "muon", "momentum": 0.95, "warmup_epochs": 1.0, "final_lr": 0.0},
    **{"probes": ["knn", "logistic_tuned"], "held_out": 4096, "records": 1, "hidden_spectrum": False},
}


def recipe_of(goal: str, seed: int, held_out: bool, changes: Settings, chosen: Settings | None = None) -> Recipe:
    """The recipe of a goal, or with settings that were chosen instead of it."""
    settings = COMMON | (chosen or GOALS[goal]["recipe"])
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


def speedrun(goal: str, recipe: Recipe, device: torch.device, pause: Pause | None = None) -> Result | None:
    """Train, probe, and take the time, that of loading checkpoints and recording anew included; None after a pause."""
    began = perf_counter()
    trainer = Trainer(recipe, pause.folder if pause else Path("unused"), device)
    if pause:
        trainer.resume()
    trainer.objective.train()
    pairs, first, total = trainer.remaining_pairs(), trainer.step_number, trainer.calendar.total
    ready = began
    for step in range(first + 1, total + 1):
        trainer.advance(pairs)
        if step == min(first + 10, total):
            sync(device)
            ready = perf_counter()
        if step % CHECK == 0:
            if trainer.recorder.numbers()["bad_step"]:
                break
            if pause and perf_counter() > pause.deadline:
                trainer.seconds += perf_counter() - began
                print(f"paused after step {step} of {total}: {trainer.save()}", flush=True)
                trainer.close()
                return None
    sync(device)
    done = perf_counter()
    result: Result = {
        **{"goal": goal, "wanted": GOALS[goal]["accuracy"], "limit": GOALS[goal]["seconds"], "steps": total},
        **{"views": 2 * recipe.batch * total, "seconds": round(trainer.seconds + done - began, 2)},
        **{"start": round(ready - began, 2), "training_images": trainer.material.training},
        "diverged": bool(trainer.recorder.numbers()["bad_step"]),
    }
    result["views_per_second"] = round(2 * recipe.batch * (total - first - 10) / max(done - ready, 1e-9))
    result |= {} if result["diverged"] else measured(trainer, device)
    trainer.close()
    return result


def measured(trainer: Trainer, device: torch.device) -> Result:
    """Accuracies, effective rank and the time of parts of a step, after a run."""
    began = perf_counter()
    scores = probe_accuracies(trainer.network, trainer.recipe, trainer.material)
    result: Result = {name.removesuffix("_tuned"): value for name, value in scores.items()}
    spectrum = held_out_spectra(trainer.network, trainer.recipe, trainer.material)["held_covariance"]
    result["rank"] = round(float(effective_rank(spectrum)), 2)
    sync(device)
    return result | {"probe": round(perf_counter() - began, 2), "parts_ms": parts(trainer, device)}


def parts(trainer: Trainer, device: torch.device, seconds: float = 0.5) -> dict[str, float]:
    """Milliseconds per step of its parts, each measured alone."""
    batch, d = trainer.material.batch, trainer.recipe.d
    loss: Any = getattr(trainer.objective, "loss", None)
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
    """The search in a store: trials of so many seconds on so many images."""

    def __init__(self, store: Store, training: int, seconds: float, changes: Settings) -> None:
        self.store, self.training, self.seconds, self.changes = store, training, seconds, changes

    def recipe(self, settings: Settings) -> Recipe:
        return without_steps(recipe_of("85", 0, True, self.changes, settings))

    def key(self, settings: Settings) -> str:
        return key_of(f"search {self.seconds:g} s", self.recipe(settings), self.training)

    def state(self) -> tuple[Settings, Settings | None]:
        """The best settings so far, and those to try next."""
        results = self.store.results()
        return next_trial(lambda settings: accuracy(results, self.key(settings)))

    def run_next(self, device: torch.device) -> bool:
        """Run the next trial; False if there is none."""
        _, settings = self.state()
        if settings is None:
            return False
        recipe = self.recipe(settings)
        timed = replace(recipe, steps=steps_in(recipe, device, self.seconds))
        _run_once("85", timed, self.key(settings), self.store, device, held_out=True)
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
    began = perf_counter()

    def in_time(seconds: float) -> bool:
        return perf_counter() - began + seconds < 60 * options.minutes

    images = read_images(options.data_file, "cifar10", options.most) if options.data_file else named_images("cifar10")
    store, device = Store(options.out), device_for_runs("auto")
    images.offer()
    changes = dict(text.split("=", 1) for text in options.set)
    searched = Searched(store, images.training, options.seconds, changes)
    if options.search:
        while in_time(1.2 * options.seconds + 5) and searched.run_next(device):
            print(f"best so far: {searched.state()[0]}", flush=True)
        return
    pause = Pause(options.folder, began + 60 * options.minutes) if options.folder else None
    for goal in options.goals:
        for seed in range(options.seeds):
            if in_time(30 if pause else GOALS[goal]["seconds"]):
                _run_goal(goal, seed, options, searched, device, pause)


def _run_goal(
    goal: str,
    seed: int,
    options: argparse.Namespace,
    searched: Searched,
    device: torch.device,
    pause: Pause | None = None,
) -> None:
    chosen = searched.state()[0] if options.best else None
    recipe = recipe_of(goal, seed, options.held_out, searched.changes, chosen)
    about = key_of(goal, without_steps(replace(recipe, seed=0)), searched.training)
    if options.best:
        recipe = searched.fitted(goal, without_steps(recipe))
    key = key_of(goal, recipe, searched.training)
    _run_once(goal, recipe, key, searched.store, device, options.held_out, about, pause)


def _run_once(
    goal: str,
    recipe: Recipe,
    key: str,
    store: Store,
    device: torch.device,
    held_out: bool,
    about: str = "",
    pause: Pause | None = None,
) -> None:
    if key in store.results():
        return
    found = speedrun(goal, recipe, device, pause.of(key) if pause else None)
    free_memory(device)
    if found is None:
        return
    result = {"key": key, "about": about, "seed": recipe.seed, "held_out": held_out, **found}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "alone": True}
    store.add(result)
    print(json.dumps(result), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goals", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", action="store_true", help="choose settings on held-out training images")
    parser.add_argument("--seconds", type=float, default=45.0, help="of a trial of the search")
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
