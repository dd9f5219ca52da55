"""Several runs of equal length at once on one GPU: their steps are recorded in one graph, each on its own stream.

Kernels of 32 px images leave a large GPU partly idle; those of another run fill it. Nothing is shared between the runs
but the machine, so results are those of single runs; their seconds are not.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.race.entrants import RaceRun
from benchmarks.race.images import RaceImages
from benchmarks.race.single import (
    CHECK,
    checkpoints,
    described,
    device_for_runs,
    finish,
    free_memory,
    measure,
    recipe_of,
)
from benchmarks.race.store import Result
from stairwise.data.views import Pair
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer


class Team:
    """Trainers that take their steps at the same time."""

    def __init__(self, trainers: list[Trainer]) -> None:
        self.trainers = trainers
        recorded = all(trainer.take != trainer.step for trainer in trainers)
        for trainer in trainers:
            trainer.objective.train()
        self.pairs: list[Iterator[Pair]] = [trainer.remaining_pairs() for trainer in trainers]
        self.take = Recorded(self._take) if recorded else self._take

    def advance(self) -> None:
        """One step of every run."""
        views = [x for pairs in self.pairs for x in next(pairs)]
        for trainer in self.trainers:
            trainer.set_rates()
        self.take(*views)
        for trainer in self.trainers:
            trainer.step_number += 1

    def _take(self, *views: Tensor) -> None:
        if not (views[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            for trainer, (x_a, x_b) in zip(self.trainers, _pairs(views), strict=True):
                trainer.step(x_a, x_b, measure=False)
            return
        here = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in self.trainers]
        for stream, trainer, (x_a, x_b) in zip(streams, self.trainers, _pairs(views), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                trainer.step(x_a, x_b, measure=False)
        for stream in streams:
            here.wait_stream(stream)


def _pairs(views: tuple[Tensor, ...]) -> list[Pair]:
    return list(zip(views[::2], views[1::2], strict=True))


def race_together(
    runs: list[RaceRun], images: RaceImages, changes: dict[str, Any], device: str = "auto"
) -> list[Result]:
    """Results of several runs with the same number of steps."""
    images.offer()
    where = device_for_runs(device)
    results: list[Result] = [described(run, changes, where, alone=False) for run in runs]
    with ExitStack() as stack:
        trainers = []
        for run in runs:
            trainers.append(Trainer(recipe_of(run, changes), Path("unused"), where))
            stack.callback(trainers[-1].close)
        team, due = Team(trainers), [checkpoints(run) for run in runs]
        for step in range(1, runs[0].steps + 1):
            team.advance()
            for trainer, run, result, mine in zip(trainers, runs, results, due, strict=True):
                if (step in mine or step % CHECK == 0) and not result["diverged"]:
                    measure(trainer, run, result, step, None, step in mine)
            if all(result["diverged"] for result in results):
                break
        for trainer, run, result in zip(trainers, runs, results, strict=True):
            finish(trainer, run, result, images)
    del trainers, trainer, team
    free_memory(where)
    return results


def teams(pending: list[RaceRun], most: int) -> list[RaceRun]:
    """The first pending run, and those that can be its team: the same stage, loss and length."""
    first = pending[0]
    alike = [r for r in pending if (r.stage, r.loss, r.steps) == (first.stage, first.loss, first.steps)]
    return alike[:most]
