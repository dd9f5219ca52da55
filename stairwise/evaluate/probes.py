"""Probe accuracy for each embedding dimension d and each training time t, from one fit."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, as_numpy, instance, number, scale, times
from stairwise.checks import labels as check_labels
from stairwise.checks import seed as check_seed
from stairwise.kernel.estimator import KernelSSL
from stairwise.theory.modes import Modes

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ProbeCurve:
    """Accuracy of a linear probe.

    Attributes:
        dims: embedding dimensions 1 … n_components, (D,).
        times: training times, (T,).
        accuracy: on test points, (T, D).
        chance: frequency of the most frequent class among the test points.
    """

    dims: NDArray[np.int64]
    times: Floats
    accuracy: Floats
    chance: float


def probe_curve(
    est: KernelSSL,
    X: ArrayLike,
    y: ArrayLike,
    *,
    X_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    t: ArrayLike = np.inf,
    alpha: float = 1e-4,
    ridge: float = 1e-3,
    test_share: float = 0.3,
    seed: int = 0,
    view: str = "a",
) -> ProbeCurve:
    """Accuracy of a ridge probe for each d ≤ n_components and each time, from one fitted estimator.

    The top-d solutions are nested. From an aligned start of typical size (s_j(0) = α √(d − j + 1), Eq. 21), mode j at
    time t is f_j(x) √λ_j(t), so one evaluation of the kernel gives all of them.

    Arguments:
        est: the fitted estimator.
        X, y: labelled points. A fraction of them is held out unless X_test and y_test are given.
        t: times; infinity is the end of training.
        alpha: scale of the initialization; affects finite times only.
        ridge: penalty, relative to the variance of a learned mode.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> y = rng.integers(0, 2, 300)
        >>> X = np.outer(2 * y - 1, [3.0, 0.0, 0.0]) + rng.standard_normal((300, 3))
        >>> est = KernelSSL(2, kernel="linear").fit(X, X_b=X + 0.1 * rng.standard_normal(X.shape))
        >>> probe_curve(est, X, y, t=[0.0, np.inf]).accuracy[1].min() > 0.95
        np.True_
    """
    instance(est, "est", KernelSSL, "fit one: KernelSSL(d).fit(X_a, X_b=X_b)")
    moments = np.atleast_1d(times(t, "t")).ravel()
    if not moments.size:
        raise InputError("t", "must hold at least one time", "none")
    labels, ridge = check_labels(y, "y"), number(ridge, "ridge", above=0, least=1e-100, most=1e100)
    z = np.asarray(as_numpy(est.transform(X, view=view)))
    if labels.shape != (len(z),):
        raise InputError("y", f"must have {len(z)} labels, one per row of X", labels.shape)
    if (X_test is None) != (y_test is None):
        raise InputError("X_test and y_test", "must be given together")
    if X_test is None:
        train, test = _split(len(z), number(test_share, "test_share", above=0, most=1), check_seed(seed))
        z_test, labels_test, z, labels = z[test], labels[test], z[train], labels[train]
    else:
        z_test, labels_test = np.asarray(as_numpy(est.transform(X_test, view=view))), check_labels(y_test, "y_test")
    if labels_test.shape != (len(z_test),):
        raise InputError("y_test", f"must have {len(z_test)} labels, one per row of X_test", labels_test.shape)
    d = len(est.eigenvalues_)
    # row i: initial singular values of a run with i + 1 dimensions
    starts = scale(alpha) * np.sqrt(np.maximum(np.arange(1, d + 1)[:, None] - np.arange(d), 1))
    grown = np.sqrt([[Modes(est.eigenvalues_, s).eigenvalues(time) for s in starts] for time in moments])  # (T, d, d)
    accuracy = np.stack([ridge_accuracy(z, labels, z_test, labels_test, ridge, scales) for scales in grown])
    _, counts = np.unique(labels_test, return_counts=True)
    return ProbeCurve(np.arange(1, d + 1), moments, accuracy, float(counts.max() / counts.sum()))


def ridge_accuracy(
    z: Floats,
    labels: NDArray,
    z_test: Floats,
    labels_test: NDArray,
    ridge: float = 1e-3,
    scales: Floats | None = None,
) -> NDArray[np.float64]:
    """Accuracy of ridge regression on one-hot labels using the first 1, 2, … columns of z; (d,).

    Row i of `scales` (d, d), if given, multiplies the columns when i + 1 of them are used.
    """
    number(ridge, "ridge", above=0)
    classes, index = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise InputError("y", "must hold at least two classes", classes)
    if classes.dtype.kind == "f" and (classes != np.round(classes)).any():
        raise InputError("y", "must hold classes", "numbers that are not whole", "bin them into classes")
    targets = np.eye(len(classes))[index]
    mean, base = z.mean(axis=0), targets.mean(axis=0)
    gram = (z - mean).T @ (z - mean) / len(z)
    cross = (z - mean).T @ (targets - base) / len(z)
    scores = np.empty(z.shape[1])
    for d in range(1, z.shape[1] + 1):
        s = np.ones(d) if scales is None else scales[d - 1, :d]
        weights = s[:, None] * np.linalg.solve(
            np.outer(s, s) * gram[:d, :d] + ridge * np.eye(d), s[:, None] * cross[:d]
        )
        guess = classes[((z_test[:, :d] - mean[:d]) @ weights + base).argmax(axis=1)]
        scores[d - 1] = (guess == labels_test).mean()
    return scores


def _split(n: int, share: float, seed: int) -> tuple[NDArray, NDArray]:
    held = round(share * n)
    if not 0 < held < n:
        raise InputError("test_share", f"must leave training and test points out of {n}", share)
    order = np.random.default_rng(seed).permutation(n)
    return order[held:], order[:held]
