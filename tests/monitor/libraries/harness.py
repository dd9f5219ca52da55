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
        parts: calls per view, if a batch is divided.
        source: repository, file and commit that the module is written after.
        views: what the two views are, if they are not of one network.
        instead: the line that a warning has to name, if the documented one records nothing; {} names `update`.
        by_hand: the module calls `update`.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    source: str
    line: dict[str, Any] = field(default_factory=dict)
    z: str | tuple[str, str] | None = "projection_head"
    h: str | None = "backbone"
    joined: bool = False
    parts: int = 1
    views: str = ""
    instead: dict[str, Any] | None = None
    by_hand: bool = False


class Spy:
    """Keeps what passes through modules; it replaces their `forward`, so it shares nothing with hooks."""

    def __init__(self, model: nn.Module, *names: str):
        self.steps: list[dict[str, list[tuple[Tensor, bool]]]] = []  # by module: outputs, and if gradients were on
        for name in names:
            self.follow(attrgetter(name)(model), name)

    def follow(self, module: nn.Module, name: str) -> None:
        forward = module.forward

        def noted(*args, **kwargs):
            output = forward(*args, **kwargs)
            if self.steps:
                self.steps[-1][name].append((_rows(output.detach().double()), torch.is_grad_enabled()))
            return output

        module.forward = noted

    def begin(self) -> None:
        self.steps.append(defaultdict(list))

    def pair(self, case: "Case") -> list[np.ndarray]:
        """Both views of z, all steps, (samples, dimensions) each."""
        steps = []
        for step in self.steps:
            if isinstance(case.z, tuple):
                steps.append([step[name][0][0] for name in case.z])
            else:
                calls = [output for output, _ in step[case.z]][: 1 if case.joined else 2 * case.parts]
                steps.append(torch.cat(calls).chunk(2))
        return [torch.cat(view).numpy() for view in zip(*steps, strict=True)]

    def hidden(self, case: "Case") -> np.ndarray:
        """Representations of these views, all steps, as far as they are trained."""
        trained = [[output for output, grad in step[case.h] if grad] for step in self.steps]
        return torch.cat([output for calls in trained for output in calls[: 2 * case.parts]]).numpy()


def _rows(x: Tensor) -> Tensor:
    """A copy; feature maps are averaged over positions."""
    return x.flatten(2).mean(dim=2) if x.ndim == 4 else x.clone()


def spectra(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues of C and of the covariance of both views."""
    return np.linalg.eigvalsh((a.T @ b + b.T @ a) / (2 * len(a)))[::-1], covariance(np.concatenate([a, b]))


def covariance(z: np.ndarray) -> np.ndarray:
    return np.linalg.eigvalsh(np.cov(z.T))[::-1]


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
    if len(run.records) > 1:
        return "wrong"
    record = run.records[0]
    C, variances = spectra(*run.spy.pair(case))
    if differs(record.eigenvalues, C) or differs(record.covariance, variances):
        return "wrong"
    if case.h is not None and differs(record.hidden, covariance(run.spy.hidden(case))):
        return "wrong"
    return "right"


def names_a_line(said: list[str]) -> bool:
    return any(re.search(r"\b(loss|projector|views)=|update\(|must name a submodule", message) for message in said)


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
