"""Which way to the modes: exactly from K̃, or in one pass from landmarks or random features; and its memory."""

from dataclasses import dataclass

import numpy as np

from stairwise.kernel.tiles import triangle_bytes

METHODS = ("auto", "exact", "nystroem", "features")
MOST_MEMORY = 1 << 50  # bytes
MOST_FEATURES = 10**6  # landmarks or random features; their sums would take 8 TB
SPARE = 20  # number of modes beyond n_components, which compete with the last ones during training
CHUNK = 4096  # pairs that are turned into features at a time


@dataclass(frozen=True)
class Route:
    """A method, why it was chosen, and how much memory it takes in each process besides the data.

    >>> print(Route("exact", "K̃ of 2,000 points fits into memory", 32_000_000))
    exact: K̃ of 2,000 points fits into memory; takes about 31 MiB
    """

    method: str
    reason: str
    bytes: int | None = None  # None: not known

    def __str__(self) -> str:
        memory = "" if self.bytes is None else f"; takes about {shown(self.bytes)}"
        return f"{self.method}: {self.reason}{memory}"


@dataclass(frozen=True)
class Size:
    """What the choice depends on: points N (both views), features m, modes k, features or landmarks M, processes.

    `features` and `width` are of one modality; for two linear kernels `features` is their sum.
    """

    points: int
    features: int
    modes: int
    width: int
    dtype: str
    memory: int
    processes: int = 1
    modalities: int = 1

    @property
    def tiles(self) -> int:
        """Bytes of the tiles of one process; there are none between two modalities."""
        return self.modalities * triangle_bytes(self.points // self.modalities, self.dtype) // self.processes

    @property
    def columns(self) -> int:
        """Number of landmarks or random features of all modalities."""
        return self.modalities * min(self.width, max(1, self.points // self.modalities))


def choose_route(
    method: str, size: Size, solver: str = "auto", linear: bool = False, precomputed: bool = False
) -> Route:
    """`method`, or for "auto" exact while the tiles of K̃ fit into memory, and Nyström beyond."""
    item = np.dtype(size.dtype).itemsize
    basis = 2 * 8 * size.points * max(8 * size.modes, 6 * (size.modes + SPARE))  # of the Krylov space, with its image
    points = f"{size.points:,} points"
    if precomputed:
        return Route("exact", "K̃ was given", basis)
    linear_pass = f"a linear kernel, so Γ of {size.features:,} features is diagonalized after one pass"
    if linear and method in ("nystroem", "features"):
        return Route(method, linear_pass, _stream_bytes(size, size.features))
    if (
        linear
        and size.modalities == 1
        and method in ("auto", "exact")
        and solver in ("auto", "features")
        and size.features <= size.points
    ):
        data = 8 * size.points * size.features
        if method == "auto" and solver == "auto" and (data > size.memory or size.processes > 1):
            return Route("features", linear_pass, _stream_bytes(size, size.features))
        return Route("exact", linear_pass.removesuffix(" after one pass"), 3 * 8 * size.features**2 + data)
    if method in ("nystroem", "features"):
        return Route(method, _features(method, size), _stream_bytes(size, size.columns))
    tiles, limit = size.tiles, f"the limit memory={shown(size.memory)}"
    each = f" in each of {size.processes} processes" if size.processes > 1 else ""
    if item * size.points**2 <= size.memory and size.processes == 1:
        return Route("exact", f"K̃ of {points} fits into {limit}", item * size.points**2 + basis)
    if tiles <= size.memory:
        return Route("exact", f"the upper triangle of K̃ of {points} fits into {limit}{each}", tiles + basis)
    if method == "exact" or solver != "auto":
        why = "it was asked for" if method == "exact" else f'solver="{solver}" was asked for'
        reason = (
            f"{why}; tiles of K̃ of {points}, {shown(tiles)}{each}, exceed {limit} and are recomputed in each product"
        )
        return Route("exact", reason, size.memory + basis)
    reason = f"tiles of K̃ of {points} would take {shown(tiles)}{each}, more than {limit}; "
    if linear:
        return Route("features", reason + linear_pass, _stream_bytes(size, size.features))
    return Route("nystroem", reason + _features("nystroem", size), _stream_bytes(size, size.columns))


def _features(method: str, size: Size) -> str:
    what = "landmarks" if method == "nystroem" else "random features"
    return f"{size.columns:,} {what} stand for {size.points:,} points (approximate)"


def _stream_bytes(size: Size, width: int) -> int:
    """Sums, Γ and its whitening in float64, and the rows of a few chunks; `width`: columns of Γ."""
    item = np.dtype(size.dtype).itemsize
    return 4 * 8 * width**2 + 2 * CHUNK * ((8 + 3 * item) * width + 2 * item * size.features)


def shown(count: float) -> str:
    """A number of bytes for readers: 3.2 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{count:.2g} {unit}" if count < 10 else f"{count:,.0f} {unit}"
        count /= 1024
    raise AssertionError
