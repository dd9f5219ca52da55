"""What `KernelSSL` has fitted: all points and the kernel between them, or sums of finite features."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from stairwise.checks import InputError, is_tensor
from stairwise.kernel import sums as feature_sums
from stairwise.kernel.arrays import Matrix, alike, cast, finite, like, namespace, stack
from stairwise.kernel.kernels import Kernel
from stairwise.kernel.kernels import linear as LinearKernel
from stairwise.kernel.maps import AbstractMap, Identity, build_map, restore_map, same_map
from stairwise.kernel.operators import AbstractPairs, Blocks, DensePairs, FeaturePairs
from stairwise.kernel.processes import from_all, from_first, place, solve_together, summed
from stairwise.kernel.routes import CHUNK
from stairwise.kernel.solution import Solution
from stairwise.kernel.solvers import refuse_large, solve
from stairwise.kernel.sums import PairSums, new_batch, require_once
from stairwise.kernel.tiles import TilePairs, build_pairs
from stairwise.progress import Progress, part, silent


class AbstractModel(ABC):
    """Responses g_j·φ(x) of modes, and the modes."""

    dtype: str
    features_b: int | None = None  # number of features of the second modality, if there are two

    @abstractmethod
    def modes(self, k: int, at_most: bool = False, progress: Progress = silent, spare: int = 0) -> Solution:
        """The k leading modes; with `at_most`, fewer if fewer exist. With `spare`, see `solvers.solve`."""

    @abstractmethod
    def rows(self, X: Matrix, view: int) -> Matrix:
        """What coefficients are multiplied with, (len(X), length of `share`)."""

    def share(self, coefficients: Matrix, view: int) -> Matrix:
        """The coefficients that belong to a view."""
        return coefficients

    def responses(self, X: Matrix, view: int, coefficients: Matrix, memory: int) -> Matrix:
        """g_j·φ(x), (len(X), modes), in strips that fit into memory."""
        own = self.share(coefficients, view)
        strip = max(1, memory // (32 * len(own)))
        parts = []
        for start in range(0, len(X), strip):
            some = alike(X[start : start + strip], own, self.dtype)
            with np.errstate(all="ignore"):
                parts.append(cast(self.rows(some, view), "float64") @ own)
            if not finite(parts[-1]):
                raise InputError(
                    "X", "must be small enough for finite embeddings", None, "scale it like the fitted points"
                )
        return parts[0] if len(parts) == 1 else stack(parts)


@dataclass(eq=False)
class Exact(AbstractModel):
    """K̃ of all points."""

    blocks: Blocks
    swaps: bool
    solver: str
    memory: int

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.blocks.dtype

    @property
    def features_b(self) -> int | None:  # type: ignore[override]
        return None if self.blocks.shared else int(self.blocks.parts[1].shape[1])

    def operator(self, progress: Progress = silent) -> AbstractPairs:
        """K̃ as features, dense or tiled, depending on kernel, solver and memory."""
        blocks = self.blocks
        explicit = blocks.shared and isinstance(blocks.kernels[0], LinearKernel) and self.solver in ("auto", "features")
        if explicit and (self.solver == "features" or blocks.parts[0].shape[1] <= blocks.size):
            return FeaturePairs(namespace(blocks.parts[0]).concatenate(list(blocks.parts)), self.swaps)
        if self.solver == "cholesky":
            refuse_large(blocks.size)
            return DensePairs(blocks.matrix(), self.swaps)
        return build_pairs(blocks, self.swaps, self.memory, progress, *place())

    def modes(self, k: int, at_most: bool = False, progress: Progress = silent, spare: int = 0) -> Solution:
        pairs = self.operator(part(progress, 0.0, 0.6))

        def work(operator: AbstractPairs) -> Solution:
            count = min(k, operator.size) if at_most else k
            return solve(operator, count, self.solver, at_most, part(progress, 0.6, 1.0), spare)

        if place()[1] > 1 and isinstance(pairs, TilePairs):
            return solve_together(pairs, work)
        return work(pairs)

    def rows(self, X: Matrix, view: int) -> Matrix:
        return self.blocks.rows(X, view)


@dataclass(eq=False)
class Given(AbstractModel):
    """A precomputed K̃, which is not kept: its modes, and more of them for the dynamics, are found at once."""

    found: Solution
    more: Solution
    dtype: str
    swaps: bool = True

    def modes(self, k: int, at_most: bool = False, progress: Progress = silent, spare: int = 0) -> Solution:
        return self.more if at_most else self.found

    def rows(self, X: Matrix, view: int) -> Matrix:
        return X


@dataclass(eq=False)
class Stream(AbstractModel):
    """Finite features and their sums over the pairs seen so far. Two maps: two modalities.

    `batches`: numbers of the batches in the sums, see `sums.new_batch`.
    """

    method: str
    maps: tuple[AbstractMap, ...]
    features_b: int | None = None
    sums: PairSums | None = None
    batches: set[int] = field(default_factory=set)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.maps[0].dtype

    def add(self, a: Matrix, b: Matrix, batch: int | None = None) -> None:
        """Add the pairs a[i], b[i], as a part of `batch` or as a new one."""
        self._follow(a)
        with np.errstate(all="ignore"):  # `PairSums.of` refuses what is not finite
            rows_a = self.rows(a, 0)
            rows_b = rows_a if b is a else self.rows(b, 1)
        new = PairSums.of(rows_a, rows_b)
        self.sums = new if self.sums is None else self.sums + new
        self.batches.add(batch or new_batch())

    def include(self, other: "Stream", start: "Stream | None" = None) -> None:
        """Add the sums of another stream with the same maps, without those of `start`, which both began with."""
        theirs, begun = self._comparable(other), set()
        if start is not None:
            theirs, begun = theirs - self._comparable(start), start.batches
        require_once([self.batches, other.batches], begun)
        self.sums = theirs if self.sums is None else self.sums + theirs
        self.batches |= other.batches

    def _comparable(self, other: "Stream") -> PairSums:
        """The sums of another stream, if they can be added to these."""
        if len(self.maps) != len(other.maps) or other.sums is None:
            raise InputError("combine", "needs estimators fitted with partial_fit, of as many modalities")
        if not all(map(same_map, self.maps, other.maps)):
            rule = "must have the same kernel and the same landmarks or random features"
            remedy = "load all of them from one file written by save, and give it to combine as start="
            raise InputError("estimators", rule, None, remedy)
        own = other.sums if self.sums is None else self.sums
        return PairSums(alike(other.sums.cross, own.cross, "float64"), other.sums.pairs)

    def modes(self, k: int, at_most: bool = False, progress: Progress = silent, spare: int = 0) -> Solution:
        if self.sums is None:
            raise InputError("KernelSSL", "must have seen at least one pair", 0, "call partial_fit first")
        return feature_sums.modes(self.sums, self.maps, k, at_most, spare)

    def rows(self, X: Matrix, view: int) -> Matrix:
        return self.maps[view if len(self.maps) == 2 else 0].rows(X)

    def _follow(self, x: Matrix) -> None:
        """Move maps and sums to the array type and device of x, as after loading them from a file."""
        held = [array for one in self.maps for array in one.arrays()] + ([self.sums.cross] if self.sums else [])
        if all(
            is_tensor(array) == is_tensor(x) and getattr(array, "device", 0) == getattr(x, "device", 0)
            for array in held
        ):
            return
        moved = [(one, [alike(array, x, one.dtype) for array in one.arrays()]) for one in self.maps]
        self.maps = tuple(restore_map(type(one).__name__, one.kernel, one.dtype, arrays) for one, arrays in moved)
        if self.sums is not None:
            self.sums = PairSums(alike(self.sums.cross, x, "float64"), self.sums.pairs)

    def share(self, coefficients: Matrix, view: int) -> Matrix:
        if len(self.maps) == 1 or self.sums is None:
            return coefficients
        first = self.sums.cross.shape[0]
        return coefficients[first:] if view else coefficients[:first]


def dual_embedding(solution: Solution, swaps: bool) -> Matrix:
    """Embeddings of the fitted points, 2n γ_j^{1/2} P a_j."""
    a = solution.coefficients
    half = len(a) // 2
    swapped = stack([a[half:], a[:half]]) if swaps else a
    return swapped * like(len(a) * np.sqrt(solution.eigenvalues), a)


def start_stream(
    method: str,
    kernels: tuple[Kernel, ...],
    pools: list[Matrix],
    *,
    count: int,
    dtype: str,
    how: str,
    seed: int,
) -> Stream:
    """Maps without sums; the kernel of each map, and the points from which its landmarks are chosen."""
    maps = [
        build_map(method, kernel, pool, count, dtype, how, seed + i)
        for i, (kernel, pool) in enumerate(zip(kernels, pools, strict=True))
    ]
    two = int(pools[1].shape[1]) if len(pools) == 2 else None
    return Stream("exact" if all(isinstance(one, Identity) for one in maps) else method, tuple(maps), two)


def shared_maps(model: Stream) -> Stream:
    """The maps of the first process, so that sums of all processes can be added."""
    maps = []
    for one in model.maps:
        arrays = [from_first(x) for x in _same_sizes(one)]
        kernel = one.kernel
        gamma = getattr(kernel, "gamma", None)
        if gamma is not None and arrays:
            kernel = replace(kernel, gamma=float(from_first(like(np.array([gamma]), arrays[0]))[0]))  # type: ignore[type-var]
        maps.append(restore_map(type(one).__name__, kernel, one.dtype, arrays))
    return Stream(model.method, tuple(maps), model.features_b)


def _same_sizes(one: AbstractMap) -> list[Matrix]:
    """The arrays of a map, with as many rows as in the first process."""
    out = []
    for x in one.arrays():
        rows = int(from_first(like(np.array([float(len(x))]), x))[0])
        out.append(x if len(x) == rows else alike(np.zeros((rows, *x.shape[1:])), x, one.dtype))
    return out


def stream_over(
    model: Stream, a: Matrix, b: Matrix, placed: Callable[[Matrix, str], Matrix], progress: Progress = silent
) -> None:
    """Add this process's share of the pairs a[i], b[i] in chunks, then the sums of the other processes."""
    rank, world = place()
    if len(a) < world:
        raise InputError("X", f"must have at least {world} rows, one per process", len(a))
    start, end = (len(a) * (rank + i) // world for i in range(2))
    batch = new_batch()
    for at in range(start, end, CHUNK):
        rows = slice(at, min(at + CHUNK, end))
        some = placed(a[rows], "X")
        model.add(some, some if b is a else placed(b[rows], "X_b"), batch)
        progress(rows.stop - start, end - start, f"{rows.stop - start:,} of {end - start:,} pairs")
    total_over_processes(model)


def total_over_processes(model: Stream, start: Stream | None = None) -> None:
    """Replace the sums by those of all processes; those of `start`, which all began with, count once."""
    held = from_all(model.batches, *(x for one in model.maps for x in one.arrays()))
    if model.sums is None or not all(held):
        without = [i for i, batches in enumerate(held) if not batches]
        raise InputError("combine", "needs pairs in every process", f"none in {without}", "call partial_fit first")
    own, begun = model.sums, set()
    if start is not None:
        common, begun = model._comparable(start), start.batches
        own = own - common if place()[0] else own
    require_once(held, begun)
    cross = summed(own.cross)
    pairs = summed(like(np.array([float(own.pairs)]), cross))
    model.sums, model.batches = PairSums(cross, int(float(pairs[0]))), set().union(*held)
