"""Which points stand for all of them in Nyström's approximation."""

from collections.abc import Callable

import numpy as np

from stairwise.checks import InputError, as_numpy, one_of
from stairwise.kernel.arrays import Matrix, cast, namespace
from stairwise.kernel.kernels import Kernel

CANDIDATES = 10  # points per landmark among which "kmeans++" and "pivoted" choose


def candidates(how: str, count: int) -> int:
    """Number of random points that `choose` wants to see for `count` landmarks."""
    return count if one_of(how, "landmarks", CHOICES) == "uniform" else CANDIDATES * count


def choose(how: str, kernel: Kernel, pool: Matrix, count: int, rng: np.random.Generator) -> np.ndarray:
    """Row numbers of `count` landmarks in `pool`, or of fewer if the others would add nothing.

    "uniform": at random. "kmeans++": one by one, in proportion to the squared distance in feature space from the
    nearest landmark. "pivoted": one by one, in proportion to what the landmarks so far do not explain of k(x, x), which
    is Cholesky's factorization with random pivots (Chen et al., arXiv 2207.06503).
    """
    chosen = CHOICES[one_of(how, "landmarks", CHOICES)](kernel, pool, min(count, len(pool)), rng)
    return np.sort(chosen)


def _uniform(kernel: Kernel, pool: Matrix, count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.choice(len(pool), count, replace=False)


def _spread(kernel: Kernel, pool: Matrix, count: int, rng: np.random.Generator) -> np.ndarray:
    sizes = _diagonal(kernel, pool)
    chosen = [int(rng.integers(len(pool)))]
    nearest = np.full(len(pool), np.inf)
    while len(chosen) < count:
        distances = sizes + sizes[chosen[-1]] - 2 * _column(kernel, pool, chosen[-1])
        nearest = np.minimum(nearest, np.maximum(distances, 0))
        nearest[chosen] = 0
        if not _add(chosen, nearest, 1e-12 * sizes.max(), rng):
            break
    return np.array(chosen)


def _pivoted(kernel: Kernel, pool: Matrix, count: int, rng: np.random.Generator) -> np.ndarray:
    left = _diagonal(kernel, pool)
    least = 1e-10 * left.max()
    factor = np.zeros((count, len(pool)))  # rows, so that a step reads whole lines of memory
    chosen: list[int] = []
    while len(chosen) < count and _add(chosen, left, least, rng):
        i, pivot = len(chosen) - 1, chosen[-1]
        column = _column(kernel, pool, pivot) - factor[:i, pivot] @ factor[:i]
        factor[i] = column / np.sqrt(max(column[pivot], least))
        left = np.maximum(left - factor[i] ** 2, 0)
        left[chosen] = 0
    return np.array(chosen)


def _add(chosen: list[int], weights: np.ndarray, least: float, rng: np.random.Generator) -> bool:
    """Draw one more row in proportion to its weight; False if none has any."""
    if not weights.max() > least:
        return False
    chosen.append(int(rng.choice(len(weights), p=weights / weights.sum())))
    return True


def _column(kernel: Kernel, pool: Matrix, i: int) -> np.ndarray:
    return as_numpy(cast(kernel(pool, pool[i : i + 1]), "float64"))[:, 0]


def _diagonal(kernel: Kernel, pool: Matrix, rows: int = 256) -> np.ndarray:
    """k(x, x) of every row, from small squares, because a kernel is a function of two sets of points."""
    squares = (kernel(pool[i : i + rows], pool[i : i + rows]) for i in range(0, len(pool), rows))
    values = np.concatenate([as_numpy(cast(namespace(K).diagonal(K), "float64")) for K in squares])
    if not values.max(initial=0.0) > 0:
        raise InputError("kernel", "must not vanish on the data", None, "k(x, x) is zero everywhere")
    return values


CHOICES: dict[str, Callable[[Kernel, Matrix, int, np.random.Generator], np.ndarray]] = {
    "uniform": _uniform,
    "kmeans++": _spread,
    "pivoted": _pivoted,
}
