"""Which single changes make a long run of the speedrun better? Those that do are made together.

    python -m benchmarks.speedrun_changes [--goal 92] [--seconds 75] [--data-file FILE …] [--out FILE.jsonl]

Every trial has the recipe of the goal with one change, as many updates as fit into its seconds, and nine tenths of the
training images. It is judged by probes on folds of all training images, as in the search; the test images are not
loaded. All changes that gain at least MARGIN over the recipe without changes are chosen. The last line of the output
holds them as options of `python -m benchmarks.speedrun`. Trials that are in `--out` are not repeated.
"""

import argparse
import json
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.single import device_for_runs
from benchmarks.race.store import Store
from benchmarks.speedrun import GOALS, STORE, _images, _run_once, key_of, recipe_of
from benchmarks.speedrun_search import Settings, accuracy, steps_in, steps_in_new_process, without_steps
from stairwise.training.recipe import Recipe

MARGIN = 0.0015  # three seeds of four minutes lie within 0.0008
# factors of learning rates multiply; `decay` is weight decay × learning rate × updates, so that longer runs have less
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "eight views": {"views_per_image": 8},
    "half the batch": {"batch": 0.5, "lr": 0.7},
    "half the rate": {"lr": 0.5},
    "weight decay": {"decay": 4.5},
    "full views sooner": {"sizes": [[0.0, 24], [0.5, 32]]},
    "half the covariance term": {"loss_options.covariance": 1.0},
}


def settings_of(recipe: Recipe, names: Iterable[str]) -> Settings:
    """What these changes, together, make of a recipe with its number of updates."""
    found: Settings = {}
    for change in (CHANGES[name] for name in names):
        found |= {key: value for key, value in change.items() if key not in ("batch", "lr", "decay")}
        for key in ("batch", "lr"):
            if key in change:
                found[key] = type(getattr(recipe, key))(found.get(key, getattr(recipe, key)) * change[key])
    decay = sum(CHANGES[name].get("decay", 0.0) for name in names)
    if decay:
        found["weight_decay"] = float(f"{decay / (found.get('lr', recipe.lr) * recipe.steps):.3g}")
    return found


def trial(store: Store, device: torch.device, goal: str, name: str, seconds: float, training: int) -> float:
    """Accuracy of a recipe with one change; it is run if it is not in the store."""
    recipe = without_steps(recipe_of(goal, 0, True, {}))
    key = key_of(f"change {seconds:g} s, {name}", recipe, training)
    if key not in store.results():
        like = recipe.with_settings(settings_of(recipe, [name]))
        steps_in(like, device, 1.0)  # what a process compiles only once is no part of a trial's time
        timed = replace(recipe, steps=steps_in(like, device, seconds))
        timed = timed.with_settings(settings_of(timed, [name]))
        _run_once(goal, timed, key, store, device, held_out=True, trial=True)
    return accuracy(store.results(), key) or 0.0


def chosen(scores: dict[str, float]) -> list[str]:
    """The changes that gain enough."""
    return [name for name, score in scores.items() if score >= scores["none"] + MARGIN]


def fitted(goal: str, names: list[str]) -> Settings:
    """These changes with as many updates as the goal has time for."""
    recipe = without_steps(recipe_of(goal, 0, False, {}))
    steps = steps_in_new_process(recipe.with_settings(settings_of(recipe, names)), GOALS[goal]["seconds"])
    return settings_of(replace(recipe, steps=steps), names) | {"steps": steps}


def words(settings: Settings) -> str:
    """Settings as options of a command line."""
    return " ".join(f"--set {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in settings.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", default="92", choices=list(GOALS))
    parser.add_argument("--seconds", type=float, default=75.0, help="of a trial")
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images, as for benchmarks.race")
    parser.add_argument("--most", type=int, default=0, help="use only so many images of each split")
    parser.add_argument("--out", type=Path, default=STORE)
    options = parser.parse_args()
    images = _images(options)
    images.offer()
    store, device, scores = Store(options.out), device_for_runs("auto"), {}
    for name in CHANGES:
        scores[name] = trial(store, device, options.goal, name, options.seconds, images.training)
        print(f"{name}: {100 * scores[name]:.2f} %, {100 * (scores[name] - scores['none']):+.2f}", flush=True)
    print(f"chosen: {', '.join(chosen(scores)) or 'nothing'}", flush=True)
    print(words(fitted(options.goal, chosen(scores))))


if __name__ == "__main__":
    main()
