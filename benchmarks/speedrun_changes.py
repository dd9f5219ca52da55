"""Which single changes make a long run of the speedrun better? Those that do are made together.

    python -m benchmarks.speedrun_changes [--goal 92] [--seconds 60] [--data-file FILE …] [--out FILE.jsonl]

Every trial has the recipe of the goal with one change, as many updates as fit into its seconds, and nine tenths of the
training images. It is judged by probes on folds of all training images, as in the search; the test images are not
loaded. The recipe without changes is tried with two seeds. A change is chosen if it gains at least MARGIN over their
mean, and more than they differ. If several are, one more trial has all of them, and the best change alone is taken if
that is better. The last line of the output holds what was chosen, as options of `python -m benchmarks.speedrun`; it is
missing if the time was up. The same command continues: trials that are in `--out` are not repeated.
"""

import argparse
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.single import device_for_runs
from benchmarks.race.store import Store
from benchmarks.speedrun import GOALS, STORE, _images, _run_once, key_of, recipe_of
from benchmarks.speedrun_search import Settings, accuracy, steps_in, steps_in_new_process, without_steps
from stairwise.training.recipe import Recipe

MARGIN = 0.003
AROUND = 20.0  # seconds of a trial beside its own: to compile, to time and to probe; to plan with
# `batch` and `lr` are factors; `decay` is weight decay × learning rate × updates, so that longer runs have less of it
CHANGES: dict[str, dict[str, Any]] = {
    "eight views": {"views_per_image": 8},
    "half the batch": {"batch": 0.5, "lr": 0.7},
    "half the rate": {"lr": 0.5},
    "weight decay 4.5": {"decay": 4.5},
    "full views sooner": {"sizes": [[0.0, 24], [0.5, 32]]},
    "half the covariance term": {"loss_options.covariance": 1.0},
}
Names = tuple[str, ...]
Score = Callable[[Names, int], float | None]


def settings_of(recipe: Recipe, names: Sequence[str]) -> Settings:
    """What these changes, together, make of a recipe with its number of updates."""
    found: Settings = {}
    for change in (CHANGES[name] for name in names):
        found |= {key: value for key, value in change.items() if key not in ("batch", "lr", "decay")}
        if "batch" in change:
            found["batch"] = int(found.get("batch", recipe.batch) * change["batch"])
        if "lr" in change:
            found["lr"] = float(f"{found.get('lr', recipe.lr) * change['lr']:.3g}")
    decay = sum(CHANGES[name].get("decay", 0.0) for name in names)
    if decay:
        found["weight_decay"] = float(f"{decay / (found.get('lr', recipe.lr) * recipe.steps):.3g}")
    return found


def chosen(score: Score) -> Names | None:
    """The changes to be made; None if a trial that is needed has no score."""
    plain = [score((), seed) for seed in (0, 1)]
    alone = {name: score((name,), 0) for name in CHANGES}
    if None in plain or None in alone.values():
        return None
    first, second = (value or 0.0 for value in plain)
    bar = (first + second) / 2 + max(MARGIN, abs(first - second))
    gained = {name: value or 0.0 for name, value in alone.items() if (value or 0.0) >= bar}
    if len(gained) < 2:
        return tuple(gained)
    together = score(tuple(gained), 0)
    if together is None:
        return None
    best = max(gained, key=lambda name: gained[name])
    return tuple(gained) if together >= gained[best] else (best,)


class Trials:
    """Trials in a store; those that are not there are run until the time is up."""

    def __init__(self, store: Store, device: torch.device, goal: str, seconds: float, training: int) -> None:
        self.store, self.device, self.goal, self.seconds, self.training = store, device, goal, seconds, training
        self.deadline = float("inf")

    def score(self, names: Names, seed: int) -> float | None:
        """Accuracy of the recipe with these changes, 0 if it diverged or failed; None if the time is up."""
        recipe = without_steps(recipe_of(self.goal, seed, True, {}))
        like = recipe.with_settings(settings_of(recipe, names))
        # weight decay depends on the number of updates, which is not known yet; its name says how large it is
        about = f"change {self.seconds:g} s, {' + '.join(names) or 'none'}"
        key = key_of(about, replace(like, weight_decay=recipe.weight_decay), self.training)
        if key not in self.store.results():
            if time.monotonic() + self.seconds + AROUND > self.deadline:
                return None
            self._run(recipe, like, names, key)
        value = accuracy(self.store.results(), key)
        print(f"{about.partition(', ')[2]}, seed {seed}: {100 * (value or 0.0):.2f} %", flush=True)
        return value

    def _run(self, recipe: Recipe, like: Recipe, names: Names, key: str) -> None:
        try:
            steps_in(like, self.device, 1.0)  # what a process compiles only once is no part of a trial's time
            timed = replace(recipe, steps=steps_in(like, self.device, self.seconds))
            timed = timed.with_settings(settings_of(timed, names))
            _run_once(self.goal, timed, key, self.store, self.device, held_out=True, trial=True)
        except Exception as error:  # counts as diverged, so that the same command continues with the next trial
            about = {"held_out": True, "diverged": True, "failed": repr(error)[:300], "views": 0, "alone": True}
            self.store.add({"key": key, **about})
            raise


def fitted(goal: str, names: Names) -> Settings:
    """These changes with as many updates as the goal has time for."""
    recipe = without_steps(recipe_of(goal, 0, False, {}))
    steps = steps_in_new_process(recipe.with_settings(settings_of(recipe, names)), GOALS[goal]["seconds"])
    return settings_of(replace(recipe, steps=steps), names) | {"steps": steps}


def words(settings: Settings) -> str:
    """Settings as options of a command line."""
    return " ".join(f"--set {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in settings.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", default="92", choices=list(GOALS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of a trial")
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images, as for benchmarks.race")
    parser.add_argument("--most", type=int, default=0, help="use only so many images of each split")
    parser.add_argument("--out", type=Path, default=STORE)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no trial that would not end in this time")
    options = parser.parse_args(arguments)
    deadline, images = time.monotonic() + 60 * options.minutes, _images(options)
    images.offer()
    trials = Trials(Store(options.out), device_for_runs("auto"), options.goal, options.seconds, images.training)
    trials.deadline = deadline
    names = chosen(trials.score)
    if names is None:
        raise SystemExit("the time is up; the same command continues")
    print(f"chosen: {', '.join(names) or 'nothing'}", flush=True)
    print(words(fitted(options.goal, names)))


if __name__ == "__main__":
    main()
