r"""Spectra of embeddings, from moments that are accumulated batch by batch.

Sums are kept in float64 on the device of the embeddings; `update` neither synchronizes nor decomposes anything.
`collect` sums several batches at once, in a few operations per step; use it where launching kernels limits the speed.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.checks import InputError, flag, number, positive_int
from stairwise.distributed import total, world
from stairwise.monitor.decompose import ONES, Spectrum, decompose

if TYPE_CHECKING:
    from stairwise.monitor.hooks import Attachment

Floats = NDArray[np.float64]

AT_ONCE = 8  # number of batches that are summed together,
WAITING_BYTES = 64e6  # or fewer, if they take more memory than this
SAMPLE = 256  # number of pairs of the last batch that are kept for the picture of embeddings


class SpectrumMonitor:
    """Accumulates moments of (z_a, z_b), and of (h_a, h_b) if given.

    Arguments:
        window: average over at least this many recent pairs, and at most twice as many. None: all pairs since `reset`.
        half_life: instead of a window, number of pairs after which the weight of a pair has halved.
        normalized: also compute the spectrum of C of standardized embeddings.

    >>> monitor = SpectrumMonitor()
    >>> z = 2 * torch.eye(4)
    >>> monitor.update(z, z)
    >>> monitor.compute().eigenvalues
    array([1., 1., 1., 1.])
    """

    def __init__(self, window: int | None = None, half_life: float | None = None, *, normalized: bool = False) -> None:
        if window is not None and half_life is not None:
            raise InputError("window and half_life", "must not both be given", (window, half_life), "leave one out")
        remedy = "a number of pairs, or None for all since reset()"
        self.window = None if window is None else positive_int(window, "window", remedy=remedy)
        self.half_life = None if half_life is None else number(half_life, "half_life", above=0)
        self.normalized = flag(normalized, "normalized")
        self.sums: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}  # sums of the older half of the window
        self.waiting: list[tuple[Tensor, Tensor | None]] = []  # z_a and z_b in columns, h_a above h_b in rows
        self.seen = 0
        self.flaws: Tensor | None = None  # number of batches seen, number skipped, number of the first one skipped
        self.sample: Tensor | None = None  # the first pairs of the last batch

    def update(self, z_a: Tensor, z_b: Tensor, h_a: Tensor | None = None, h_b: Tensor | None = None) -> None:
        """Add a batch of pairs, each of shape (N, d)."""
        self.collect(z_a, z_b, h_a, h_b)
        self.flush()

    def collect(self, z_a: Tensor, z_b: Tensor, h_a: Tensor | None = None, h_b: Tensor | None = None) -> None:
        """Like `update`, but keep a copy of the batch and sum several batches together later."""
        self._check("z", z_a, z_b)
        if (h_a is None) != (h_b is None):
            raise InputError("h_a and h_b", "must be given together")
        if h_a is not None and h_b is not None:
            self._check("h", h_a, h_b)
        with torch.no_grad():
            z = torch.cat([z_a, z_b], dim=1)
            h = None if h_a is None or h_b is None else torch.cat([h_a, h_b])
        if self.waiting and not (_alike(z, self.waiting[0][0]) and _alike(h, self.waiting[0][1])):
            self.flush()
        self.waiting.append((z, h))
        self.seen += len(z)
        over = self.window is not None and self.seen >= self.window
        size = (z.nbytes + (0 if h is None else h.nbytes)) * len(self.waiting)
        first = (
            "zz" not in self.sums and not self.before
        )  # sum the first batch at once, so that errors appear immediately
        if first or over or len(self.waiting) >= AT_ONCE or size >= WAITING_BYTES:
            self.flush()
        if over:
            self.before, self.sums, self.seen = self.sums, {}, 0

    def collect_hidden(self, h: Tensor) -> None:
        """Add rows of h, (rows, features), of one or both views."""
        self._check("h", h, h)
        keep = 1.0 if self.half_life is None else 0.5 ** (len(h) / 2 / self.half_life)
        with torch.no_grad():
            rows = _with_ones([h])
            self._add("hh", rows, torch.isfinite(rows.sum(dim=(1, 2))), keep)

    def pairs_wanted(self) -> int:
        """Number of pairs that the spectra need."""
        return 4 * (self.dimensions() or 0)

    def flush(self) -> None:
        """Sum the batches that have been collected."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        pairs = len(waiting[0][0])
        keep = 1.0 if self.half_life is None else 0.5 ** (pairs / self.half_life)
        with torch.no_grad():
            z = _with_ones([z for z, _ in waiting])
            h = _with_ones([h for _, h in waiting if h is not None]) if waiting[0][1] is not None else None
            finite = torch.isfinite(z.sum(dim=(1, 2)) if h is None else z.sum(dim=(1, 2)) + h.sum(dim=(1, 2)))
            self._count(finite)
            self._add("zz", z, finite, keep)
            self._add_sums("u", _direction_sums(z[..., :-ONES]), finite, keep)
            self._add_sums("pairs", _pair_sums(z[..., :-ONES]), finite, keep)
            if h is not None:
                self._add("hh", h, finite, keep)
            self.sample = torch.stack(waiting[-1][0][:SAMPLE].chunk(2, dim=1)).detach().float()

    def attach(
        self,
        *,
        loss: nn.Module | None = None,
        projector: nn.Module | None = None,
        backbone: nn.Module | None = None,
        optimizer: Any = None,
        log: Any = None,
        every: int = 50,
        joined: bool = False,
        views: Any = None,
    ) -> "Attachment":
        """Record a training loop from now on, through hooks on its modules.

        Arguments:
            loss: module that is called with (z_a, z_b, …), or with a list or a stack of views. If the projector is
                given as well, z comes from that, and the loss gives its value only. If neither is given, call
                `update(z_a, z_b, loss=…)` of what is returned once per step.
            projector: module whose output is z, called once per view, or once with both views stacked (`joined`).
            backbone: module whose output is h. Feature maps and tokens are averaged over positions.
            optimizer: a step is one of its updates, and the time t is the sum of the learning rates of its first
                group. Without it a step is a call of the loss (or of `update`), and t counts them.
            log: folder for metrics.jsonl; an object with `.log(dict)`, such as a wandb run, or with
                `.add_scalar(name, value, step)`, such as TensorBoard's writer; or a list of these. Names in loggers
                begin with `stairwise/`: numbers of each record, and what is said about it (learned, state, says,
                next_step).
            every: steps between records; more if they contain fewer than 4 d pairs. A monitor without window or
                half-life is reset after each record. `close` records the rest, however few pairs there are.
            joined: both views pass through projector, backbone or a loss of one argument as one batch, first views
                first.
            views: None expects two and warns about more. A number says how many global crops come first; the first two
                are recorded. A function gets (args, kwargs) of the loss, or the output of the projector, and returns
                (z_a, z_b), or None to leave it out.
        """
        from stairwise.monitor.attachable import Modules
        from stairwise.monitor.hooks import Attachment

        return Attachment(self, Modules.given(loss, projector, backbone), optimizer, log, every, joined, views)

    def merge(self, other: "SpectrumMonitor") -> None:
        """Add the sums of another monitor, which has seen other pairs."""
        self.flush()
        for name, value in other._total().items():
            if name in self.sums:
                if self.sums[name].shape != value.shape:
                    sizes = f"{len(self.sums[name]) - ONES} and {len(value) - ONES}"
                    raise InputError("other", "must have seen embeddings of the same size", sizes)
                self.sums[name] += value.to(self.sums[name].device)
            else:
                self.sums[name] = value.clone()

    def reset(self) -> None:
        """Set all sums to zero, in place, because a captured graph refers to these buffers."""
        self.flush()  # keeps the count of batches right
        for value in self.sums.values():
            value.zero_()
        self.before, self.seen = {}, 0

    def compute(self) -> Spectrum:
        """Compute the spectra of everything accumulated (waits for the device)."""
        return decompose(self.snapshot(), self.normalized)

    def snapshot(self, joint: bool = False) -> dict[str, Floats]:
        """Copy the sums to the CPU (waits for the device), for `decompose` to process later, perhaps in another thread.

        joint: sum over the processes of a process group, all of which must call this.
        """
        values = dict(self._total())
        if joint:
            values = {name: total(value) for name, value in values.items()}
        flaws = _joint_flaws(self.flaws) if joint and self.flaws is not None else self.flaws
        values |= {name: v for name, v in (("flaws", flaws), ("sample", self.sample)) if v is not None}
        copies = {}
        for name, value in values.items():
            # page-locked memory: much faster than an ordinary copy, and all copies run at the same time
            copies[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            copies[name].copy_(value, non_blocking=True)
        for device in {value.device for value in values.values() if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: value.numpy() for name, value in copies.items()}

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load` to continue from."""
        self.flush()
        flaws = {} if self.flaws is None else {"flaws": self.flaws}
        return dict(self.sums) | {f"before.{name}": value for name, value in self.before.items()} | flaws

    def load(self, state: dict[str, Tensor], device: torch.device | None = None) -> None:
        """Continue from `state` on a device; None: the device of the next batch."""
        placed = {name: value.to(device) if device else value.clone() for name, value in state.items()}
        self.waiting, self.flaws = [], placed.pop("flaws", None)
        self.sums = {name: value for name, value in placed.items() if not name.startswith("before.")}
        self.before = {name.removeprefix("before."): v for name, v in placed.items() if name.startswith("before.")}
        self.seen = int(self.sums["zz"][-1, -1]) if "zz" in self.sums else 0

    def _total(self) -> dict[str, Tensor]:
        """Sums over the whole window."""
        self.flush()
        if not self.before:
            return self.sums
        return {name: value + self.sums[name] if name in self.sums else value for name, value in self.before.items()}

    def dimensions(self, name: str = "z") -> int | None:
        """Size of the embeddings ("z") or representations ("h") seen so far."""
        for z, h in self.waiting:
            if name == "z":
                return z.shape[1] // 2
            if h is not None:
                return h.shape[1]
        kept = next((kept[name * 2] for kept in (self.sums, self.before) if name * 2 in kept), None)
        return None if kept is None else (len(kept) - ONES) // (2 if name == "z" else 1)

    def _check(self, name: str, a: Tensor, b: Tensor) -> None:
        for view, given in (("a", a), ("b", b)):
            if not isinstance(given, Tensor):
                raise InputError(
                    f"{name}_{view}", "must be a torch tensor", type(given).__name__, "use torch.as_tensor"
                )
        if a.ndim != 2 or a.shape != b.shape:
            shapes = f"{tuple(a.shape)}, {tuple(b.shape)}"
            raise InputError(f"{name}_a and {name}_b", "must be 2-D and of the same shape", shapes, "flatten them")
        known = self.dimensions(name)
        if known is not None and known != a.shape[1]:
            rule = f"must have {known} dimensions, as before"
            raise InputError(f"{name}_a", rule, a.shape[1], "use a new monitor")

    def _add(self, name: str, x: Tensor, finite: Tensor, keep: float) -> None:
        """sums[name] ← keep · sums[name] + xᵀx for each finite batch x in turn, (batches, rows, columns)."""
        if name not in self.sums:
            self.sums[name] = x.new_zeros(x.shape[2], x.shape[2])
        if self.sums[name].device != x.device:  # it was read from a checkpoint
            self.sums[name] = self.sums[name].to(x.device)
        x = torch.where(finite[:, None, None], x, 0.0)
        if keep < 1 and len(x) > 1:
            later = torch.arange(len(x) - 1, -1, -1, device=x.device, dtype=x.dtype)
            x = x * (keep ** (later / 2))[:, None, None]
        rows = x.flatten(0, 1)
        self.sums[name].addmm_(rows.T, rows, beta=keep ** len(x))

    def _add_sums(self, name: str, found: Tensor, finite: Tensor, keep: float) -> None:
        """sums[name] ← keep · sums[name] + the sums found in each finite batch in turn, (batches, number of sums)."""
        if name not in self.sums:
            self.sums[name] = found.new_zeros(found.shape[1])
        if self.sums[name].device != found.device:  # it was read from a checkpoint
            self.sums[name] = self.sums[name].to(found.device)
        later = torch.arange(len(found) - 1, -1, -1, device=found.device, dtype=found.dtype)
        found = torch.where(finite[:, None], found, 0.0)
        self.sums[name].mul_(keep ** len(found)).add_((keep**later) @ found)

    def _count(self, finite: Tensor) -> None:
        """Count batches and skipped batches, without waiting for the device."""
        if self.flaws is None:
            self.flaws = torch.zeros(3, dtype=torch.float64, device=finite.device)
        self.flaws = self.flaws.to(finite.device)
        seen, skipped, first = self.flaws
        bad = (~finite).double()
        number = seen + bad.argmax() + 1
        first.copy_(torch.where((first == 0) & (bad.sum() > 0), number, first))
        seen += len(finite)
        skipped += bad.sum()


def _joint_flaws(flaws: Tensor) -> Tensor:
    """Number of batches seen and skipped by all processes, and the first one that any process skipped."""
    if world() == 1:
        return flaws
    first = torch.where(flaws[2] > 0, flaws[2], torch.inf)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return torch.cat([total(flaws[:2]), torch.where(torch.isfinite(first), first, 0.0)[None]])


def _pair_sums(z: Tensor) -> Tensor:
    """Sums over the pairs of each batch (batches, rows, 2d), as `decompose.PAIRS` names them."""
    squares, centred = z.square(), (z - z.mean(dim=1, keepdim=True)).square_()
    a, b = z.chunk(2, dim=2)
    norms, lengths = (x.unflatten(2, (2, -1)).sum(dim=3) for x in (squares, centred))
    count = torch.ones_like(norms[:, 0, 0])
    return torch.stack(
        [
            count / world(),  # a batch is shared by all processes, whose sums are added later
            count * z.shape[1],
            norms.prod(dim=2).sum(dim=1),
            torch.linalg.vecdot(a, b).square_().sum(dim=1),
            torch.linalg.vecdot(*squares.chunk(2, dim=2)).sum(dim=1),
            lengths.square_().sum(dim=(1, 2)) / 2,
            torch.linalg.vecdot(centred, centred).sum(dim=1) / 2,
        ],
        dim=1,
    )


def _with_ones(batches: list[Tensor]) -> Tensor:
    """Stack batches, (batches, rows, columns), and append columns of ones, so that one matrix product yields the first
    and second moments and the number of rows."""
    return nn.functional.pad(torch.stack(batches).double(), (0, ONES), value=1.0)


def _direction_sums(z: Tensor) -> Tensor:
    """Sums over both views of each batch (batches, rows, 2d): of u = z/‖z‖, of the cosine u_a·u_b, and their number."""
    u_a, u_b = (nn.functional.normalize(view, dim=2) for view in z.chunk(2, dim=2))
    cosines = 2 * (u_a * u_b).sum(dim=(1, 2))
    number = torch.full_like(cosines, 2.0 * z.shape[1])
    return torch.cat([(u_a + u_b).sum(dim=1), cosines[:, None], number[:, None]], dim=1)


def _alike(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
