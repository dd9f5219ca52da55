"""Rows of z and h that are kept until the next record, and what is summed of them for it."""

import torch
from torch import Tensor

from stairwise.monitor import rows
from stairwise.monitor.digest import counted, direction_sums
from stairwise.monitor.frames import Frames, Sums
from stairwise.monitor.moments import empty, set_facts, sums_of
from stairwise.monitor.rows import Rows

DIRECTIONS = 512  # pairs whose cosines are computed


class Kept:
    """Rows by "z" and "h". While a stream has rows, its sums hold Σ x², Σ x and the number of rows only.

    Attributes:
        fresh: streams with rows that are not yet in the sums.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Rows] = {}
        self.fresh: set[str] = set()

    def has_room(self, name: str, number: int, sums: Sums) -> bool:
        """Whether all rows of a stream are kept so far, and so many more can be."""
        if name in self.rows:
            return self.rows[name].has_room(number)
        return fits(number) and not any(key in sums for key in sums_of(name))

    def begin(self, name: str, d: int, device: torch.device, sums: Sums) -> None:
        """Begin to keep rows."""
        self.rows[name] = Rows(d, device)
        sums |= {key: empty(d, "rows", device) for key in sums_of(name)}
        if name == "z":
            for key, size in (("directions", 2 * d + 2), ("pairs", 2)):
                sums[key] = torch.zeros(size, dtype=torch.float64, device=device)

    def append(self, name: str, batches: Tensor, frames: Frames, sums: Sums) -> None:
        """Keep batches, of z with both views next to each other."""
        x = batches.unflatten(2, (2, -1)).flatten(1, 2) if name == "z" else batches
        if name not in self.rows:
            self.begin(name, x.shape[2], x.device, sums)
        frames.prepare(name, batches)
        self.rows[name].append(x, frames.centres[name], frames.units[name])
        self.fresh.add(name)

    def sum_up(self, frames: Frames, sums: Sums, flaws: Tensor | None) -> Tensor | None:
        """Bring the sums up to date; returns how many batches were seen and skipped (`digest.counted`)."""
        for name in sorted(self.fresh):
            kept = self.rows[name]
            usable = kept.check() if kept.unchecked else None
            found = kept.sums_of_pairs() if name == "z" else (kept.sums(),)
            for key, known in zip(sums_of(name), found, strict=True):
                sums[key].copy_(known)
            if name == "z":
                sums["directions"].copy_(self._directions(frames))
                sums["pairs"][1].copy_(kept.count() / 2)
            if name == "z" and usable is not None:
                sums["pairs"][0] += usable.sum()
                flaws = counted(flaws, usable)
        self.fresh.clear()
        return flaws

    def _directions(self, frames: Frames) -> Tensor:
        """Sums over directions of some pairs, from all over the window."""
        pairs, count = self._embeddings(slice(None, None, -(-self.rows["z"].number // 2 // DIRECTIONS)), frames)
        found = direction_sums(*pairs.split(1, dim=1))
        return torch.where(count[:, None], found, 0.0).sum(dim=0, dtype=torch.float64)

    def sample(self, number: int, frames: Frames) -> Tensor:
        """So many of the last batch's pairs, (2, pairs, d); not finite if the batch does not count."""
        pairs, count = self._embeddings(slice(-min(number, self.rows["z"].last // 2), None), frames)
        return torch.where(count[:, None, None], pairs, torch.nan).transpose(0, 1).contiguous()

    def _embeddings(self, which: slice, frames: Frames) -> tuple[Tensor, Tensor]:
        """Some pairs, (pairs, 2, d), and whether they count."""
        pairs, count = self.rows["z"].some_pairs(which)
        return pairs.mul_(frames.units["z"]).add_(frames.centres["z"]), count

    def give_up(self, name: str, frames: Frames, sums: Sums, flaws: Tensor | None) -> Tensor | None:
        """Sum the rows of a stream, and keep them no longer; returns what `sum_up` does."""
        flaws = self.sum_up(frames, sums, flaws)
        kept, known = self.rows.pop(name), {key: sums[key] for key in sums_of(name)}
        sums |= {key: empty(len(facts), "dense", facts.device) for key, facts in known.items()}
        kept.add_moments([sums[key][: len(facts), : len(facts)] for key, facts in known.items()])
        for key, facts in known.items():
            set_facts(sums[key], facts)
        return flaws

    def forget(self) -> None:
        self.fresh.clear()
        for kept in self.rows.values():
            kept.forget()

    def tensors(self) -> list[Tensor]:
        return [tensor for kept in self.rows.values() for tensor in (kept.held, kept.counts)]

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load`, after `sum_up`."""
        return {f"{part}.{name}": x for name, kept in self.rows.items() for part, x in kept.state().items()}

    def load(self, rows: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
        """Continue from `state`."""
        self.rows = {name: Rows(values.shape[1], values.device) for name, values in rows.items()}
        self.fresh = {name for name, values in rows.items() if len(values)}
        for name, kept in self.rows.items():
            kept.load(rows[name], counts[name])


def fits(number: int) -> bool:
    """Whether so many rows can be kept."""
    return number <= rows.MOST
