"""Which single changes make a long run of the speedrun better? Those that do are made together.

    python -m benchmarks.speedrun_changes [--goal 92] [--seconds 90] [--jobs 4] [--data-file FILE …] [--out FILE.jsonl]

Every trial has the recipe of the goal with one change, nine tenths of the training images, and as many updates as a run
that has the machine to itself can make in its seconds. These are measured first; then `--jobs` trials share the
machine. A trial is judged by probes on folds of all training images, as in the search; the test images are not used.

The recipe without changes is tried with two seeds. A change is chosen if it gains at least MARGIN over their mean, and
more than they differ; of changes that exclude each other, the best. A weight decay is chosen if it loses nothing, and
of two the larger: it keeps the angle of an update from falling, which matters more the longer a run is, and all trials
are shorter than the run they are for. The last line of the output holds what was chosen, as options of
`python -m benchmarks.speedrun`; it is missing if the time was up. The same command continues: trials that are in
`--out` are not repeated, whether they ended, diverged or failed; one whose process was killed is.
"""

import argparse
import json
import multiprocessing
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.single import device_for_runs
from benchmarks.race.store import Result, Store
from benchmarks.speedrun import GOALS, STORE, _images, key_of, recipe_of, speedrun
from benchmarks.speedrun_search import Settings, accuracy, steps_in, steps_in_new_process, without_steps
from stairwise.training.recipe import Recipe

MARGIN = 0.003
AROUND = 20.0  # seconds of a trial beside its own: to compile and to probe; to plan with
# `batch` and `lr` are factors; `decay` is D = weight decay × learning rate × updates, so longer runs have less decay
CHANGES: dict[str, dict[str, Any]] = {
    "decay D = 5": {"decay": 5.0},
    "decay D = 15": {"decay": 15.0},
    "eight views": {"views_per_image": 8},
    "half the batch": {"batch": 0.5, "lr": 0.7},
    "FroSSL's loss": {"loss": "frossl"},
}
EXCLUSIVE = (("decay D = 5", "decay D = 15"), ("eight views", "half the batch"), ("FroSSL's loss",))
Names = tuple[str, ...]
Trial = tuple[Names, int]  # changes and seed
WANTED: tuple[Trial, ...] = (((), 0), *(((name,), 0) for name in CHANGES), ((), 1))


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


def chosen(scores: dict[Trial, float]) -> Names:
    """The changes to be made, by the accuracies of all trials; 0 is that of a trial that diverged or failed."""
    first, second = scores[(), 0], scores[(), 1]
    if not (first and second):
        raise SystemExit("a trial without changes diverged or failed, so no change can be judged")
    plain = (first + second) / 2
    bar = plain + max(MARGIN, abs(first - second))
    made: list[str] = []
    for group in EXCLUSIVE:
        alone = {name: scores[(name,), 0] for name in group}
        decays = all("decay" in CHANGES[name] for name in group)
        good = [name for name in group if alone[name] >= (plain if decays else bar)]
        if good:
            made.append(good[-1] if decays else max(good, key=lambda name: alone[name]))
    return tuple(made)


def plain_recipe(goal: str, seed: int, held_out: bool) -> Recipe:
    """The recipe of a goal before any of the changes; that of 92 has one of them by now."""
    return replace(without_steps(recipe_of(goal, seed, held_out, {})), weight_decay=0.0)


class Trials:
    """Trials in a store; those that are not there are run until the time is up.

    Arguments:
        training: number of training images, of which a trial sees nine tenths.
        work: goal and recipe → result; called in other processes.
    """

    def __init__(
        self, store: Store, goal: str, seconds: float, training: int, work: Callable[[str, Recipe], Result]
    ) -> None:
        self.store, self.goal, self.seconds, self.training, self.work = store, goal, seconds, training, work
        self.deadline = float("inf")

    def key(self, trial: Trial) -> str:
        names, seed = trial
        plain = plain_recipe(self.goal, seed, True)
        # weight decay depends on the number of updates, which is not known yet; its name says how large it is
        like = replace(plain.with_settings(settings_of(plain, names)), weight_decay=0.0)
        return key_of(f"change {self.seconds:g} s, {_words(names)}", like, self.training)

    def scores(self) -> dict[Trial, float]:
        """Accuracies of the trials so far, 0 of one that diverged or failed."""
        found = {trial: accuracy(self.store.results(), self.key(trial)) for trial in WANTED}
        return {trial: value for trial, value in found.items() if value is not None}

    def run(self, device: torch.device, jobs: int) -> None:
        """Run what is missing, `jobs` trials at once; a trial that fails counts as diverged."""
        done = self.scores()
        missing = (trial for trial in WANTED if trial not in done and self.in_time(jobs))
        recipes = {trial: recipe for trial in missing if (recipe := self._timed(trial, device))}
        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(self._run, trial, recipe, jobs) for trial, recipe in recipes.items()]
        for run in running:
            run.result()  # raises what went wrong outside of a trial

    def in_time(self, jobs: int) -> bool:
        return time.monotonic() + self.seconds * jobs + AROUND < self.deadline

    def _timed(self, trial: Trial, device: torch.device) -> Recipe | None:
        """The recipe of a trial with as many updates as fit into its seconds; nothing else may run meanwhile."""
        names, seed = trial
        plain = plain_recipe(self.goal, seed, True)
        like = plain.with_settings(settings_of(plain, names))
        try:
            steps_in(like, device, 1.0)  # what a process compiles only once is no part of a trial's time
            recipe = replace(plain, steps=steps_in(like, device, self.seconds))
        except Exception as error:
            self._add(trial, _failed(error))
            return None
        return recipe.with_settings(settings_of(recipe, names))

    def _run(self, trial: Trial, recipe: Recipe, jobs: int) -> None:
        """Run in a process of its own, so that one that is killed takes no other with it."""
        if not self.in_time(jobs):
            return
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                self._add(trial, pool.submit(self.work, self.goal, recipe).result())
            except BrokenProcessPool:
                print(f"{_words(trial[0])}, seed {trial[1]}: its process was killed", flush=True)
            except Exception as error:
                self._add(trial, _failed(error))

    def _add(self, trial: Trial, result: Result) -> None:
        names, seed = trial
        self.store.add({"key": self.key(trial), **result, "held_out": True, "alone": False, "seed": seed})
        print(f"{_words(names)}, seed {seed}: {100 * result.get('folded', 0.0):.2f} %", flush=True)


def _words(names: Names) -> str:
    return " + ".join(names) or "none"


def _failed(error: Exception) -> Result:
    return {"diverged": True, "failed": repr(error)[:300], "views": 0}


def fitted(goal: str, names: Names) -> Settings:
    """These changes with as many updates as the goal has time for."""
    recipe = plain_recipe(goal, 0, False)
    steps = steps_in_new_process(recipe.with_settings(settings_of(recipe, names)), GOALS[goal]["seconds"])
    return settings_of(replace(recipe, steps=steps), names) | {"steps": steps}


def words(settings: Settings) -> str:
    """Settings as options of a command line."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return " ".join(f"--set {shlex.quote(f'{key}={text}')}" for key, text in texts.items())


class Work:
    """A trial in a process of its own, which reads the images anew."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def __call__(self, goal: str, recipe: Recipe) -> Result:
        _images(self.options).offer()
        device = device_for_runs("auto")
        found = speedrun(goal, recipe, device, trial=True)
        return found or {}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", default="92", choices=list(GOALS))
    parser.add_argument("--seconds", type=float, default=90.0, help="of a trial, if it had the machine to itself")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images, as for benchmarks.race")
    parser.add_argument("--most", type=int, default=0, help="use only so many images of each split")
    parser.add_argument("--out", type=Path, default=STORE)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no trial that would not end in this time")
    options = parser.parse_args(arguments)
    deadline, images = time.monotonic() + 60 * options.minutes, _images(options)
    images.offer()
    trials = Trials(Store(options.out), options.goal, options.seconds, images.training, Work(options))
    trials.deadline = deadline
    trials.run(device_for_runs("auto"), options.jobs)
    scores = trials.scores()
    if len(scores) < len(WANTED):
        raise SystemExit("the time is up; the same command continues")
    names = chosen(scores)
    print(f"chosen: {', '.join(names) or 'nothing'}", flush=True)
    print(words(fitted(options.goal, names)))


if __name__ == "__main__":
    main()
