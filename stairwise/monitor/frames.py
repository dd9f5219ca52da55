"""What sums in float32 refer to: a centre that was subtracted, and for tracked sums a basis, of z and of h.

Both follow the embeddings from one window to the next. Of several processes, all take those of the first one, and
change them alike, so that their sums can be added.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from stairwise.monitor.bases import moved, turned
from stairwise.monitor.moments import STREAMS, facts, plain_products, shift, size

Sums = dict[str, Tensor]


class Frames:
    """Centres and tracked bases, by "z" and "h"; changed in place, because a captured graph refers to them."""

    def __init__(self) -> None:
        self.centres: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}
        self.next_centres: dict[str, Tensor] = {}  # on which processes have agreed
        self.next_bases: dict[str, Tensor] = {}
        self.shared: set[str] = set()  # those that are the same in all processes

    def centre(self, name: str, rows: Tensor, finite: Tensor) -> Tensor:
        """The centre of z or h, (d,); it begins as the mean of batches, (batches, rows, d or 2d)."""
        if name not in self.centres:
            views = rows.sum(dim=(0, 1), dtype=torch.float32).unflatten(0, (-1, size(name, rows[0])))
            number = finite.sum() * rows.shape[1] * len(views)
            self.centres[name] = views.sum(dim=0) / number.clamp(min=1)
        self.centres[name] = self.centres[name].to(rows.device)
        return self.centres[name]

    def adapted(self, name: str, sums: Tensor, to: "Frames") -> Tensor:
        """Sums in this frame, expressed in another one."""
        stream = STREAMS[name]
        basis, new = self.bases.get(stream), to.bases.get(stream)
        sums = sums.clone()
        self._shift(name, sums, to.centres[stream])
        return sums if basis is None or new is None else moved(sums, basis, new.to(sums.device))

    def _shift(self, name: str, sums: Tensor, to: Tensor) -> None:
        """Express sums relative to another centre, in place."""
        stream = STREAMS[name]
        by, basis = (self.centres[stream] - to.to(self.centres[stream].device)).to(sums.device), self.bases.get(stream)
        if name != "vv":  # the centre falls out of differences
            shift(sums, 2 * by if name == "uu" else by, None if basis is None else basis.to(sums.device))

    def adopt(self, stream: str, other: "Frames") -> None:
        """Take the centre and the basis of another frame."""
        for mine, theirs in ((self.centres, other.centres), (self.bases, other.bases)):
            mine |= {name: tensor.clone() for name, tensor in theirs.items() if name == stream}

    def share(self, *held: Sums) -> None:
        """Take the frame of the first process, in which all sums are then expressed."""
        for stream in sorted(self.centres.keys() - self.shared):
            first = Frames()
            first.adopt(stream, self)
            for tensor in (*first.centres.values(), *first.bases.values()):
                dist.broadcast(tensor, 0)
            for sums in held:
                for name in sums_of(stream, sums):
                    sums[name].copy_(self.adapted(name, sums[name], first))
            for mine, theirs in ((self.centres, first.centres), (self.bases, first.bases)):
                for name, tensor in theirs.items():
                    mine[name].copy_(tensor)
            self.shared.add(stream)

    def agree(self, joint: Sums) -> None:
        """Let all processes choose the next frame, from the joint sums, which only the first one may have."""
        for stream, centre in sorted(self.centres.items()):
            name = sums_of(stream, joint)[0]
            self.next_centres[stream] = centre + _mean(name, joint[name], len(centre))
            dist.broadcast(self.next_centres[stream], 0)
            if stream in self.bases:  # their sums are known to all
                self.next_bases[stream] = turned(self.bases[stream], joint[name])

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
        """Let centres follow what was summed; `keep`: express all sums relative to the new centres."""
        for stream, centre in self.centres.items():
            names, to = sums_of(stream, sums), self.next_centres.pop(stream, None)
            if to is None and names and stream not in self.shared:
                to = centre + _mean(names[0], sums[names[0]], len(centre))
            if to is None:
                continue
            to = torch.where(torch.isfinite(to).all(), to, centre)
            with plain_products(centre.device):
                for held in (sums, *more) if keep else ():
                    for name in sums_of(stream, held):
                        self._shift(name, held[name], to)
            centre.copy_(to)


def sums_of(stream: str, sums: Sums) -> list[str]:
    """Names of the sums of z or h; the first one is that of u or h."""
    return [name for name in STREAMS if name in sums and STREAMS[name] == stream]


def _mean(name: str, sums: Tensor, d: int) -> Tensor:
    """Mean of z or h relative to its centre, from the sums of u or h."""
    _, total, number = facts(sums, d)
    return total / number.clamp(min=1) / (2 if name == "uu" else 1)
