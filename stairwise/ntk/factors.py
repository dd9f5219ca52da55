r"""Per-sample gradients in factored form, and their inner products, layer by layer.

The weight gradient of a linear map for sample i is G_i = Σ_t b_it a_itᵀ, where a are its inputs (patches, for
convolutions), b the gradients at its outputs, and t counts positions. Inner products of two samples come either from G
(explicit: 2NTpq + N²pq multiplications) or from the factors (ghost: Σ_tt' (a_it·a_jt')(b_it·b_jt'), N²T²(p + q)
multiplications). `Outer.gram` takes the cheapest way, including those that `ntk.fast` adds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from stairwise.ntk.patches import LinearMap, patches

if TYPE_CHECKING:
    from stairwise.ntk.fast.half import HalfProducts

BLOCKS, BLOCKS_GPU = 4, 2  # row blocks of a symmetric product: saves three eighths of it, or a quarter
SMALL_LAYER = 10_000  # multiplications per pair of samples, below which lower precision saves no time
ENTRY, ENTRY_GPU = 100, 1000  # cost of writing and reading an entry of a ghost product, in multiplications (rough)


@dataclass(frozen=True)
class Way:
    """A way to compute the inner products of a layer: `gram` does it."""

    name: str
    multiplications: float  # per pair of samples
    cost: float  # of the whole matrix, in multiplications
    gram: Callable[["Outer", "Outer | None", "Contraction"], Tensor]


@dataclass(frozen=True)
class Contraction:
    """How inner products are computed. The defaults are the plain path.

    Attributes:
        slice_bytes: explicit gradients are formed in slices of at most this many bytes; other temporary memory is
            bounded by it, too.
        half: multiplies in float16; None: in the precision of the factors.
        more_ways: functions (one, other, symmetric, contraction) that propose further ways, or None.
        buffers: memory for slices, kept for the next layer: 1.3 × on a CPU, where fresh memory is slow to write.
    """

    slice_bytes: float = 1e9
    half: "HalfProducts | None" = None
    more_ways: tuple[Callable[["Outer", "Outer", bool, "Contraction"], Way | None], ...] = ()
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x yᵀ."""
        return x @ y.T if self.half is None else self.half.product(x, y, self.slice_bytes)

    def scaled(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x and b in the type in which they are multiplied, and what undoes their scaling, (N, 1)."""
        if self.half is None:
            return x, b, None
        x, scale_x = self.half.scaled(x)
        b, scale_b = self.half.scaled(b, b.shape[3])  # sums over positions must stay in range
        return x, b, scale_x * scale_b

    def buffer(self, name: str, size: int, like: Tensor) -> Tensor:
        """Uninitialized memory for `size` elements."""
        kept = self.buffers.get((name, like.dtype))
        if kept is None or kept.numel() < size or kept.device != like.device:
            # a CPU provides memory when it is first written: ask once, for the most
            least = 0 if like.is_cuda else int(self.slice_bytes / like.element_size())
            kept = self.buffers[name, like.dtype] = like.new_empty(max(size, least))
        return kept[:size]

    def copied(self, name: str) -> Callable[[Tensor], Tensor]:
        """A function that copies a view into the buffer of that name."""
        return lambda view: self.buffer(name, view.numel(), view).view(view.shape).copy_(view)


class AbstractFactor(ABC):
    """Gradients of N samples with respect to one parameter."""

    @abstractmethod
    def gram(self, other: "AbstractFactor | None", how: Contraction) -> Tensor:
        """Inner products (N, M) with the gradients of M other samples; None: among themselves."""

    @abstractmethod
    def gradients(self) -> Tensor:
        """Gradients (N, size), in the order of the parameter's elements."""

    @abstractmethod
    def times(self, lengths: Tensor) -> Self:
        """The gradients times one number per row of the parameter, (rows,)."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Gradients of the samples of all parts."""


@dataclass(frozen=True, eq=False)
class Direct(AbstractFactor):
    """Gradients as they are, (N, size)."""

    values: Tensor

    def gram(self, other: AbstractFactor | None, how: Contraction) -> Tensor:
        assert other is None or isinstance(other, Direct)
        if how.half is None or self.values.shape[1] <= SMALL_LAYER:
            return self.values @ (self if other is None else other).values.T
        mine, scale = how.half.scaled(self.values)
        theirs, their_scale = (mine, scale) if other is None else how.half.scaled(other.values)
        return unscaled(how.product(*how.half.aligned(mine, theirs)), scale, their_scale)

    def gradients(self) -> Tensor:
        return self.values

    def times(self, lengths: Tensor) -> Self:
        rows = self.values.unflatten(1, (len(lengths), -1))
        return replace(self, values=(rows * lengths.to(rows)[:, None]).flatten(1))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.values for part in parts]))


@dataclass(frozen=True, eq=False)
class Lookup(AbstractFactor):
    """Gradients b (N, L, features) of the rows `index` (N, L) of a table; index −1 stands for no row."""

    index: Tensor
    b: Tensor
    size: int

    def gram(self, other: AbstractFactor | None, how: Contraction) -> Tensor:
        assert other is None or isinstance(other, Lookup)
        them = other or self
        length = self.index.shape[1]
        rows = max(1, int(how.slice_bytes / (3 * length * them.index.numel() * self.b.element_size())))
        parts = []
        for index, b in zip(self.index.split(rows), self.b.split(rows), strict=True):
            same = (index[:, :, None, None] == them.index) & (index >= 0)[:, :, None, None]
            parts.append(torch.where(same, torch.einsum("nlf,mkf->nlmk", b, them.b), 0.0).sum(dim=(1, 3)))
        return torch.cat(parts)

    def gradients(self) -> Tensor:
        n, _, features = self.b.shape
        out = self.b.new_zeros(n, self.size + 1, features)
        rows = torch.arange(n, device=self.b.device)[:, None].expand_as(self.index)
        out.index_put_((rows, self.index % (self.size + 1)), self.b, accumulate=True)  # −1 goes to a spare last row
        return out[:, :-1].flatten(1)

    def times(self, lengths: Tensor) -> Self:
        return replace(self, b=self.b * lengths.to(self.b)[self.index.clamp_min(0)].unsqueeze(-1))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.index for part in parts]), torch.cat([part.b for part in parts]), parts[0].size)


@dataclass(frozen=True, eq=False)
class Outer(AbstractFactor):
    """Gradients G_i = Σ_t b_it a_itᵀ of the weight of a linear map, for each of g groups.

    Attributes:
        parts: (x, b) of consecutive samples: the layer's input, whose patches are a (n, g, p, T), and the gradient at
            its output, (n, g, q, T). Several parts stay apart: 1.3 × on a CPU, where fresh memory is slow to write.
    """

    module: LinearMap
    parts: tuple[tuple[Tensor, Tensor], ...]

    @property
    def samples(self) -> int:
        return sum(len(x) for x, _ in self.parts)

    def whole(self) -> tuple[Tensor, Tensor]:
        """x and b of all samples."""
        if len(self.parts) == 1:
            return self.parts[0]
        return torch.cat([x for x, _ in self.parts]), torch.cat([b for _, b in self.parts])

    def gram(self, other: AbstractFactor | None, how: Contraction) -> Tensor:
        assert other is None or isinstance(other, Outer)
        way = self.cheapest(self if other is None else other, other is None, how)
        if way.multiplications <= SMALL_LAYER:
            how = replace(how, half=None)
        return way.gram(self, other, how)

    def cheapest(self, them: "Outer", symmetric: bool, how: Contraction) -> Way:
        """The cheapest way to compute inner products with those gradients."""
        x, b = self.parts[0]
        _, groups, q, positions = b.shape
        p, n, m = self.module.weight[0].numel(), self.samples, them.samples
        share = (1 + 1 / min(n, BLOCKS_GPU if x.is_cuda else BLOCKS)) / 2 if symmetric else 1.0
        size = groups * p * q
        ways = [Way("explicit", size, size * ((n + m) * positions + share * n * m), _explicit)]
        if all(their_b.shape[3] == positions for _, their_b in (*self.parts, *them.parts)):
            if positions == 1:
                ways.clear()
            entry, pairs = ENTRY_GPU if x.is_cuda else ENTRY, groups * positions**2
            ways.append(Way("ghost", pairs * (p + q), pairs * (p + q + entry) * share * n * m, _ghost))
        more = [propose(self, them, symmetric, how) for propose in how.more_ways]
        return min([*ways, *(way for way in more if way is not None)], key=lambda way: way.cost)

    def gradients(self) -> Tensor:
        x, b = self.whole()
        per_row = (b @ patches(self.module, x).transpose(2, 3)).flatten(1, 2)  # (N, rows of the weight, p)
        channels = self.module.weight.shape[1]
        return per_row.unflatten(2, (-1, channels)).transpose(2, 3).flatten(1)

    def times(self, lengths: Tensor) -> Self:
        return replace(self, parts=tuple((x, b * lengths.to(b).view(1, *b.shape[1:3], 1)) for x, b in self.parts))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(parts[0].module, tuple(part for factor in parts for part in factor.parts))


def unscaled(gram: Tensor, scale: Tensor | None, their_scale: Tensor | None) -> Tensor:
    """Inner products of samples before they were scaled."""
    return gram if scale is None or their_scale is None else gram.mul_(scale).mul_(their_scale.T)


def by_rows(
    n: int, m: int, rows: int, symmetric: bool, on_gpu: bool, block: Callable[[slice, slice], Tensor]
) -> Tensor:
    """A matrix (n, m) from its blocks of at most `rows` rows; of a symmetric one only the lower half is computed."""
    if symmetric:
        rows = min(rows, -(-n // (BLOCKS_GPU if on_gpu else BLOCKS)))
    out: Tensor | None = None
    for low in range(0, n, rows):
        high = min(low + rows, n)
        part = block(slice(low, high), slice(0, high if symmetric else m))
        out = part.new_empty(n, m) if out is None else out
        out[low:high, : part.shape[1]] = part
        if symmetric:
            out[:low, low:high] = part[:, :low].T
    assert out is not None
    return out


def _slices(factor: Outer, how: Contraction, name: str, width: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Explicit gradients (N, groups · rows · p) of `width` rows of the weight at a time, in the buffer of this name,
    and what undoes their scaling."""

    def prepared(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, b, scale = how.scaled(x, b)
        a = patches(factor.module, x, how.copied(f"patches of {name}"))
        a, b = (a, b) if how.half is None else how.half.aligned(a, b)
        return a, b, scale

    # several parts take turns in the memory for patches
    only = prepared(*factor.parts[0]) if len(factor.parts) == 1 else None
    for start in range(0, factor.parts[0][1].shape[2], width):
        out: Tensor | None = None
        first, scales = 0, []
        for part in factor.parts:
            a, b, scale = only or prepared(*part)
            b = b[:, :, start : start + width]
            (n, groups, p, positions), q = a.shape, b.shape[2]
            if out is None:
                out = how.buffer(name, factor.samples * groups * q * p, a).view(-1, groups * q * p)
            a, b = a.reshape(-1, p, positions).transpose(1, 2), b.reshape(-1, q, positions)
            torch.bmm(b, a, out=out[first : first + n].view(n * groups, q, p))
            first += n
            scales += [] if scale is None else [scale]
        assert out is not None
        yield out, torch.cat(scales) if scales else None


def _explicit(mine: Outer, theirs: Outer | None, how: Contraction) -> Tensor:
    """Inner products of gradients that are formed, slice by slice."""
    n, m, b = mine.samples, (theirs or mine).samples, mine.parts[0][1]
    row_bytes = (n + (0 if theirs is None else m)) * mine.module.weight[0].numel() * b.element_size() * b.shape[1]
    width = max(1, int(how.slice_bytes / row_bytes))
    total: Tensor | None = None
    slices = _slices(mine, how, "mine", width)
    others = None if theirs is None else _slices(theirs, how, "theirs", width)
    for x, scale in slices:
        y, their_scale = (x, scale) if others is None else next(others)
        part = by_rows(n, m, n, others is None, x.is_cuda, lambda i, j, x=x, y=y: how.product(x[i], y[j]))  # type: ignore[misc]
        total = part if total is None else total.add_(part)
    assert total is not None
    return unscaled(total, scale, their_scale)


def _ghost(mine: Outer, theirs: Outer | None, how: Contraction) -> Tensor:
    """Inner products Σ_tt' (a_it·a_jt')(b_it·b_jt') of gradients that are never formed."""
    flat, scale = _positions_first(mine, how, "mine")
    other, their_scale = (flat, scale) if theirs is None else _positions_first(theirs, how, "theirs")
    (n, positions, _), m = flat[0][0].shape, len(other[0][0])
    bytes_each = max(4, flat[0][0].element_size())
    rows = max(1, int(how.slice_bytes / (2 * m * positions**2 * bytes_each)))

    def block(i: slice, j: slice) -> Tensor:
        total: Tensor | None = None
        for (a, b), (a2, b2) in zip(flat, other, strict=True):
            product = how.product(a[i].flatten(0, 1), a2[j].flatten(0, 1))
            product *= how.product(b[i].flatten(0, 1), b2[j].flatten(0, 1))
            if positions > 1:
                product = product.view(-1, positions, j.stop - j.start, positions).sum(dim=(1, 3))
            total = product if total is None else total + product
        assert total is not None
        return total

    return unscaled(by_rows(n, m, rows, theirs is None, flat[0][0].is_cuda, block), scale, their_scale)


def _positions_first(factor: Outer, how: Contraction, name: str) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """For each group a (N, T, p) and b (N, T, q); and what undoes their scaling."""
    x, b, scale = how.scaled(*factor.whole())
    a = patches(factor.module, x, how.copied(f"patches of {name}"))
    groups = range(a.shape[1])
    return [(a[:, g].transpose(1, 2).contiguous(), b[:, g].transpose(1, 2).contiguous()) for g in groups], scale
