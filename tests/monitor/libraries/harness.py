"""Train a module with and without the monitor, and compare its records with what passed through the modules."""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stairwise.checks import RunWarning
from stairwise.runs.record import Record

STEPS = 6
TOLERANCE = 1e-6  # of eigenvalues, relative to the largest


@dataclass(frozen=True)
class Case:
    """A module of a library, the line that is documented for it, and which modules see its views.

    Attributes:
        build: makes the module; called once per run.
        batch: makes the batch of a step.
        line: arguments of the callback or of `attach`; modules are given by name.
        z: module whose first two calls per step give the two views, or two modules whose first calls do; None if there
            is no pair of views.
        h: module whose calls on these views give the representation, if the monitor can see it.
        joined: both views pass through the modules as one batch.
        source: repository, file and commit that the module is written after.
        instead: the line that a warning has to name, if the documented one records nothing.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    source: str
    line: dict[str, Any] = field(default_factory=dict)
    z: str | tuple[str, str] | None = "projection_head"
    h: str | None = "backbone"
    joined: bool = False
    instead: dict[str, Any] | None = None


class Spy:
    """Keeps what passes through modules; it replaces their `forward`, so it shares nothing with hooks."""

    def __init__(self, model: nn.Module, *names: str):
        self.steps: list[dict[str, list[Tensor]]] = []
        for name in names:
            self.follow(attrgetter(name)(model), name)

    def follow(self, module: nn.Module, name: str) -> None:
        forward = module.forward

        def noted(*args, **kwargs):
            output = forward(*args, **kwargs)
            if self.steps:
                self.steps[-1][name].append(output.detach().double().clone())
            return output

        module.forward = noted

    def begin(self) -> None:
        self.steps.append(defaultdict(list))

    def views(self, names: str | tuple[str, str], joined: bool) -> list[np.ndarray]:
        """Each view, all steps, (samples, dimensions); only one if a module is called once per step."""
        names = (names,) if isinstance(names, str) else names
        parts = []
        for step in self.steps:
            calls = [call for name in names for call in step[name][: 3 - len(names)]]
            if joined:
                calls = list(calls[0].chunk(2))
            parts.append([_rows(call) for call in calls])
        return [torch.cat(view).numpy() for view in zip(*parts, strict=True)]


def _rows(x: Tensor) -> Tensor:
    """Feature maps are averaged over positions."""
    return x.flatten(2).mean(dim=2) if x.ndim == 4 else x


def spectra(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues of C and of the covariance of both views."""
    return np.linalg.eigvalsh((a.T @ b + b.T @ a) / (2 * len(a)))[::-1], covariance([a, b])


def covariance(views: list[np.ndarray]) -> np.ndarray:
    return np.linalg.eigvalsh(np.cov(np.concatenate(views).T))[::-1]


def differs(measured: Any, true: np.ndarray) -> bool:
    """Whether eigenvalues differ by more than the tolerance, or are missing."""
    if measured is None or len(measured) != len(true):
        return True
    return bool(np.abs(np.asarray(measured) - true).max() > TOLERANCE * np.abs(true).max())


@dataclass
class Run:
    """What came of a training."""

    weights: list[Tensor]
    records: list[Record] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    spy: Spy | None = None
    error: Exception | None = None


def verdict(case: Case, run: Run) -> str:
    """stopped: training ended with an error; wrong: a record differs from z or h, or there is none and no warning;
    told: a warning names a line to use; right: records agree with z and h."""
    if run.error is not None:
        return "stopped"
    if not run.records:
        return "told" if names_a_line(run.said) else "wrong"
    if case.z is None:
        return "wrong"
    record, views = run.records[-1], run.spy.views(case.z, case.joined)
    if len(run.records) > 1 or len(views) < 2:
        return "wrong"
    C, variances = spectra(*views)
    if differs(record.eigenvalues, C) or differs(record.covariance, variances):
        return "wrong"
    if case.h is not None and differs(record.hidden, covariance(run.spy.views(case.h, case.joined))):
        return "wrong"
    return "right"


def names_a_line(said: list[str]) -> bool:
    return any(re.search(r"\b(loss|projector|views)=|update\(", message) for message in said)


def observed(train: Callable[[], Any]) -> tuple[Exception | None, list[str]]:
    """Train; return the error that ended it and the monitor's warnings."""
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train()
        except Exception as problem:
            error = problem
    return error, [str(w.message) for w in caught if issubclass(w.category, RunWarning)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
