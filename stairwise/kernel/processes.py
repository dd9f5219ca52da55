"""Several processes on one problem: the first one solves, the others multiply their tiles of K̃ or add up their pairs.

Only one process decides anything, so rounding that differs between machines cannot make processes disagree. If one of
them ends, the others get `distributed.LostProcess` at once (gloo sees the closed connection) or after the timeout of
the process group. torch is loaded only if it is already in use.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stairwise.checks import InputError, as_numpy, is_tensor
from stairwise.kernel.arrays import Matrix, like
from stairwise.kernel.operators import AbstractPairs
from stairwise.kernel.solution import Solution
from stairwise.kernel.solvers import SOLVERS
from stairwise.kernel.tiles import TilePairs

DONE, MULTIPLY, FAILED, ROUGH = range(4)


def place() -> tuple[int, int]:
    """Number of this process and number of processes; (0, 1) without a process group."""
    if "torch.distributed" not in sys.modules:
        return 0, 1
    from stairwise.distributed import rank, world

    return rank(), world()


def summed(x: Matrix) -> Matrix:
    """The sum of x over all processes."""
    if place()[1] == 1:
        return x
    from stairwise.distributed import peers, total

    with peers():
        return _back(total(_tensor(x)), x)


def from_first(x: Matrix) -> Matrix:
    """The x of the first process, in every process; shapes and types must agree."""
    if place()[1] == 1:
        return x
    import torch.distributed as dist

    from stairwise.distributed import peers

    sent = _tensor(x).clone()
    with peers():
        dist.broadcast(sent, 0)
    return _back(sent, x)


def from_all(numbers: set[int], *near: Matrix) -> list[set[int]]:
    """The numbers (63 bits) of every process; they travel on the device of the arrays `near`, if there are any."""
    rank, world = place()
    if world == 1:
        return [numbers]
    x = near[0] if near else np.zeros(0)
    counts = np.zeros(world, dtype=np.int64)
    counts[rank] = len(numbers)
    counts = as_numpy(summed(like(counts, x)))
    table = np.zeros((world, max(1, *counts)), dtype=np.int64)
    table[rank, : len(numbers)] = list(numbers)
    table = as_numpy(summed(like(table, x)))
    return [set(row[:count].tolist()) for row, count in zip(table, counts, strict=True)]


def require_same(values: np.ndarray, name: str, rule: str, like_this: Matrix) -> None:
    """Raise an error in every process if float64 `values` differ between them."""
    if place()[1] == 1:
        return
    mine = like(np.asarray(values, dtype=np.float64), like_this)
    off = summed(abs(mine - from_first(mine)))
    if float(off.sum()) > 0:
        raise InputError(name, rule, None, "give all rows to fit, or own rows to partial_fit, in every process")


@dataclass(frozen=True, eq=False)
class SharedPairs(AbstractPairs):
    """K̃ for the process that solves: each product is a sum over the tiles of all processes."""

    own: TilePairs
    reads_much: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("size", "swaps", "eps", "seed_like", "free_columns", "has_rough"):
            object.__setattr__(self, name, getattr(self.own, name))

    def matmul(self, block: Matrix) -> Matrix:
        _announce(MULTIPLY, block.shape[1], self.seed_like)
        return summed(self.own.matmul(from_first(block)))

    def rough(self, block: Matrix) -> Matrix:
        _announce(ROUGH, block.shape[1], self.seed_like)
        return summed(self.own.rough(from_first(block)))


def solve_together(own: TilePairs, work: Callable[[AbstractPairs], Solution]) -> Solution:
    """The solution that `work` finds in the first process, in every process."""
    if place()[0] > 0:
        return _serve(own)
    try:
        solution = work(SharedPairs(own))
    except InputError as error:
        text = np.frombuffer(str(error).encode(), dtype=np.uint8).astype(np.float64)
        _announce(FAILED, len(text), own.seed_like)
        from_first(like(text, own.seed_like))
        raise
    for one in (solution, solution.more):
        _announce(DONE, 0 if one is None else len(one.eigenvalues), own.seed_like)
        if one is not None:
            _shared(one, own)
    return solution


def _serve(own: TilePairs) -> Solution:
    """Multiply until the first process has a solution."""
    while True:
        task, columns = _announce(0, 0, own.seed_like)
        if task in (MULTIPLY, ROUGH):
            multiply = own.matmul if task == MULTIPLY else own.rough
            summed(multiply(from_first(like(np.zeros((own.size, columns)), own.seed_like))))
        elif task == FAILED:
            text = as_numpy(from_first(like(np.zeros(columns), own.seed_like))).astype(np.uint8).tobytes().decode()
            raise InputError("the first process", f"stopped: {text}")
        else:
            solution = _received(columns, own)
            _, columns = _announce(0, 0, own.seed_like)
            return replace(solution, more=_received(columns, own) if columns else None)


def _received(columns: int, own: TilePairs) -> Solution:
    empty = like(np.zeros((own.size, columns)), own.seed_like)
    return _shared(Solution(np.zeros(columns), empty, 0.0, 0, "krylov", 0.0), own)


def _shared(solution: Solution, own: TilePairs) -> Solution:
    """The first process's solution."""
    names = list(SOLVERS)
    facts = [solution.residual, solution.products, names.index(solution.solver), solution.precision]
    numbers = as_numpy(from_first(like(np.array([*solution.eigenvalues, *facts], dtype=np.float64), own.seed_like)))
    coefficients = from_first(solution.coefficients)
    residual, products, solver, precision = numbers[-4:].tolist()
    return Solution(numbers[:-4], coefficients, residual, int(products), names[int(solver)], precision)


def _announce(task: int, columns: int, x: Matrix) -> tuple[int, int]:
    """What the first process wants next, and a number of columns."""
    told = as_numpy(from_first(like(np.array([task, columns], dtype=np.float64), x)))
    return int(told[0]), int(told[1])


def _tensor(x: Matrix) -> Any:
    import torch

    return x.contiguous() if is_tensor(x) else torch.from_numpy(np.ascontiguousarray(x))


def _back(tensor: Any, x: Matrix) -> Matrix:
    return tensor if is_tensor(x) else tensor.numpy()
