"""Sums over pairs of finite features. Each pair is seen once, and sums of different processes can be added."""

import secrets
from dataclasses import dataclass

import numpy as np

from stairwise.checks import InputError, as_numpy, positive_int
from stairwise.kernel.arrays import Matrix, cast, finite, like, namespace, on_gpu, stack
from stairwise.kernel.maps import AbstractMap
from stairwise.kernel.solution import UNCERTAIN, Solution, fix_signs
from stairwise.theory.correlation import Correlation


@dataclass(frozen=True, eq=False)
class PairSums:
    """Σ r(x_i) r(x'_i)ᵀ over pairs, (width_a, width_b) in float64, and their number."""

    cross: Matrix
    pairs: int = 0

    @classmethod
    def of(cls, rows_a: Matrix, rows_b: Matrix) -> "PairSums":
        with np.errstate(all="ignore"):
            cross = cast(rows_a, "float64").T @ cast(rows_b, "float64")
        if not finite(cross):
            raise InputError("X and X_b", "must be small enough for finite sums over pairs", None, "scale them")
        return cls(cross, len(rows_a))

    def __add__(self, other: "PairSums") -> "PairSums":
        return PairSums(self.cross + other.cross, self.pairs + other.pairs)

    def __sub__(self, other: "PairSums") -> "PairSums":
        return PairSums(self.cross - other.cross, self.pairs - other.pairs)


def new_batch() -> int:
    """A random number for a batch of pairs. Sums keep those of their batches, so that none counts twice."""
    return 1 + secrets.randbits(62)


def require_once(held: list[set[int]], start: set[int]) -> None:
    """Raise an error if batches would count twice; all of `held` must contain `start`, which is counted once."""
    if not all(start <= batches for batches in held):
        rule = "must hold only pairs that all estimators hold"
        raise InputError("start", rule, None, "load it from the file that all of them were loaded from")
    rest = [batches - start for batches in held]
    if sum(map(len, rest)) > len(set().union(*rest)):
        remedy = "if all began with one file, give it too: combine(…, start=KernelSSL.load(file))"
        raise InputError("estimators", "must not hold the same pairs, which would count twice", None, remedy)


@dataclass(frozen=True, eq=False)
class DeviceCorrelation:
    """Γ on a GPU, where a full decomposition takes less time than sending it to the CPU."""

    matrix: Matrix

    @property
    def features(self) -> int:
        return len(self.matrix)

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k largest eigenvalues, descending, and eigenvectors in columns."""
        values, vectors = namespace(self.matrix).linalg.eigh(self.matrix)
        return as_numpy(values.flip(0)[:k]), as_numpy(fix_signs(vectors.flip(1)[:, :k]))

    def product(self, x: np.ndarray) -> np.ndarray:
        return as_numpy(self.matrix @ like(x, self.matrix))


def correlation(
    sums: PairSums, maps: tuple[AbstractMap, ...]
) -> tuple[Correlation | DeviceCorrelation, list[Matrix | None]]:
    """Γ of the features, and W of each map.

    With one map, Γ = Σ φ(x)φ(x')ᵀ + φ(x')φ(x)ᵀ over 2n. Two modalities have features (φ_a, 0) and (0, φ_b).
    """
    if not sums.pairs:
        raise InputError("KernelSSL", "must have seen at least one pair", 0, "call partial_fit first")
    whitenings = [one.whitening for one in maps]
    cross = sums.cross
    if whitenings[0] is not None:
        cross = whitenings[0].T @ cross
    if whitenings[-1] is not None:
        cross = cross @ whitenings[-1]
    cross = cross / (2 * sums.pairs)
    if len(maps) == 1:
        gamma = cross + cross.T
    else:
        xp, (first, second) = namespace(cross), cross.shape
        zero_a, zero_b = like(np.zeros((first, first)), cross), like(np.zeros((second, second)), cross)
        gamma = stack([xp.concatenate([zero_a, cross], 1), xp.concatenate([cross.T, zero_b], 1)])
    if on_gpu(gamma):
        return DeviceCorrelation(gamma), whitenings
    return Correlation.from_matrix(as_numpy(gamma), sums.pairs), whitenings


def modes(sums: PairSums, maps: tuple[AbstractMap, ...], k: int, at_most: bool = False, spare: int = 0) -> Solution:
    """The k leading modes of Γ as coefficients of raw rows, (Σ widths, k); with `at_most`, fewer if fewer exist.

    `spare`: up to so many further modes are in `Solution.more`.
    """
    corr, whitenings = correlation(sums, maps)
    remedy = f"there are {corr.features} features"
    k = min(k, corr.features) if at_most else positive_int(k, "n_components", corr.features, remedy)
    gamma, g = corr.top(min(k + spare, corr.features))
    eps = float(np.finfo(maps[0].dtype).eps)
    floor = UNCERTAIN * eps * float(np.abs(gamma).max(initial=0.0))
    usable = int((gamma > max(floor, 0.0)).sum())
    if usable == 0 and floor == 0:
        raise InputError("kernel", "must not vanish on the data", None, "Γ is zero")
    if usable == 0:
        raise InputError("views", "must have something in common: no mode of Γ is positive", f"γ_1 = {gamma[0]:.3g}")
    if usable < k and not at_most:
        noise = f"γ_{usable + 1} / γ_1 is not above the rounding error {UNCERTAIN * eps:.0e}"
        raise InputError("n_components", f"must be at most {usable}: {noise}", k, f"lower n_components to {usable}")
    gamma, g = gamma[:usable].copy(), g[:, :usable]
    size = np.sqrt((g * g).sum(0))
    residuals = np.sqrt(((corr.product(g) - g * gamma) ** 2).sum(0)) / (gamma * size)
    first = sums.cross.shape[0] if whitenings[0] is None else whitenings[0].shape[1]  # features of the first map
    parts = np.split(g, [first]) if len(maps) == 2 else [g]
    raw = [
        like(part, sums.cross) if W is None else W @ like(part, W) for W, part in zip(whitenings, parts, strict=True)
    ]
    coefficients, lost = stack(raw), _lost(sums, maps, raw) / (gamma * size) ** 2
    rounded = eps * float(gamma[0]) + _rounding(sums, whitenings)

    def leading(count: int, more: Solution | None = None) -> Solution:
        residual, precision = float(residuals[:count].max()), rounded / float(gamma[count - 1]) + lost[:count].max()
        return Solution(gamma[:count], coefficients[:, :count], residual, usable, "features", float(precision), more)

    return leading(k, leading(usable) if spare else None)


def _rounding(sums: PairSums, whitenings: list[Matrix | None]) -> float:
    """Size of a mode of Γ that is nothing but rounding of the sums, divided by the smallest directions of landmarks."""
    longest = [1.0 if W is None else float((W * W).sum(0).max()) ** 0.5 for W in whitenings]
    return float(np.finfo(float).eps) * float(abs(sums.cross).max()) / sums.pairs * longest[0] * longest[-1]


def _lost(sums: PairSums, maps: tuple[AbstractMap, ...], raw: list[Matrix]) -> np.ndarray:
    """Squared length of Γ g_j in directions of landmarks that W leaves out; over γ_j² it is the relative error of γ_j.

    `raw`: coefficients of raw rows, one matrix per map.
    """
    if len(maps) == 1:
        images = [sums.cross @ raw[0] + sums.cross.T @ raw[0]]
    else:
        images = [sums.cross @ raw[1], sums.cross.T @ raw[0]]
    total = np.zeros(raw[0].shape[1])
    for one, image in zip(maps, images, strict=True):
        if one.lost is not None:
            total += as_numpy(((one.lost.T @ image / (2 * sums.pairs)) ** 2).sum(0))
    return total
