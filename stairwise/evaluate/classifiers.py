"""Probes: classification accuracy from frozen representations, computed on their device."""

from collections.abc import Callable

import torch
from torch import Tensor

from stairwise.checks import InputError, number, positive_int


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
    h: Tensor, y: Tensor, h_test: Tensor, y_test: Tensor, strength: float = 1.0, rounds: int = 200
) -> float:
    r"""Accuracy of multinomial logistic regression, by full-batch L-BFGS on standardized features.

    Minimizes mean cross-entropy + ‖W‖² / (2 · strength · N), like scikit-learn's LogisticRegression(C=strength).

    Example:
        >>> h = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> logistic_probe(h, torch.tensor([0, 0, 1, 1]), torch.tensor([[-3.0], [0.5]]), torch.tensor([0, 1]))
        1.0
    """
    _check(h, y, h_test, y_test)
    number(strength, "strength", above=0)
    x, x_test = _standardized(h.float(), h_test.float())
    weights = fit_logistic(x, y.long(), strength, rounds)
    return _accuracy(x_test @ weights[:-1] + weights[-1], y_test)


def fit_logistic(x: Tensor, y: Tensor, strength: float, rounds: int) -> Tensor:
    """Weights (features + 1, classes); the last row is the biases."""
    classes = int(y.max()) + 1
    weights = torch.zeros((x.shape[1] + 1, classes), dtype=x.dtype, device=x.device, requires_grad=True)
    descent = torch.optim.LBFGS([weights], max_iter=rounds, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        descent.zero_grad()
        fit = torch.nn.functional.cross_entropy(x @ weights[:-1] + weights[-1], y)
        loss = fit + weights[:-1].square().sum() / (2 * strength * len(x))
        loss.backward()
        return loss

    with torch.enable_grad():
        descent.step(closure)
    return weights.detach()


PROBES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], float]] = {
    "knn": knn_probe,
    "ridge": ridge_probe,
    "logistic": logistic_probe,
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
