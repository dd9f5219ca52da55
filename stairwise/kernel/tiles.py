"""K̃ as tiles of its upper triangle, kept in memory while they fit and recomputed beyond; each process has a share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from stairwise.checks import is_tensor
from stairwise.kernel.arrays import Matrix, namespace, on_gpu
from stairwise.kernel.operators import MEMORY, AbstractPairs, Blocks, DensePairs, times_float64
from stairwise.progress import Progress, silent

TALLEST = 4096  # rows per tile
HALVES = True  # whether tiles of float32 on a GPU are held as halves


@dataclass(frozen=True)
class Tile:
    """k(x, y) for the rows `start` to `end` of one part and the points of another from `first` on.

    `row` and `column` are its place in K̃.
    """

    part: int
    other: int
    start: int
    end: int
    first: int
    row: int
    column: int
    width: int

    @property
    def area(self) -> int:
        return (self.end - self.start) * self.width

    @property
    def square(self) -> int:
        """Number of its columns that lie in the square on the diagonal of K̃."""
        return self.end - self.start if self.part == self.other else 0


@dataclass(frozen=True, eq=False)
class TilePairs(AbstractPairs):
    """Tiles of the upper triangle, which takes half of the memory and half of the work of K̃.

    Attributes:
        blocks: the kernel and its points.
        memory: bytes for the tiles of this process; those that do not fit are recomputed in each product.
        share, shares: this process has every tile of share `share` of `shares`; products are then sums over them.
        progress: is told how many tiles stand.
        halves: whether tiles are pairs of half-precision numbers (22 bits, `halves.py`); by default those of
            float32 on a GPU, whose tensor cores multiply the first of each pair for rough products.
    """

    blocks: Blocks
    swaps: bool = True
    memory: int = MEMORY
    share: int = 0
    shares: int = 1
    progress: Progress = silent
    halves: bool | None = None
    tiles: list[Tile] = field(init=False, repr=False)
    reads_much: bool = field(default=True, init=False, repr=False)
    _values: dict[Tile, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.blocks.size)
        object.__setattr__(self, "seed_like", self.blocks.parts[0])
        fast = self.blocks.dtype == "float32" and on_gpu(self.seed_like)
        if self.halves is None:
            object.__setattr__(self, "halves", fast and HALVES and _halves().supported(self.seed_like.device))
        eps = _halves().EPS if self.halves else np.finfo(self.blocks.dtype).eps
        object.__setattr__(self, "eps", float(eps))
        object.__setattr__(self, "has_rough", self.halves)
        object.__setattr__(self, "free_columns", 64 if self.halves else 32 if fast else 0)
        height = tile_height(self.size, self.memory, self.shares)
        object.__setattr__(self, "tiles", dealt(list(layout(self.blocks, height)), self.shares)[self.share])
        self._fill()

    def _fill(self) -> None:
        """Compute the tiles that fit into memory."""
        item, left = np.dtype(self.blocks.dtype).itemsize, self.memory
        kept = []
        for tile in self.tiles:
            left -= item * tile.area
            if left < 0:
                break
            kept.append(tile)
        total, done = sum(tile.area for tile in kept), 0
        for tile in kept:
            self.progress(done, total, f"{len(kept)} of {len(self.tiles)} tiles are kept in memory")
            self._values[tile] = self._computed(tile)
            done += tile.area

    @property
    def stored(self) -> bool:
        """Whether all tiles are in memory."""
        return len(self._values) == len(self.tiles)

    def _computed(self, tile: Tile) -> Any:
        rows = self.blocks.parts[tile.part][tile.start : tile.end]
        values = self.blocks.block(rows, tile.part, tile.other, slice(tile.first, None))
        return _halves().halved(values) if self.halves else values

    def matmul(self, block: Matrix) -> Matrix:
        """K̃ times a block, or the part of it that this process's tiles give."""
        return self._summed(block, block.T, times_float64, _halves().joined if self.halves else lambda values: values)

    def rough(self, block: Matrix) -> Matrix:
        """The same with the first half-precision number of each value."""
        if not self.halves:
            return self.matmul(block)
        left, scale = _halves().half_rows(block.T)
        return self._summed(block, left, _halves().long_product, lambda values: values.high) / scale.T

    def _summed(
        self, block: Matrix, left: Matrix, times: Callable[[Matrix, Matrix], Matrix], read: Callable[[Any], Matrix]
    ) -> Matrix:
        """The sum over tiles; `left` is the block transposed, because BLAS is faster this way round."""
        out = namespace(block).zeros_like(block).reshape(block.shape[1], self.size)
        for tile in self.tiles:
            held = self._values[tile] if tile in self._values else self._computed(tile)
            values, scale = read(held), held.scale if self.halves else 1.0
            rows = slice(tile.row, tile.row + tile.end - tile.start)
            out[:, rows] += times(left[:, tile.column : tile.column + tile.width], values.T) / scale
            if tile.width > tile.square:  # below the diagonal, K̃ is the transpose
                below = slice(tile.column + tile.square, tile.column + tile.width)
                out[:, below] += times(left[:, rows], values[:, tile.square :]) / scale
        return out.T.contiguous() if is_tensor(out) else np.ascontiguousarray(out.T)


def _halves() -> ModuleType:
    from stairwise.kernel import halves  # needs torch

    return halves


def layout(blocks: Blocks, height: int) -> Iterator[Tile]:
    """Tiles that cover the upper triangle of K̃ once, without the zeros between two modalities."""
    offsets = np.cumsum([0, *(len(part) for part in blocks.parts)])
    for part, X in enumerate(blocks.parts):
        others = range(part, len(blocks.parts) if blocks.shared else part + 1)
        for start in range(0, len(X), height):
            for other in others:
                first = start if other == part else 0
                row, column = int(offsets[part]) + start, int(offsets[other]) + first
                width = len(blocks.parts[other]) - first
                yield Tile(part, other, start, min(start + height, len(X)), first, row, column, width)


def dealt(tiles: list[Tile], shares: int) -> list[list[Tile]]:
    """Tiles in `shares` groups of about the same area."""
    hands: list[list[Tile]] = [[] for _ in range(shares)]
    areas = [0] * shares
    for tile in sorted(tiles, key=lambda tile: -tile.area):
        least = areas.index(min(areas))
        hands[least].append(tile)
        areas[least] += tile.area
    return hands


def tile_height(points: int, memory: int, shares: int = 1) -> int:
    """Rows per tile: a kernel allocates a few temporaries of a tile's size, and each share needs several tiles."""
    most = TALLEST if shares == 1 else max(1, points // (8 * shares))
    return max(1, min(TALLEST, most, memory // (32 * points)))


def triangle_bytes(points: int, dtype: str) -> int:
    """Memory of all tiles of one kernel between so many points."""
    return np.dtype(dtype).itemsize * points * (points + 1) // 2


def build_pairs(
    blocks: Blocks, swaps: bool, memory: int = MEMORY, progress: Progress = silent, share: int = 0, shares: int = 1
) -> AbstractPairs:
    """Dense if K̃ fits into `memory` bytes and one process has it, tiles otherwise."""
    if shares == 1 and np.dtype(blocks.dtype).itemsize * blocks.size**2 <= memory:
        return DensePairs(blocks.matrix(), swaps)
    return TilePairs(blocks, swaps, memory, share, shares, progress)
