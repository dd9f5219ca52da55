r"""Per-sample gradients in factored form, and their inner products, layer by layer.

The gradient of a linear map's weight for sample i is G_i = Σ_t b_it a_itᵀ: a its inputs (patches, for convolutions), b
the gradient with respect to its outputs, t positions. Inner products of two samples come either from G itself
(explicit: 2 NTpq + N²pq products) or from the factors (ghost: Σ_tt' (a_it·a_jt')(b_it·b_jt'), N²T²(p + q) products, or
fewer, since patches share pixels); `Outer.gram` takes the cheapest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stairwise.ntk.windows import channels_last, laid_in_rows, windows

__all__ = ["AbstractFactor", "Contraction", "Direct", "Lookup", "Outer", "patches_bytes"]

BLOCKS, BLOCKS_GPU = 4, 2  # rows of a symmetric product are taken in so many blocks: saves three eighths, or a quarter
LONG, TOGETHER = 4096, 16  # terms of a sum, and sums at a time: tensor cores cut off the ends, 5e-9 of the sum a term
SINGLE = 10_000  # products a pair of samples, for which float16 saves no time
MIXED = "dtype" in torch.ops.aten.mm.overloads()  # torch ≥ 2.8
ENTRY, ENTRY_GPU = 100, 1000  # an entry of a ghost product is written and read; in units of multiplications, about
SHIFT = 22  # and added to another
CACHE = 1.6e7  # bytes of products that are added up at a time


@dataclass(frozen=True)
class _Kernel:
    """Numbers of positions along the axes of an image; and along each, for each element of the kernel, the positions
    that see a pixel there, and these pixels."""

    positions: tuple[int, ...]
    axes: list[list[tuple[slice, slice]]]


@dataclass(frozen=True)
class _Way:
    """To compute inner products; multiplications for a pair of samples, and the cost of all, in multiplications."""

    name: str
    products: float
    cost: float


@dataclass(frozen=True)
class Contraction:
    """How inner products are computed.

    Attributes:
        half: in float16, after every sample has been scaled to its own range; sums stay in float32.
        slice_bytes: explicit gradients are formed in slices of at most so many bytes; bounds products of pixels, and
            float16 sums that are taken at a time, too.
        buffers: memory for the slices, used again and again: on a CPU, fresh memory costs more than what is written.
    """

    half: bool = False
    slice_bytes: float = 1e9
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    def buffer(self, name: str, size: int, like: Tensor) -> Tensor:
        """Memory for `size` elements, whatever is in it."""
        kept = self.buffers.get((name, like.dtype))
        if kept is None or kept.numel() < size or kept.device != like.device:
            # a CPU's memory is only taken where it is written: asked for once, in full
            least = 0 if like.is_cuda else int(self.slice_bytes / like.element_size())
            kept = self.buffers[name, like.dtype] = like.new_empty(max(size, least))
        return kept[:size]


def _outer(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Flat gradients Σ_t b_t a_tᵀ, (n, groups · q · p)."""
    (n, groups, p, positions), q = a.shape, b.shape[2]
    into = out.view(n * groups, q, p)
    b, a = b.reshape(-1, q, positions), a.reshape(-1, p, positions).transpose(1, 2)
    if a.dtype == torch.float16 and not a.is_cuda:  # CPUs are slow at it
        into.copy_(b.float() @ a.float())
    else:
        torch.bmm(b, a, out=into)


def _product(x: Tensor, y: Tensor, how: Contraction) -> Tensor:
    """x yᵀ; of float16 matrices in float32."""
    if x.dtype != torch.float16:
        return x @ y.T
    if not x.is_cuda or not MIXED:
        return x.float() @ y.float().T
    whole = x.shape[1] // LONG * LONG
    total = torch.mm(x[:, whole:], y[:, whole:].T, out_dtype=torch.float32) if whole < x.shape[1] else None
    room = int(how.slice_bytes / (16 * len(x) * len(y)))  # a quarter of a slice
    step = LONG * min(max(room, 1), TOGETHER)
    for low in range(0, whole, step):
        a, b = (v[:, low : min(low + step, whole)].unflatten(1, (-1, LONG)).transpose(0, 1) for v in (x, y))
        product = torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32).sum(0)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _to_half(x: Tensor, below: float = 1.0) -> tuple[Tensor, Tensor]:
    """Each sample scaled so that its largest element is 1/√below, and the scales, (n, 1)."""
    rest = tuple(range(1, x.ndim))
    scale = torch.linalg.vector_norm(x, ord=torch.inf, dim=rest).clamp_min(1e-30) * below**0.5
    half = torch.empty_like(x, dtype=torch.float16)
    torch.mul(x, scale.reciprocal().view(-1, *[1] * (x.ndim - 1)), out=half)  # read once, written once
    return half, scale[:, None]


def _aligned(*factors: Tensor) -> list[Tensor]:
    """Zeros after the last axis up to a multiple of eight, without which float16 products of GPUs are slow; not if that
    is not the axis along which they are laid out."""
    rest = -factors[0].shape[-1] % 8
    if not rest or not any(x.is_cuda and x.dtype == torch.float16 and x.stride(-1) == 1 for x in factors):
        return list(factors)
    return [F.pad(x, (0, rest)) for x in factors]


def _block(x: Tensor) -> int:
    """Rows of a block of a symmetric product."""
    return -(-len(x) // (BLOCKS_GPU if x.is_cuda else BLOCKS))


def _by_rows(n: int, m: int, rows: int, symmetric: bool, block: Callable[[slice, slice], Tensor]) -> Tensor:
    """A matrix (n, m) from its blocks of so many rows; of a symmetric one the lower half is computed."""
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


class AbstractFactor(ABC):
    """Gradients of N samples with respect to one parameter."""

    @abstractmethod
    def gram(self, other: "AbstractFactor | None", how: Contraction) -> Tensor:
        """Inner products with the gradients of M other samples, (N, M); None: among themselves."""

    @abstractmethod
    def gradients(self) -> Tensor:
        """The gradients, flat, in the order of the parameter's elements, (N, size)."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of all samples of several parts."""


@dataclass(frozen=True, eq=False)
class Direct(AbstractFactor):
    """Gradients as they are, (N, size)."""

    values: Tensor

    def gram(self, other: AbstractFactor | None, how: Contraction) -> Tensor:
        assert other is None or isinstance(other, Direct)
        if not how.half or not self.values.shape[1]:
            return self.values @ (self if other is None else other).values.T
        mine, scale = _to_half(self.values)
        (mine,) = _aligned(mine)
        if other is None:
            theirs, their_scale = mine, scale
        else:
            theirs, their_scale = _to_half(other.values)
            (theirs,) = _aligned(theirs)
        return _product(mine, theirs, how).mul_(scale).mul_(their_scale.T)

    def gradients(self) -> Tensor:
        return self.values

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.values for part in parts]))


@dataclass(frozen=True, eq=False)
class Outer(AbstractFactor):
    """G_i = Σ_t b_it a_itᵀ, for each of g groups.

    Attributes:
        x: the layer's input, of which `patches` makes a (N, g, p, T) when it is needed.
        b: gradient at the layer's output, (N, g, q, T).
        more: the same of further samples; to put them into one tensor would cost more than it saves.
    """

    module: nn.Module
    x: Tensor
    b: Tensor
    more: tuple["Outer", ...] = ()

    @property
    def parts(self) -> tuple["Outer", ...]:
        return self, *self.more

    def __len__(self) -> int:
        return sum(len(part.x) for part in self.parts)

    def _planes(self) -> "Outer":
        """The same, not in channels-last layout."""
        return replace(self, x=self.x.contiguous(), more=tuple(part._planes() for part in self.more))

    def _whole(self) -> "Outer":
        """The same in one tensor."""
        if not self.more:
            return self
        return Outer(
            self.module, torch.cat([part.x for part in self.parts]), torch.cat([part.b for part in self.parts])
        )

    def gram(self, other: AbstractFactor | None, how: Contraction) -> Tensor:
        assert other is None or isinstance(other, Outer)
        them = self if other is None else other
        if len({channels_last(part.x) for part in (*self.parts, *them.parts)}) > 1:
            return self._planes().gram(None if other is None else other._planes(), how)
        way = self._cheapest(them, other is None, how)
        if way.products <= SINGLE:
            how = replace(how, half=False)
        if way.name == "explicit":
            return _explicit(self, other, how)
        if way.name == "pixels":
            kernel = _kernel(self)
            assert kernel is not None
            mine, scale = self._whole().scaled(how)
            theirs, their_scale = (None, scale) if other is None else other._whole().scaled(how)
            return _scaled(_by_pixels(kernel, mine, theirs, how), scale, their_scale)
        mine, scale = self._whole().prepared(how, "patches")
        theirs, their_scale = (None, scale) if other is None else other._whole().prepared(how, "their patches")
        return _scaled(_ghost(mine, theirs, how), scale, their_scale)

    def _cheapest(self, them: "Outer", symmetric: bool, how: Contraction) -> "_Way":
        """How to compute products with them."""
        _, groups, q, positions = self.b.shape
        p, n, m = self.module.weight[0].numel(), len(self), len(them)
        every = (*self.parts, *them.parts)
        share = (1 + 1 / min(n, BLOCKS_GPU if self.x.is_cuda else BLOCKS)) / 2 if symmetric else 1.0
        ways = [_Way("explicit", groups * p * q, groups * p * q * ((n + m) * positions + share * n * m))]
        if all(part.b.shape[3] == positions for part in every):
            if positions == 1:
                ways.clear()
            entry = ENTRY_GPU if self.x.is_cuda else ENTRY
            products = groups * positions**2
            ways.append(_Way("ghost", products * (p + q), products * (p + q + entry) * share * n * m))
        same_size = len({part.x.shape[2:] for part in every}) == 1
        if same_size and not self.x.is_cuda and _kernel(self) is not None and self._row_bytes(m) <= how.slice_bytes:
            products = self.x[0, 0].numel() ** 2 * self.x.shape[1] + positions**2 * q
            sums = positions**2 * (ENTRY + SHIFT * self.module.weight[0, 0].numel())
            ways.append(_Way("pixels", products, (products + sums) * share * n * m))
        return min(ways, key=lambda way: way.cost)

    def _row_bytes(self, m: int) -> float:
        """Memory for the products of one sample's pixels, or positions, with those of m."""
        return 4.0 * self.x.element_size() * m * max(self.x[0, 0].numel(), self.b.shape[3]) ** 2

    def scaled(self, how: Contraction) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """x and b of this part, and what scaled samples are to be multiplied with, (N, 1)."""
        if not how.half:
            return (self.x, self.b), None
        x, s_x = _to_half(self.x)
        b, s_b = _to_half(self.b, self.b.shape[3])  # sums over positions must not leave float16's range
        return (x, b), s_x * s_b

    def prepared(self, how: Contraction, name: str) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Patches instead of x."""
        (x, b), scale = self.scaled(how)
        return (patches(self.module, x, how, name), b), scale

    def gradients(self) -> Tensor:
        parts = [(part.b @ patches(part.module, part.x.contiguous()).transpose(2, 3)).flatten(1) for part in self.parts]
        return torch.cat(parts)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return replace(parts[0], more=tuple(parts[1:]))


@dataclass(frozen=True, eq=False)
class Lookup(AbstractFactor):
    """Rows of a table: b (N, L, features) for the rows `index` (N, L); those of −1 count for nothing."""

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
        out.index_put_((rows, self.index % (self.size + 1)), self.b, accumulate=True)  # −1 is the spare last row
        return out[:, :-1].flatten(1)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        index, b = torch.cat([part.index for part in parts]), torch.cat([part.b for part in parts])
        return cls(index, b, parts[0].size)


class _Slices:
    """Explicit gradients of some rows of the weight at a time, in a buffer of this name."""

    def __init__(self, factor: Outer, how: Contraction, name: str) -> None:
        self.factor, self.how, self.name = factor, how, name
        self.scales: list[Tensor | None] = [None] * len(factor.parts)
        self.only = self._part(0) if not factor.more else None  # made once; of several they take turns in the memory

    def _part(self, k: int) -> list[Tensor]:
        both, self.scales[k] = self.factor.parts[k].prepared(self.how, f"patches of {self.name}")
        return _aligned(*both)

    def rows(self, part: slice) -> Tensor:
        """(N, groups · rows · p)."""
        out: Tensor | None = None
        first = 0
        for k, one in enumerate(self.factor.parts):
            a, b = self.only or self._part(k)
            b = b[:, :, part]
            if out is None:
                size = a.shape[1] * a.shape[2] * b.shape[2]
                out = self.how.buffer(self.name, len(self.factor) * size, a).view(-1, size)
            _outer(a, b, out[first : first + len(one.x)])
            first += len(one.x)
        assert out is not None
        return out

    @property
    def scale(self) -> Tensor | None:
        return torch.cat([s for s in self.scales if s is not None]) if self.how.half else None


def _explicit(mine: Outer, theirs: Outer | None, how: Contraction) -> Tensor:
    """Inner products of gradients that are formed, slice by slice."""
    ours = _Slices(mine, how, "mine")
    others = None if theirs is None else _Slices(theirs, how, "theirs")
    n, m = len(mine), len(mine if theirs is None else theirs)
    row_bytes = (
        (n + (0 if theirs is None else m)) * mine.module.weight[0].numel() * (2 if how.half else mine.x.element_size())
    )
    width = max(1, int(how.slice_bytes / (row_bytes * mine.b.shape[1])))
    out = mine.x.new_zeros((n, m), dtype=torch.float32 if how.half else mine.x.dtype)
    for start in range(0, mine.b.shape[2], width):
        part = slice(start, start + width)
        x = ours.rows(part)
        y = x if others is None else others.rows(part)
        rows = n if others is not None else _block(x)
        out += _by_rows(n, m, rows, others is None, lambda i, j, x=x, y=y: _product(x[i], y[j], how))  # type: ignore[misc]
    return _scaled(out, ours.scale, (ours if others is None else others).scale)


def _scaled(gram: Tensor, scale: Tensor | None, their_scale: Tensor | None) -> Tensor:
    return gram if scale is None or their_scale is None else gram.mul_(scale).mul_(their_scale.T)


def _ghost(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor] | None, how: Contraction) -> Tensor:
    """Inner products Σ_tt' (a_it·a_jt')(b_it·b_jt') of gradients that are never formed."""
    n, groups, _, positions = mine[0].shape
    m = n if theirs is None else len(theirs[0])
    bytes_each = 4 if how.half else mine[0].element_size()
    rows = max(1, int(how.slice_bytes / (2 * m * positions**2 * bytes_each)))
    rows = rows if theirs is not None else min(rows, _block(mine[0]))
    flat = [[_positions_first(x, g) for x in mine] for g in range(groups)]
    other = flat if theirs is None else [[_positions_first(x, g) for x in theirs] for g in range(groups)]

    def block(i: slice, j: slice) -> Tensor:
        total: Tensor | int = 0
        for (a, b), (a2, b2) in zip(flat, other, strict=True):
            product = _product(a[i].flatten(0, 1), a2[j].flatten(0, 1), how)
            product *= _product(b[i].flatten(0, 1), b2[j].flatten(0, 1), how)
            if positions > 1:
                product = product.view(-1, positions, j.stop - j.start, positions).sum(dim=(1, 3))
            total = total + product
        assert isinstance(total, Tensor)
        return total

    return _by_rows(n, m, rows, theirs is None, block)


def _by_pixels(
    kernel: _Kernel, mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor] | None, how: Contraction
) -> Tensor:
    """The same of a convolution: a_it·a_jt' = Σ_k x_i,t+k·x_j,t'+k, where k goes over its kernel. Pixels are multiplied
    once, and their products added up. Mine and theirs are x and b."""
    x, b = mine[0].flatten(2), mine[1][:, 0]
    x2, b2 = (x, b) if theirs is None else (theirs[0].flatten(2), theirs[1][:, 0])
    seen, positions = mine[0].shape[2:], kernel.positions
    size = len(x2) * max(x.shape[2], b.shape[2]) ** 2 * (4 if how.half else x.element_size())
    x, b = (v.transpose(1, 2).contiguous() for v in (x, b))  # (n, T, q)
    x2, b2 = (v.permute(2, 0, 1).contiguous() for v in (x2, b2))  # (T, m, q): in products samples come last, long rows

    def block(i: slice, j: slice) -> Tensor:
        m = j.stop - j.start
        pixels = _product(x[i].flatten(0, 1), x2[:, j].flatten(0, 1), how).view(-1, *seen, *seen, m)
        total = _product(b[i].flatten(0, 1), b2[:, j].flatten(0, 1), how).view(-1, *positions, *positions, m)
        sums = torch.zeros_like(total)
        for along in product(*kernel.axes):
            there, here = zip(*along, strict=True)
            sums[:, *there, *there] += pixels[:, *here, *here]
        return total.mul_(sums).flatten(1, -2).sum(1)

    rows = max(1, int(CACHE / size))
    return _by_rows(len(x), x2.shape[1], rows if theirs is not None else min(rows, _block(x)), theirs is None, block)


def _kernel(factor: Outer) -> _Kernel | None:
    """None of what is no plain convolution."""
    module = factor.module
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or module.groups > 1:
        return None
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        return None
    positions, axes = [], []
    options = (module.kernel_size, module.stride, module.padding, module.dilation)
    for pixels, size, stride, padding, dilation in zip(factor.x.shape[2:], *options, strict=True):
        count = (pixels + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        axis = []
        for first in range(-padding, dilation * size - padding, dilation):  # what the first position sees
            low, high = max(0, -(first // stride)), min(count, (pixels - 1 - first) // stride + 1)
            if low < high:
                axis.append((slice(low, high), slice(first + stride * low, first + stride * (high - 1) + 1, stride)))
        positions.append(count)
        axes.append(axis)
    return _Kernel(tuple(positions), axes)


def _positions_first(x: Tensor, group: int) -> Tensor:
    """(N, g, p, T) → (N, T, p) of one group."""
    return x[:, group].transpose(1, 2).contiguous()


def patches(module: nn.Module, x: Tensor, how: Contraction | None = None, name: str = "") -> Tensor:
    """What a linear map's weights multiply: (N, groups, p, T); in the buffer of that name, if there is one. p goes over
    channels, then the kernel; of images in channels-last layout over the kernel, then channels."""
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2).unsqueeze(1)
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    if {*module.kernel_size, *module.stride} == {1} and not isinstance(module.padding, str) and not any(module.padding):
        return x.reshape(len(x), module.groups, x.shape[1] // module.groups, -1)
    seen = _windows(module, x)
    out = how.buffer(name, seen.numel(), seen) if how is not None else None
    if channels_last(x):
        rows = laid_in_rows(seen, out)
        return rows.flatten(4, 6).permute(0, 3, 4, 1, 2).flatten(3, 4)
    if out is not None:
        seen = out.view(seen.shape).copy_(seen)
    return seen.flatten(5, 6).flatten(2, 4)


def patches_bytes(module: nn.Module, x: Tensor) -> float:
    """Memory that a convolution's patches take."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or x.ndim != len(module.kernel_size) + 2:
        return 0.0
    return float(_windows(module, x).numel() * x.element_size())


def _windows(module: nn.Module, x: Tensor) -> Tensor:
    """A view of what a convolution sees: (N, groups, channels, kernel height, kernel width, height, width)."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        padding = list(module._reversed_padding_repeated_twice)
    else:  # may have been changed since the module was made
        padding = [side for one in reversed(module.padding) for side in (one, one)]
    if any(padding):
        x = F.pad(x, padding, "constant" if module.padding_mode == "zeros" else module.padding_mode)
    one: tuple[int, ...] = ()
    if isinstance(module, nn.Conv1d):  # images of one row
        x, one = x.unsqueeze(2), (1,)
    kernel, stride, dilation = ((*one, *v) for v in (module.kernel_size, module.stride, module.dilation))
    return windows(x, kernel, stride, dilation, module.groups)
