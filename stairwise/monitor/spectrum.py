r"""Spectra of embeddings, from moments that are accumulated batch by batch.

Sums are kept on the device of the embeddings, and made on a CUDA stream of their own. The host waits for them in
`compute`, and once for a first tracked basis. `update` lets the current stream wait for the sums. `collect` does not,
and sums several batches at once, in a few operations per step; it is faster.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.checks import InputError, flag, number, positive_int
from stairwise.distributed import rank, world
from stairwise.monitor import moments
from stairwise.monitor.aside import Aside, Copies
from stairwise.monitor.decompose import Spectrum, decompose
from stairwise.monitor.digest import (
    add_statistics,
    ages,
    alike,
    condensed,
    counted,
    joint_flaws,
    joint_sums,
    whole,
)
from stairwise.monitor.frames import Frames
from stairwise.monitor.kept import Kept, fits
from stairwise.monitor.products import uses_halves
from stairwise.monitor.views import check_pair

if TYPE_CHECKING:
    from stairwise.monitor.hooks import Attachment

Floats = NDArray[np.float64]

AT_ONCE = 8  # number of batches that are summed together,
WAITING_BYTES = 64e6  # or fewer, if they take more memory than this
SAMPLE = 256  # number of pairs of the last batch that are kept for the picture of embeddings
FEWEST = 4  # a spectrum needs at least this many pairs per dimension,
ENOUGH = FEWEST * moments.ALL  # but no more than these, since above this size only the leading values are reported


class SpectrumMonitor:
    """Accumulates moments of (z_a, z_b), and of h if given.

    Up to 1024 dimensions all eigenvalues are computed, above that the leading 128 and the exact sum of all: up to 8192
    from all second moments, beyond from their products with a basis that follows the leading modes (`monitor.moments`).

    Arguments:
        window: average over at least this many recent pairs, and at most twice as many. None: all pairs since `reset`.
            Of several processes each counts its own.
        half_life: instead of a window, number of pairs after which the weight of a pair has halved.
        normalized: also compute the spectrum of C of standardized embeddings; if there are more than 1024 dimensions,
            the leading values with the mean variance of both views, and above 8192 none.
        exact: True: all eigenvalues, whatever the size. False: the leading 128, if there are more than 256.

    >>> monitor = SpectrumMonitor()
    >>> z = 2 * torch.eye(4)
    >>> monitor.update(z, z)
    >>> monitor.compute().eigenvalues
    array([1., 1., 1., 1.])
    """

    def __init__(
        self,
        window: int | None = None,
        half_life: float | None = None,
        *,
        normalized: bool = False,
        exact: bool | None = None,
    ) -> None:
        if window is not None and half_life is not None:
            raise InputError("window and half_life", "must not both be given", (window, half_life), "leave one out")
        remedy = "a number of pairs, or None for all since reset()"
        self.window = None if window is None else positive_int(window, "window", remedy=remedy)
        self.half_life = None if half_life is None else number(half_life, "half_life", above=0)
        self.normalized = flag(normalized, "normalized")
        self.exact = None if exact is None else flag(exact, "exact")
        self.sums: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}  # sums of the older half of the window
        self.frames = Frames()
        self.kept = Kept()  # rows of z and h, while they are few
        self.since_reset = {"z": 0, "h": 0}  # number of rows
        self.recorded = False  # whether a graph may update this monitor: it cannot keep rows, which the host counts
        self.bases: dict[str, Tensor] = {}  # bases in which leading eigenvalues are found, by spectrum
        self.waiting: dict[str, list[Tensor]] = {"z": [], "h": []}  # z_a and z_b in columns; rows of h
        self.seen = 0
        self.flaws: Tensor | None = None  # number of batches seen, number skipped, number of the first one skipped
        self.sample: Tensor | None = None  # the last pairs of the last batch
        self.aside = Aside()  # where sums and records are made

    def update(self, z_a: Tensor, z_b: Tensor, h_a: Tensor | None = None, h_b: Tensor | None = None) -> None:
        """Add a batch of pairs, each of shape (N, d). A CUDA graph can record this."""
        self.recorded = True
        self.sum_rows()
        self.collect(z_a, z_b, h_a, h_b)
        self.flush()
        self.aside.wait()

    def collect(self, z_a: Tensor, z_b: Tensor, h_a: Tensor | None = None, h_b: Tensor | None = None) -> None:
        """Like `update`, but keep a copy of the batch, sum several together later, and let no stream wait."""
        self._check("z", z_a, z_b)
        if (h_a is None) != (h_b is None):
            raise InputError("h_a and h_b", "must be given together")
        if h_a is not None and h_b is not None:
            self._check("h", h_a, h_b)
            self.collect_hidden(torch.cat([h_a.detach(), h_b.detach()]))
        self._wait("z", torch.cat([z_a.detach(), z_b.detach()], dim=1))
        self._see(len(z_a))

    def add_batches(self, z: Tensor, h: Tensor | None = None) -> None:
        """Add batches of N pairs, (batches, N, 2d), z_a next to z_b, and of h, (batches, 2N, …).

        Their memory may be overwritten only after `aside.wait`.
        """
        self.flush()
        for name, batches in (("z", z), ("h", h)):
            if batches is not None:
                self._sum(name, [batches])
        self._see(z.shape[0] * z.shape[1])

    def _see(self, pairs: int) -> None:
        """Count pairs; a full window becomes the older half. Centres follow after each window or half-life."""
        self.seen += pairs
        if self.seen < (self.window or self.half_life or math.inf):
            return
        self.flush()
        self.seen = 0
        with self.aside.work(self._device(), self._held()):
            if self.window is not None:
                self.frames.turn(self.sums, keep=True)
            self.frames.recentre(self.sums, keep=True)
        if self.window is not None:
            self.before, self.sums = self.sums, {}

    def collect_hidden(self, h: Tensor) -> None:
        """Add representations, (rows, features): of one view, of both, or of any part of a batch."""
        self._check("h", h, h)
        self._wait("h", h.detach().clone())

    def _wait(self, name: str, rows: Tensor) -> None:
        """Keep rows until several batches are summed together."""
        if self.waiting[name] and not alike(rows, self.waiting[name][0]):
            self._flush(name)
        waiting = self.waiting[name]
        waiting.append(rows)
        # the first batch is summed at once, so that errors appear immediately
        first = not any(moments.STREAMS.get(known) == name for known in (*self.sums, *self.before))
        if first and self._layout(name) == "tracked":  # its basis is found in the first rows: wait for more
            first = 2 * sum(map(len, waiting)) >= moments.COLUMNS
        if first or len(waiting) >= AT_ONCE or rows.nbytes * len(waiting) >= WAITING_BYTES:
            self._flush(name)

    def flush(self) -> None:
        """Sum the batches that have been collected."""
        for name in self.waiting:
            self._flush(name)

    def _flush(self, name: str) -> None:
        waiting, self.waiting[name] = self.waiting[name], []
        if waiting:
            self._sum(name, [rows[None] for rows in waiting])

    def _sum(self, name: str, parts: list[Tensor]) -> None:
        """Add batches, (batches, rows, columns) in each part, to the sums."""
        device = parts[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.aside.allowed = False
        kind = moments.layout(moments.size(name, parts[0][0]), self.exact)
        with self.aside.work(device, [*parts, *self._held()]), moments.plain_products(device):
            batches = parts.pop() if len(parts) == 1 else torch.cat(parts)
            parts.clear()
            batches = batches.float() if kind != "all" and batches.dtype == torch.float64 else batches
            self.frames.arrive(name, device, self.sums, self.before)
            for rows in self.kept.rows.values():
                rows.to(device)
            number = batches.shape[0] * batches.shape[1] * (2 if name == "z" else 1)
            self.since_reset[name] += number
            halves = kind == "dense" and uses_halves(self.frames.centre(name, batches))
            if halves and self._forgets() and self.kept.has_room(name, number, self.sums):
                self.kept.append(name, batches, self.frames, self.sums)
                return
            if name in self.kept.rows:
                self._give_up(name)
            streams = self.frames.streams(name, batches, kind)
            squares = {key: torch.linalg.vector_norm(x, dim=1).square_() for key, x in streams.items()}
            finite = self.frames.usable(name, squares, next(iter(streams.values()))[0].numel())
            for x in streams.values():
                x.masked_fill_(~finite[:, None, None], 0.0)
            if kind == "tracked":
                self.frames.begin(name, streams)
            pairs = batches.shape[1] if name == "z" else batches.shape[1] / 2
            keep = 1.0 if self.half_life is None else 0.5 ** (pairs / self.half_life)
            if name == "z":
                self.sample = batches[-1][-SAMPLE:].clone()
                self.flaws = counted(self.flaws, finite)
                add_statistics(self.sums, batches, finite, keep, kind == "all", self.normalized)
            del batches
            for key in list(streams):
                self._add(key, streams.pop(key), squares[key], finite, keep)

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
        updates: int | None = None,
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
            every: steps between records; more if they contain fewer than 4 d pairs, or 4096 if d is above 1024. A
                monitor without window or half-life is reset after each record. `close` records the rest.
            joined: both views pass through projector, backbone or a loss of one argument as one batch, first views
                first.
            views: None expects two and warns about more. A number says how many global crops come first; the first two
                are recorded. A function gets (args, kwargs) of the loss, or the output of the projector, and returns
                (z_a, z_b), or None to leave it out.
            updates: number of steps of the whole run, so that advice and page know what comes after its end.
        """
        from stairwise.monitor.attachable import Modules
        from stairwise.monitor.hooks import Attachment

        modules = Modules.given(loss, projector, backbone)
        return Attachment(self, modules, optimizer, log, every, joined, views, updates)

    def merge(self, other: "SpectrumMonitor") -> None:
        """Add the sums of another monitor, which has seen other pairs."""
        for monitor in (self, other):
            monitor.flush()
            monitor.sum_rows()
            monitor.aside.wait()
        placed = set(self.frames.centres)
        for name, value in whole(other.sums, other.before).items():
            stream, known = moments.STREAMS.get(name, ""), self.sums.get(name, self.before.get(name))
            if known is not None and (known.shape, known.dtype) != (value.shape, value.dtype):
                sizes = f"{self.dimensions()} and {other.dimensions()}"
                raise InputError("other", "must have seen embeddings of the same size, with the same `exact`", sizes)
            dense = stream in other.frames.centres and stream not in other.frames.bases
            value = moments.mirrored(value) if dense else value.clone()
            if stream in placed:
                value = other.frames.adapted(name, value, self.frames)
            else:
                self.frames.adopt(stream, other.frames)
            if name in self.sums:
                self.sums[name] += value.to(self.sums[name].device)
            else:
                self.sums[name] = value

    def reset(self) -> None:
        """Set all sums to zero, in place, because a captured graph refers to these buffers."""
        self.flush()  # keeps the count of batches right
        with self.aside.work(self._device(), self._held()):
            self._sum_up()
            self.frames.turn(self.sums)
            self.frames.recentre(self.sums)
            for value in self.sums.values():
                value.zero_()
            self.kept.forget()
        if self.before:
            self.aside.wait()  # before their memory is used again
        self.before, self.seen = {}, 0
        for name in ("z", "h"):  # the next window may be short enough to keep its rows
            centre, d = self.frames.centres.get(name), self.dimensions(name)
            if centre is None or d is None or name in self.kept.rows or self._layout(name) != "dense":
                continue
            if uses_halves(centre) and self._forgets() and fits(self.since_reset[name]):
                self.kept.begin(name, d, centre.device, self.sums)
        self.since_reset = {"z": 0, "h": 0}

    def compute(self) -> Spectrum:
        """Compute the spectra of everything accumulated (waits for the device)."""
        return decompose(self.snapshot(), self.normalized)

    def snapshot(self, joint: bool = False) -> dict[str, Floats]:
        """What `decompose` needs, on the CPU (waits for the device); `joint` as for `copies`."""
        return self.copies(joint).arrays()

    def copies(self, joint: bool = False, spent: bool = False) -> Copies:
        """Copies of what `decompose` needs, perhaps later and in another thread; does not wait for the device.

        Arguments:
            joint: sum over the processes of a process group, all of which must call this; only the first one gets it.
            spent: `reset` follows, so sums may be overwritten; without it, large ones are copied first.
        """
        joint = joint and world() > 1
        self.flush()
        with self.aside.work(self._device(), self._held()):
            if joint or not all(uses_halves(self.frames.centres[name]) for name in self.kept.rows):
                self.sum_rows()
            self._sum_up()
            if joint:
                self.frames.share(self.sums, self.before)
            elif spent:
                self.frames.foresee(self.sums)
            values = whole(self.sums, self.before)
            values = joint_sums(values, self.frames) if joint else values
            flaws = joint_flaws(self.flaws) if joint and self.flaws is not None else self.flaws
            mine = not joint or rank() == 0
            if mine and self.flaws is not None:
                if not spent:
                    values = {name: v.clone() if name in moments.STREAMS else v for name, v in values.items()}
                with moments.plain_products(self.flaws.device):
                    values = condensed(values, self.frames, self.bases, self.normalized, self.kept.rows)
            values |= {name: v for name, v in (("flaws", flaws), ("sample", self._sample())) if v is not None}
            copies = Copies(values if mine else {})
            if self.half_life is not None or (joint and self.window is not None):  # such sums are not reset now
                self.frames.turn(self.sums, self.before, keep=True)
                self.frames.recentre(self.sums, self.before, keep=True)
            return copies

    def _device(self) -> torch.device | None:
        """Where the sums are; None if nothing has been seen."""
        return next((tensor.device for tensor in self._held() if tensor is not None), None)

    def _held(self) -> list[Tensor | None]:
        parts = (tensor for part in (self.sums, self.before, self.bases) for tensor in part.values())
        return [self.flaws, self.sample, *parts, *self.frames.tensors(), *self.kept.tensors()]

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load` to continue from."""
        self.flush()
        with self.aside.work(self._device(), self._held()):
            self._sum_up()
        self.aside.wait()
        flaws = {} if self.flaws is None else {"flaws": self.flaws, "seen": torch.tensor([self.seen])}
        frames = {"tracked": self.frames.bases, "centres": self.frames.centres, "units": self.frames.units}
        parts = {"before": self.before, "bases": self.bases} | frames
        prefixed = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
        return self.sums | prefixed | self.kept.state() | flaws

    def load(self, state: dict[str, Tensor], device: torch.device | None = None) -> None:
        """Continue from `state` on a device; None: the device of the next batch."""
        self.aside.wait()
        # copies, because the memory of a file may be aligned differently, and products then round differently
        placed = {name: value.to(device, copy=True) for name, value in moments.continued(state, self.exact).items()}
        self.waiting, self.flaws = {"z": [], "h": []}, placed.pop("flaws", None)
        self.frames = Frames()
        self.before, self.bases, self.frames.bases, self.frames.centres, self.frames.units, rows, counts = (
            {name.removeprefix(part): placed.pop(name) for name in list(placed) if name.startswith(part)}
            for part in ("before.", "bases.", "tracked.", "centres.", "units.", "rows.", "counts.")
        )
        self.kept.load({name: rows[name] for name in rows.keys() & moments.STREAMS.values()}, counts)
        for name, stream in moments.STREAMS.items():  # Σ x alone, of rows that another process has
            if name in placed and placed[name].shape[1] == moments.EXTRA and stream not in self.kept.rows:
                del placed[name]
        seen = placed.pop("seen", moments.count(placed["uu"]) if "uu" in placed else torch.tensor(0))  # older: none
        self.sums, self.seen = placed, int(seen)
        if not self._forgets():
            self.sum_rows()

    def pairs_wanted(self) -> int:
        """Number of pairs that a spectrum needs: four per dimension, but no more than 4096; fewer give mostly noise."""
        return min(FEWEST * (self.dimensions() or 0), ENOUGH)

    def dimensions(self, name: str = "z") -> int | None:
        """Size of the embeddings ("z") or representations ("h") seen so far."""
        if self.waiting[name]:
            return moments.size(name, self.waiting[name][0])
        stream = "uu" if name == "z" else "hh"
        sums = self.sums.get(stream, self.before.get(stream))
        return None if sums is None else moments.dimensions(sums)

    def _sample(self) -> Tensor | None:
        """Some pairs of the last batch, (2, pairs, d)."""
        if "z" in self.kept.rows:
            return self.kept.sample(SAMPLE, self.frames)
        return None if self.sample is None else torch.stack(self.sample.chunk(2, dim=1)).float()

    def _layout(self, name: str) -> str:
        return moments.layout(self.dimensions(name) or 0, self.exact)

    def _check(self, name: str, a: Tensor, b: Tensor) -> None:
        check_pair(name, a, b)
        known = self.dimensions(name)
        if known not in (None, a.shape[1]):
            raise InputError(f"{name}_a", f"must have {known} dimensions, as before", a.shape[1], "use a new monitor")

    def _add(self, name: str, x: Tensor, squares: Tensor, finite: Tensor, keep: float) -> None:
        """sums[name] ← keep · sums[name] + the sums of each finite batch x in turn, (batches, rows, d)."""
        stream, d = moments.STREAMS[name], x.shape[2]
        basis, unit = (part.get(stream) for part in (self.frames.bases, self.frames.units))
        if name not in self.sums:
            self.sums[name] = moments.empty(d, moments.layout(d, self.exact), x.device)
        weights = ages(x, keep) * finite
        moments.add(self.sums[name], x, squares, weights, keep ** len(x), basis, unit)

    def _forgets(self) -> bool:
        """Whether all rows are forgotten at once, so that they may be kept."""
        return self.window is None and self.half_life is None and world() == 1 and not self.recorded

    def sum_rows(self) -> None:
        """Sum the rows that have been kept."""
        device = self._device()
        if self.kept.rows and device is not None:
            with self.aside.work(device, self._held()), moments.plain_products(device):
                for name in list(self.kept.rows):
                    self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Sum the rows of z or h that have been kept, and keep them no longer."""
        self._sum_up()
        if name == "z":
            self.sample = torch.cat(list(self.kept.sample(SAMPLE, self.frames)), dim=1)
        self.flaws = self.kept.give_up(name, self.frames, self.sums, self.flaws)

    def _sum_up(self) -> None:
        """Bring the sums of rows that are kept up to date."""
        self.flaws = self.kept.sum_up(self.frames, self.sums, self.flaws)
