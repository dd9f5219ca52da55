"""Probes: classification accuracy from frozen representations, computed on their device."""

import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stairwise.checks import InputError, RunWarning, number, positive_int

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of logistic regression, if it is to be chosen
LOOK = 10  # rounds between two looks at the decrease of the loss per round; fitting ends below these:
DECREASE = {torch.float32: 1e-9, torch.float64: 1e-13}
UNFINISHED = 100  # times these: a fit that ends above has not converged


def knn_probe(h: Tensor, y: Tensor, h_test: Tensor, y_test: Tensor, k: int = 200, temperature: float = 0.1) -> float:
    r"""Accuracy of weighted k nearest neighbours by cosine, with weights e^{cos/τ} (Wu et al. 2018).

    Arguments:
        h, y: representations (N, features) and classes (N,), numbered from 0, that vote.
        h_test, y_test: representations to classify and their classes.

    Example:
        >>> h = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_probe(h, torch.tensor([0, 0, 1]), torch.tensor([[0.1, 1.0]]), torch.tensor([1]), k=1)
        1.0
    """
    _check(h, y, h_test, y_test)
    k = min(positive_int(k, "k"), len(h))
    number(temperature, "temperature", above=0)
    known = torch.nn.functional.normalize(h.float(), dim=1)
    classes = int(y.max()) + 1
    right = torch.zeros((), device=h.device)
    for queries, answers in zip(h_test.split(2048), y_test.split(2048), strict=True):
        near, which = (torch.nn.functional.normalize(queries.float(), dim=1) @ known.T).topk(k, dim=1)
        votes = torch.zeros((len(queries), classes), device=h.device)
        votes.scatter_add_(1, y[which], ((near - near[:, :1]) / temperature).exp())
        right += (votes.argmax(dim=1) == answers).sum()
    return float(right) / len(y_test)


def ridge_probe(h: Tensor, y: Tensor, h_test: Tensor, y_test: Tensor, penalty: float = 1e-3) -> float:
    """Accuracy of ridge regression on one-hot labels, with standardized features and the penalty per sample.

    Example:
        >>> h = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> ridge_probe(h, torch.tensor([0, 0, 1, 1]), torch.tensor([[-3.0], [0.5]]), torch.tensor([0, 1]))
        1.0
    """
    _check(h, y, h_test, y_test)
    number(penalty, "penalty", above=0)
    x, x_test = _standardized(h.double(), h_test.double())
    targets = torch.nn.functional.one_hot(y.long()).double()
    base = targets.mean(dim=0)
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(x.T @ x / len(x) + penalty * eye, x.T @ (targets - base) / len(x))
    return _accuracy(x_test @ weights + base, y_test)


def logistic_probe(
    h: Tensor, y: Tensor, h_test: Tensor, y_test: Tensor, strength: float | None = 1.0, rounds: int = 1000
) -> float:
    r"""Accuracy of multinomial logistic regression on standardized features.

    Minimizes mean cross-entropy + ‖W‖² / (2 · strength · N), like scikit-learn's LogisticRegression(C=strength).

    Arguments:
        strength: of the fit; None: the power of ten from 1e-4 to 1 that classifies a random tenth of the rows best, if
            only the other rows are fitted. The test rows are not used for that.
        rounds: limit of iterations; a fit that has not converged by then warns (`RunWarning`).

    Example:
        >>> h = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> logistic_probe(h, torch.tensor([0, 0, 1, 1]), torch.tensor([[-3.0], [0.5]]), torch.tensor([0, 1]))
        1.0
    """
    _check(h, y, h_test, y_test)
    positive_int(rounds, "rounds")
    x, x_test = _standardized(h.float(), h_test.float())
    if strength is None:
        strength = _best_strength(x, y.long(), rounds)
    weights = fit_logistic(x, y.long(), number(strength, "strength", above=0), rounds)
    return _accuracy(_scores(x_test, weights), y_test)


def fit_logistic(
    x: Tensor,
    y: Tensor,
    strength: float,
    rounds: int = 1000,
    start: Tensor | None = None,
    products: Tensor | None = None,
) -> Tensor:
    r"""Weights (features + 1, classes) in float64; the last row is the biases.

    The Hessian is at most G = ½ AᵀA/N + penalty, A = (x, 1), whatever the weights (Böhning 1992). So steps −G⁻¹∇ need
    no line search; they are accelerated by Nesterov's momentum, which restarts when it points uphill. Only the stopping
    rule waits for the device: the decrease that one step can bring, at every LOOK rounds.

    Arguments:
        start: weights to begin with; None: zeros.
        products: AᵀA, if it is known.
    """
    n, classes = len(x), int(y.max()) + 1
    A = torch.cat([x, x.new_ones(n, 1)], dim=1)
    penalty = torch.full((A.shape[1], 1), 1 / (strength * n), dtype=torch.float64, device=x.device)
    penalty[-1] = 0
    targets = torch.nn.functional.one_hot(y, classes).to(x.dtype)
    bound = (_products(A) if products is None else products) / (2 * n) + penalty.flatten().diag()
    bound.diagonal().add_(1e-10 * bound.trace())  # far above rounding, so that there is an inverse
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(bound))
    W = torch.zeros(A.shape[1], classes, dtype=torch.float64, device=x.device) if start is None else start
    V, t = W, torch.ones((), dtype=torch.float64, device=x.device)
    decrease = math.inf
    for i in range(rounds):
        residual = (A @ V.to(x.dtype)).softmax(dim=1) - targets
        gradient = (residual.T @ A).T.double() / n + penalty * V  # ten times faster on CPUs than A.T @ residual
        step = inverse @ gradient
        moved = V - step
        if i % LOOK == LOOK - 1 or i == rounds - 1:
            decrease = float((gradient * step).sum())
            if decrease < DECREASE[x.dtype]:
                return moved
        uphill = (gradient * (moved - W)).sum() > 0
        t = torch.where(uphill, 1.0, t)
        following = (1 + (1 + 4 * t**2).sqrt()) / 2
        V = moved + (t - 1) / following * (moved - W)
        W, t = moved, following
    if decrease > UNFINISHED * DECREASE[x.dtype]:
        said = f"the logistic probe has not converged in {rounds} rounds, so its accuracy may be too low; raise rounds"
        warnings.warn(said, RunWarning, stacklevel=3)
    return W


def _products(A: Tensor) -> Tensor:
    """AᵀA in float64, because the penalty is smaller than rounding in float32."""
    total = torch.zeros(A.shape[1], A.shape[1], dtype=torch.float64, device=A.device)
    for rows in A.split(8192):
        part = rows.double()
        total.addmm_(part.T, part)
    return total


def _best_strength(x: Tensor, y: Tensor, rounds: int) -> float:
    """The strength that is best on a tenth of the rows, random as labels may be periodic; of equals the weakest."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    held = order % 10 == 0
    if held.all() or len(y[~held].unique()) < len(y.unique()):
        return 1.0
    rows, classes = x[~held], y[~held]
    products = _products(torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1))
    weights, scores = None, []
    for strength in STRENGTHS:
        weights = fit_logistic(rows, classes, strength, rounds, weights, products)
        scores.append(_accuracy(_scores(x[held], weights), y[held]))
    return STRENGTHS[scores.index(max(scores))]


def _scores(x: Tensor, weights: Tensor) -> Tensor:
    w = weights.to(x.dtype)
    return x @ w[:-1] + w[-1]


PROBES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], float]] = {
    "knn": knn_probe,
    "ridge": ridge_probe,
    "logistic": logistic_probe,
    "logistic_tuned": partial(logistic_probe, strength=None),
}


def _standardized(x: Tensor, x_test: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    return (x - mean) / std, (x_test - mean) / std


def _accuracy(scores: Tensor, y: Tensor) -> float:
    return float((scores.argmax(dim=1) == y).double().mean())


def _check(h: Tensor, y: Tensor, h_test: Tensor, y_test: Tensor) -> None:
    for name, features, labels in (("h", h, y), ("h_test", h_test, y_test)):
        if features.ndim != 2 or len(features) == 0 or labels.shape != (len(features),):
            shapes = f"{tuple(features.shape)} and {tuple(labels.shape)}"
            raise InputError(name, "must be 2-D with one label per row", shapes)
        if not torch.isfinite(features).all():
            raise InputError(name, "must be finite", None, "the network has diverged")
    if h.shape[1] != h_test.shape[1]:
        raise InputError("h_test", f"must have {h.shape[1]} features", h_test.shape[1])
    if y.min() < 0 or len(y.unique()) < 2:
        raise InputError("y", "must hold at least two classes, numbered from 0", y.unique().tolist())
