"""What sums in float32 refer to, for z and for h: a centre that was subtracted; a basis, if they are tracked; a unit,
if they are dense sums on a GPU, whose factors are in half precision.

All follow the embeddings from one window to the next. Of several processes, all take those of the first one, and
change them alike, so that their sums can be added.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from stairwise.monitor import moments
from stairwise.monitor.bases import first_basis, moved, turned
from stairwise.monitor.moments import STREAMS, facts, layout, plain_products, precision, rescale, shift, size
from stairwise.monitor.products import LARGEST, TYPICAL, power_of_two, uses_halves

Sums = dict[str, Tensor]
SOME = 8  # rows of a batch by which its length is estimated


class Frames:
    """Centres, tracked bases and units, by "z" and "h"; changed in place, because a captured graph refers to them."""

    def __init__(self) -> None:
        self.centres: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}
        self.units: dict[str, Tensor] = {}  # powers of two, (); the size of what is summed is about TYPICAL units
        self.latest: dict[str, Tensor] = {}  # length of the last finite batch
        self.next_centres: dict[str, Tensor] = {}  # known before the window ends
        self.next_units: dict[str, Tensor] = {}
        self.next_bases: dict[str, Tensor] = {}
        self.shared: set[str] = set()  # those that are the same in all processes

    def streams(self, name: str, batches: Tensor, kind: str) -> Sums:
        """What is summed of batches, in the layout `kind`: u and v, or h, (batches, rows, d) each.

        In float32 a large mean would hide the variance, so the centre is subtracted.
        """
        rows = batches.to(precision(kind))
        centre = 0.0 if kind == "all" else self.centre(name, rows)
        if name == "h":
            return {"hh": rows - centre}
        a, b = rows.chunk(2, dim=2)
        return {"uu": (a + b).sub_(2 * centre), "vv": a - b}

    def begin(self, name: str, streams: Sums) -> None:
        """Find the first tracked basis in what is summed."""
        if name not in self.bases:
            self.bases[name] = first_basis(torch.cat([x.flatten(0, 1) for x in streams.values()]))

    def centre(self, name: str, rows: Tensor) -> Tensor:
        """The centre of z or h, (d,); it begins as the mean of batches, (batches, rows, d or 2d)."""
        if name not in self.centres:
            rows = rows.float()
            finite = torch.isfinite(torch.linalg.vector_norm(rows, dim=(1, 2)).square())  # squares, too
            total = torch.where(finite[:, None], rows.sum(dim=1), 0.0).sum(dim=0)
            views = total.unflatten(0, (-1, size(name, rows[0])))
            self.centres[name] = views.sum(dim=0) / (finite.sum() * rows.shape[1] * len(views)).clamp(min=1)
        return self.centres[name]

    def usable(self, name: str, squares: Sums, numbers: int) -> Tensor:
        """Whether each batch can be summed: it is finite, and at most LARGEST units long, (batches,).

        The unit begins with the first batches.

        Arguments:
            squares: Σ x² of what is summed, (batches, d) each.
            numbers: how many numbers x has per batch.
        """
        lengths = torch.stack([value.sum(dim=1) for value in squares.values()]).sqrt()
        finite = torch.isfinite(lengths).all(dim=0)
        d = next(iter(squares.values())).shape[1]
        if not uses_halves(lengths) or name in self.bases or layout(d) == "tracked":
            return finite
        lengths = torch.where(finite, lengths, 0.0).amax(dim=0)
        if name not in self.units:
            size = (lengths.square().sum() / (finite.sum() * numbers).clamp(min=1)).sqrt()
            self.units[name] = torch.where(size > 0, power_of_two(size) / TYPICAL, 1.0)
        if name not in self.latest:
            self.latest[name] = torch.zeros_like(lengths[0])
        last = (finite * torch.arange(1, len(finite) + 1, device=finite.device)).argmax()
        latest = lengths.index_select(0, last[None])[0]  # lengths[last] would wait for the device
        self.latest[name].copy_(torch.where(finite.any(), latest, self.latest[name]))
        return finite & (lengths <= LARGEST * self.units[name])

    def prepare(self, name: str, batches: Tensor) -> None:
        """Begin the centre and the unit with the first batches, and note the length of the last one.

        This is for rows that are kept, which do not go through `usable`.
        """
        if name not in self.units:
            streams = self.streams(name, batches, "dense")
            squares = {key: torch.linalg.vector_norm(x, dim=1).square_() for key, x in streams.items()}
            self.usable(name, squares, next(iter(streams.values()))[0].numel())
        some, centre = batches[-1][:SOME], self.centres[name]  # enough to know the length roughly
        length = torch.linalg.vector_norm(some.unflatten(1, (-1, len(centre))) - centre)
        length *= (batches.shape[1] / len(some)) ** 0.5
        latest = self.latest.setdefault(name, torch.zeros_like(length))
        latest.copy_(torch.where(length < torch.inf, length, latest))

    def adapted(self, name: str, sums: Tensor, to: "Frames") -> Tensor:
        """Sums in this frame, expressed in another one."""
        stream = STREAMS[name]
        basis, new = self.bases.get(stream), to.bases.get(stream)
        sums = sums.clone()
        self._shift(name, sums, to.centres[stream])
        self._rescale(name, sums, to.units.get(stream))
        return sums if basis is None or new is None else moved(sums, basis, new.to(sums.device))

    def _shift(self, name: str, sums: Tensor, to: Tensor) -> None:
        """Express sums relative to another centre, in place."""
        stream = STREAMS[name]
        by, basis = (self.centres[stream] - to.to(self.centres[stream].device)).to(sums.device), self.bases.get(stream)
        by = by / self.units[stream].to(by.device) if stream in self.units else by
        if name != "vv":  # the centre falls out of differences
            shift(sums, 2 * by if name == "uu" else by, None if basis is None else basis.to(sums.device))

    def _rescale(self, name: str, sums: Tensor, to: Tensor | None) -> None:
        """Express sums in another unit, in place; without one it is 1."""
        unit = self.units.get(STREAMS[name])
        if unit is not None or to is not None:
            old, new = (sums.new_ones(()) if x is None else x.to(sums.device) for x in (unit, to))
            rescale(sums, old / new)

    def adopt(self, stream: str, other: "Frames") -> None:
        """Take the centre, basis and unit of another frame."""
        for mine, theirs in zip(self.parts(), other.parts(), strict=True):
            mine |= {name: tensor.clone() for name, tensor in theirs.items() if name == stream}

    def parts(self) -> tuple[dict[str, Tensor], ...]:
        return self.centres, self.bases, self.units

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are held."""
        for part in (*self.parts(), self.latest, self.next_centres, self.next_units, self.next_bases):
            yield from part.values()

    def arrive(self, name: str, device: torch.device, *held: Sums) -> None:
        """Bring sums and frames of a checkpoint to the device of new batches; dense sums of a CPU get a unit."""
        for part in (*held, *self.parts(), self.latest):
            part |= {key: tensor.to(device) for key, tensor in part.items()}
        centre = self.centres.get(name)
        if centre is None or not uses_halves(centre) or name in self.bases or name in self.units:
            return
        if any(sums_of(name, sums) for sums in held):
            self.units[name] = torch.ones_like(centre[0])
            mine = [{key: sums[key] for key in sums_of(name, sums)} for sums in held]
            self.recentre(*mine, keep=True)

    def share(self, *held: Sums) -> None:
        """Take the frame of the first process, in which all sums are then expressed."""
        for stream in sorted(self.centres.keys() - self.shared):
            first = Frames()
            first.adopt(stream, self)
            for part in first.parts():
                for tensor in part.values():
                    dist.broadcast(tensor, 0)
            for sums in held:
                for name in sums_of(stream, sums):
                    sums[name].copy_(self.adapted(name, sums[name], first))
            for mine, theirs in zip(self.parts(), first.parts(), strict=True):
                for name, tensor in theirs.items():
                    mine[name].copy_(tensor)
            self.shared.add(stream)

    def agree(self, joint: Sums) -> None:
        """Let all processes choose the next frame, from the joint sums, which only the first one may have."""
        for stream in sorted(self.centres):
            name = sums_of(stream, joint)[0]
            if stream in self.units:
                latest = self.latest.setdefault(stream, torch.zeros_like(self.units[stream]))
                dist.all_reduce(latest, dist.ReduceOp.MAX)
            self.next_centres[stream], unit = self._following(name, joint[name])
            dist.broadcast(self.next_centres[stream], 0)
            if unit is not None:
                dist.broadcast(unit, 0)
                self.next_units[stream] = unit
            if stream in self.bases:  # their sums are known to all
                self.next_bases[stream] = turned(self.bases[stream], joint[name])

    def foresee(self, sums: Sums) -> None:
        """Choose the next centre and unit now, because the sums are about to be overwritten."""
        for stream in self.centres.keys() - self.shared:
            for name in sums_of(stream, sums)[:1]:
                self.next_centres[stream], unit = self._following(name, sums[name])
                self.next_units |= {} if unit is None else {stream: unit}

    def turn(self, sums: Sums, *more: Sums, keep: bool = False) -> None:
        """Let bases follow what was summed; `keep`: express all sums in the new bases.

        Bases that processes share turn only as they have agreed.
        """
        for stream, basis in self.bases.items():
            names, to = sums_of(stream, sums), self.next_bases.pop(stream, None)
            with plain_products(basis.device):
                if to is None and names and stream not in self.shared:
                    to = turned(basis, sums[names[0]])
                if to is None:
                    continue
                for held in (sums, *more) if keep else ():
                    for name in sums_of(stream, held):
                        held[name].copy_(moved(held[name], basis, to))
                basis.copy_(to)

    def recentre(self, sums: Sums, *more: Sums, keep: bool = False) -> None:
        """Let centres and units follow what was summed; `keep`: express all sums relative to the new ones."""
        for stream, centre in self.centres.items():
            names, to = sums_of(stream, sums), self.next_centres.pop(stream, None)
            unit = self.next_units.pop(stream, None)
            if to is None and names and stream not in self.shared:
                to, unit = self._following(names[0], sums[names[0]])
            if to is None:  # processes have not agreed on one
                continue
            to = torch.where(torch.isfinite(to).all(), to, centre)
            with plain_products(centre.device):
                for held in (sums, *more) if keep else ():
                    for name in sums_of(stream, held):
                        self._shift(name, held[name], to)
                        self._rescale(name, held[name], unit)
            centre.copy_(to)
            if unit is not None:
                self.units[stream].copy_(unit)

    def _following(self, name: str, sums: Tensor) -> tuple[Tensor, Tensor | None]:
        """The centre and the unit that sums of u or h suggest; as they were, if there are none."""
        stream = STREAMS[name]
        centre, unit = self.centres[stream], self.units.get(stream)
        squares, total, number = facts(sums, len(centre))
        n, scale = number.clamp(min=1), 2 if name == "uu" else 1
        mean = total / n
        if unit is None:
            return centre + mean / scale, None
        size = (squares / n - mean.square()).clamp(min=0).mean().sqrt()
        following = torch.where((size > 0) & torch.isfinite(size), unit * power_of_two(size) / TYPICAL, unit)
        latest = self.latest.get(stream, torch.zeros_like(unit)).to(unit.device)
        left_out = latest > LARGEST * unit  # a usual batch has a length of a few units
        return centre + unit * mean / scale, torch.where(left_out, power_of_two(latest), following)


def sums_of(stream: str, sums: Sums) -> list[str]:
    """Names of those sums that are of z or h."""
    return [name for name in moments.sums_of(stream) if name in sums]
