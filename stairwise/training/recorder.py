"""Measurements during training: summed on the device at every step, decomposed and written in the background."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stairwise.distributed import rank, world
from stairwise.monitor.aside import Copies
from stairwise.monitor.commentary import Commentary, Floats
from stairwise.monitor.decompose import decompose_on_one_core
from stairwise.monitor.digest import joint_state, without_sums
from stairwise.monitor.loggers import destinations, send
from stairwise.monitor.spectrum import AT_ONCE, SpectrumMonitor
from stairwise.runs.record import Record
from stairwise.runs.writer import BackgroundWriter
from stairwise.training.objective import Embedded

SHELF_BYTES = 68e6  # memory of embeddings that wait to be summed
AXES = {"z": 2, "h": 1}  # along which both views lie on a shelf: z_a next to z_b, and h_b below h_a


class Shelf:
    """Embeddings of a few steps, in memory that a CUDA graph can write to; they are summed together later.

    It has two halves: one is filled while the other one is summed.

    Attributes:
        rows: batches by name, (2 places, …).
        place: the next free one, on the device; a graph advances it.
        half: the one that is filled, 0 or 1.
        filled: number of batches in it that the host knows of.
        earlier: batches of a checkpoint, until the first new one shows whether they have its size and precision.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows: dict[str, Tensor] = {}
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.half, self.filled = 0, 0
        self.earlier: dict[str, Tensor] = {}

    def put(self, **views: tuple[Tensor, Tensor]) -> None:
        """Keep both views of a batch."""
        if not self.rows:
            self._begin({name: torch.cat(pair, dim=AXES[name] - 1) for name, pair in views.items()})
        for name, pair in views.items():
            for part, x in zip(self.rows[name].chunk(2, dim=AXES[name]), pair, strict=True):
                part.index_copy_(0, self.place, x[None])
        self.place.add_(1)

    def _begin(self, batches: dict[str, Tensor]) -> None:
        """Make room for batches like these, and place those of a checkpoint there, if they are alike."""
        largest = max(1, *(x.nbytes for x in batches.values()))
        places = max(1, min(AT_ONCE, int(SHELF_BYTES / 2 // largest)))
        self.rows = {name: x.new_zeros(2 * places, *x.shape) for name, x in batches.items()}
        kinds = [
            {name: (rows.shape[1:], rows.dtype) for name, rows in held.items()} for held in (self.rows, self.earlier)
        ]
        if kinds[0] == kinds[1] and len(self.earlier["z"]) < places:
            self.filled = len(self.earlier["z"])
            self.place.fill_(self.filled)
            for name, rows in self.earlier.items():
                self.rows[name][: self.filled] = rows
            self.earlier = {}

    def full(self) -> bool:
        return self.filled >= len(self.rows["z"]) // 2

    def held(self) -> dict[str, Tensor]:
        """All batches that it holds."""
        if not self.filled:
            return {}
        first = self.half * (len(self.rows["z"]) // 2)
        return {name: rows[first : first + self.filled] for name, rows in self.rows.items()}

    def emptied(self) -> dict[str, Tensor]:
        """All batches that it holds, and go on with the other half."""
        held = self.held()
        self.half, self.filled = 1 - self.half, 0
        self.place.fill_(self.half * (len(self.rows["z"]) // 2))
        return held

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load` to continue from."""
        return {f"shelf.{name}": rows for name, rows in (self.held() or self.earlier).items()}

    def load(self, state: dict[str, Tensor]) -> None:
        self.earlier = {name: rows.to(self.place.device, copy=True) for name, rows in state.items()}


class Recorder:
    """Loss, gradient and spectra since the last record, and the first step that was not finite.

    Numbers stay on the device, so that `keep` and `observe` do not wait and can be part of a CUDA graph.
    """

    NAMES = ("loss", "steps", "gradient", "step", "bad_step")

    def __init__(
        self,
        device: torch.device,
        normalized: bool,
        hidden: bool,
        board: Any = None,
        followed: str = "covariance",
        planned: Floats | None = None,
    ) -> None:
        self.device, self.hidden, self.board = device, hidden, board
        self.loggers = destinations(board)[1]
        self.commentary = Commentary(self.loggers, followed, planned)
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.monitor = SpectrumMonitor(normalized=normalized)
        self.shelf = Shelf(device)
        self.summed: torch.cuda.Event | None = None  # when the last half of the shelf had been summed
        self.writer = BackgroundWriter()

    def keep(self, out: Embedded) -> None:
        """Keep the embeddings of a step on the shelf."""
        h = {"h": (out.h_a.detach(), out.h_b.detach())} if self.hidden else {}
        self.shelf.put(z=(out.z_a.detach(), out.z_b.detach()), **h)

    def observe(self, loss: Tensor, gradient: Tensor) -> None:
        """Sum the loss of a step, and note the norm of its gradient."""
        v = self.values
        v[0] += loss
        v[1] += 1
        v[2].copy_(gradient)
        v[3] += 1
        bad = ~(torch.isfinite(loss) & torch.isfinite(gradient)) & (v[4] == 0)
        v[4].copy_(torch.where(bad, v[3], v[4]))

    def observed(self) -> None:
        """A step has been measured: sum its embeddings, together with those of a few other steps."""
        self.shelf.filled += 1
        self._sum_earlier()
        if self.shelf.full():
            self._empty_shelf()

    def flush(self) -> None:
        """Sum all embeddings that have been measured."""
        self._sum_earlier()
        if self.shelf.filled:
            self._empty_shelf()

    def _empty_shelf(self) -> None:
        self.monitor.aside.wait(self.summed)  # the other half, which is filled next
        self.monitor.add_batches(**self.shelf.emptied())
        self.summed = self.monitor.aside.done

    def _sum_earlier(self) -> None:
        """Sum embeddings of a checkpoint that do not fit on the shelf."""
        earlier, self.shelf.earlier = self.shelf.earlier, {}
        if earlier:
            self.monitor.add_batches(**earlier)

    def numbers(self) -> dict[str, float]:
        """Mean loss since the last spectrum, norm of the last gradient, first bad step or 0; waits for the device."""
        numbers = dict(zip(self.NAMES, self.values.tolist(), strict=True))
        return numbers | {"loss": numbers["loss"] / max(1.0, numbers["steps"])}

    def write(self, record: Record, spectrum: bool) -> None:
        """Write a record; `spectrum` adds the spectra of all steps since the last one."""
        copies = None
        if spectrum:
            self.flush()
            copies = self.monitor.copies(joint=True, spent=True)
            self.monitor.reset()
            self.values[:2] = 0
        self.settle(wait=False)
        if rank() == 0:
            self.writer.submit(lambda: self._made(record, copies))

    def settle(self, wait: bool = True) -> None:
        """Raise errors of the background thread and send finished records to loggers; `wait`: wait for all records."""
        for record, error in self.writer.wait() if wait else self.writer.finished():
            if error is not None:
                raise error
            send(record, self.loggers, self.commentary.about(record))

    def _made(self, record: Record, copies: Copies | None) -> Record:
        """Add the spectra to a record, and judge it; runs in the background."""
        sums = copies.arrays() if copies is not None else {}
        if sums:
            record = replace(record, **vars(decompose_on_one_core(sums, self.monitor.normalized)))
        if self.loggers:
            self.commentary.hear(record)
        return record

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load` to continue from; of several processes all call this, and the first one gets them."""
        if world() > 1:
            self.flush()
            self.monitor.sum_rows()
            self.monitor.aside.wait()
            self.monitor.frames.share(self.monitor.sums, self.monitor.before)
        state = self.monitor.state()
        monitor = {f"monitor.{k}": v for k, v in (joint_state(state) if world() > 1 else state).items()}
        return {"numbers": self.values} | monitor | self.shelf.state()

    def load(self, numbers: Tensor, monitor: dict[str, Tensor], shelf: dict[str, Tensor]) -> None:
        """Continue from `state`; of several processes the first one takes what all had summed."""
        if rank() > 0:
            monitor, shelf = without_sums(monitor), {}
        self.values.copy_(numbers)
        self.monitor.load(monitor, self.device)
        self.shelf.load(shelf)

    def reset(self) -> None:
        """Forget what has been measured since the last record."""
        self.flush()
        self.monitor.reset()

    def close(self) -> None:
        with suppress(Exception):  # a failed run has its own error
            self.settle()
        self.writer.close()
        if self.board is not None:
            self.board.close()
