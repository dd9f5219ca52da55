"""Records of a watched run: counts updates, makes a record every few of them, and writes it in the background."""

import math
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stairwise.checks import InputError
from stairwise.distributed import rank, total, world
from stairwise.monitor.aside import Copies
from stairwise.monitor.attachable import Teller
from stairwise.monitor.commentary import Commentary
from stairwise.monitor.decompose import decompose_on_one_core, pairs_in
from stairwise.monitor.loggers import destinations, send
from stairwise.monitor.rollcall import RollCall
from stairwise.runs.folder import METRICS, RunFolder
from stairwise.runs.record import Record
from stairwise.runs.writer import BackgroundWriter

if TYPE_CHECKING:
    from stairwise.monitor.spectrum import SpectrumMonitor

LATEST = 60.0  # seconds that processes wait for one another at a record
WAITING = 4  # number of records that may be queued; while the queue is full, no record is made


class Recorder:
    """Makes records from the sums of a monitor. `tell` receives warnings; `rollcall` knows the other processes."""

    def __init__(
        self,
        monitor: "SpectrumMonitor",
        log: Any,
        every: int,
        rollcall: RollCall,
        tell: Teller,
        updates: int | None = None,
    ) -> None:
        self.monitor, self.every, self.rollcall, self.tell = monitor, every, rollcall, tell
        self.updates = updates  # of the whole run, if known
        self.records: list[Record] = []
        self.step, self.t, self.seconds = 0, 0.0, 0.0
        self.began = time.perf_counter()
        folder, self.loggers = destinations(log) if rank() == 0 else (None, [])
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError("log", "must be a folder that can be made", error, "give another name") from error
        self.commentary = Commentary(self.loggers)
        self.writer = BackgroundWriter(RunFolder(folder) if folder is not None else None)
        self.first_process = rank() == 0
        self.together: bool | None = None  # whether all processes record; None until the first record
        self.skipped = 0  # batches left out that have been told of
        self.fresh, self.began_recording = False, False  # whether there were pairs since the last record, and ever
        self.loss: Tensor | None = None  # sum and number of the finite ones since the last record, (2,)
        self.losses = 0
        self.lost, self.lost_at = 0, deque[int]()  # losses that were not finite: so far, and at records being made
        self.told_of_losses = False
        self.last_t = -math.inf  # of the last record
        self.log_size: int | None = None  # before the last record, so that a checkpoint goes on without that one

    def add_loss(self, loss: Tensor | float | None, device: torch.device | None = None) -> None:
        """Add the loss of a batch, without waiting; numbers are put on `device`."""
        if loss is None:
            return
        if isinstance(loss, bool) or not isinstance(loss, Tensor | int | float):
            raise InputError("loss", "must be a number or a tensor", type(loss).__name__, "write loss=loss.detach()")
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device=device)
        if value.numel() != 1:
            shape = f"shape {tuple(value.shape)}"
            raise InputError("loss", "must be a single number", shape, "take the mean over the batch")
        if self.loss is None:
            self.loss = value.new_zeros(2, dtype=torch.float64)
        value = value.reshape(()).to(torch.float64)
        counted = torch.stack([torch.nan_to_num(value, 0.0, 0.0, 0.0), value.isfinite().to(torch.float64)])
        self.loss = self.loss.to(value.device) + counted
        self.losses += 1

    def count(self, lr: float) -> None:
        """Count an update, and record if it is time."""
        self.t += lr
        self.step += 1
        if self.step % self.every == 0 and self._enough():
            self._record()
        self.settle()

    def took(self) -> None:
        """A batch of pairs was added to the monitor."""
        self.fresh, self.began_recording = True, True

    def _enough(self) -> bool:
        """Whether to record now: enough pairs (fewer give mostly noise), and room in the queue."""
        if world() > 1:  # all processes must decide alike, otherwise their collectives do not match
            return self.began_recording
        if not self.fresh or len(self.writer) >= WAITING:
            return False
        return not self._resets() or self.monitor.seen >= self.monitor.pairs_wanted()

    def _resets(self) -> bool:
        return self.monitor.window is None and self.monitor.half_life is None

    def _joint(self) -> bool:
        """Whether records are made of the sums of all processes."""
        if world() > 1 and self.together is None:
            self.together = self.rollcall.complete()
            if not self.together:
                self.tell(
                    "not all processes have attached a monitor, so only the embeddings of this one are recorded: "
                    "attach in every process; only the first one writes",
                    every_process=True,
                )
        return self.together is not False

    def _gathered(self) -> bool:
        """Whether all processes have come to this record; if not, each records for itself from now on."""
        if world() > 1 and self._joint() and not self.rollcall.complete(f"record {self.step}", LATEST):
            self.together = False
            self.tell(
                f"not all processes came to the record of step {self.step} within {LATEST:.0f} s, so from now on only "
                "the embeddings of this one are recorded: all processes must make equally many updates",
                every_process=True,
            )
        return self._joint()

    def _record(self, joint: bool | None = None) -> None:
        joint = self._gathered() if joint is None else joint
        loss, wanted = self._mean_loss(joint), self.monitor.pairs_wanted()  # all collectives come before what may fail
        record = Record(
            step=self.step, t=self.t, seconds=self.elapsed(), loss=loss, wanted=wanted, planned_updates=self.updates
        )
        if self.t == self.last_t:
            self.tell("the learning rate is 0, so t = Σ lr stands still: pages and advice leave out records of equal t")
        self.fresh, self.last_t = False, self.t
        resets = self._resets() and self.log_size is None
        try:
            copies = self.monitor.copies(joint=joint, spent=resets)
        finally:
            if resets:
                self.monitor.reset()
        if self.first_process and len(self.writer) < WAITING:
            self.lost_at.append(self.lost)
            self.writer.submit(partial(self._made, record, copies))

    def _mean_loss(self, joint: bool) -> float | None:
        """Mean over all processes since the last record, of what is finite; None if nothing is or no loss was seen."""
        if self.loss is None:
            return None
        sums = torch.cat([self.loss, self.loss.new_tensor([self.losses])])
        value, finite, number = (total(sums) if joint else sums).tolist()
        if self.log_size is None:
            self.loss, self.losses = torch.zeros_like(self.loss), 0  # not None: all processes must sum alike
        self.lost += round(number - finite)
        return value / finite if finite and math.isfinite(value) else None

    def _made(self, record: Record, copies: Copies) -> Record:
        """Complete a record; runs in the background, and must not stop the training."""
        record = self._measured(record, copies)
        try:
            self.commentary.hear(record)
        except Exception as error:
            record.extra["failed"] = f"nothing is said about it: {error}"
        return record

    def _measured(self, record: Record, copies: Copies) -> Record:
        sums: dict[str, Any] = {}
        try:
            sums = copies.arrays()
            if pairs_in(sums) < 2:
                raise InputError("the embeddings", "must be finite in at least two pairs")
            full = replace(record, **vars(decompose_on_one_core(sums, self.monitor.normalized)))
            if full.spectrum("covariance") is None:
                raise InputError("the embeddings", "must be small enough for their squares to be summed")
            few = record.wanted is not None and full.samples is not None and full.samples < record.wanted
            return full if few else replace(full, wanted=None)
        except Exception as error:
            _, skipped, first = map(int, sums.get("flaws", (0, 0, 0)))
            extra = {"failed": str(error)}
            return replace(record, wanted=None, skipped=skipped, first_skipped=first, extra=extra)

    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.began

    def settle(self, wait: bool = False) -> None:
        """Collect finished records, in order; errors of the background become warnings."""
        for record, error in self.writer.wait() if wait else self.writer.finished():
            self._append(replace(record, leading=None))
            if isinstance(error, Warning):
                self.tell(str(error))
            elif error is not None:
                self.tell(f"records are not written: {error}")

    def _append(self, record: Record) -> None:
        before, lost = self.records[-1].skipped if self.records else 0, self.lost_at.popleft()
        self.records.append(record)
        try:
            send(record, self.loggers, self.commentary.about(record))
        except Warning as warning:  # warnings are errors here
            self.tell(str(warning))
        if record.skipped > max(self.skipped, 2 * self.skipped - 1):  # a diverged run would say it at every record
            more, self.skipped = record.skipped - self.skipped, record.skipped
            batches = f"{more} batch{'es' * (more > 1)} up to step {record.step} {'are' if more > 1 else 'is'}"
            self.tell(
                f"embeddings were not finite, or grew too much since the last record: {batches} left out; "
                f"the first such batch of the run was number {record.first_skipped}; earlier records are kept"
            )
        elif "failed" in record.extra and record.skipped == before:
            self.tell(f"no spectrum at step {record.step}: {record.extra['failed']}")
        if lost > record.skipped and not self.told_of_losses:
            self.told_of_losses = True
            self.tell(
                f"the loss was not finite in {lost} batch{'es' * (lost > 1)} up to step {record.step}, though "
                "embeddings were: they are left out of its mean, and the advice does not take them into account"
            )

    def close(self, joint: bool = True) -> None:
        """Write what has been collected since the last record, and finish writing.

        joint: processes may wait for each other, a few seconds at most.
        """
        self.settle(wait=True)
        self.log_size = self._size()
        if self.fresh and (world() > 1 or self.monitor.seen > 1 or not self._resets()):
            self._record(joint and self._joint() and self.rollcall.complete(f"closed at {self.step}"))
        self.settle(wait=True)
        self.writer.close()

    def _size(self) -> int:
        return self.writer.folder.size if self.writer.folder is not None else 0

    def state(self) -> dict[str, Any]:
        """Numbers and tensors for a checkpoint. After `close` they are those before the last record."""
        self.settle(wait=True)
        numbers: dict[str, Any] = {
            "step": self.step,
            "t": self.t,
            "seconds": self.elapsed(),
            "skipped": self.skipped,
            "log_size": self._size() if self.log_size is None else self.log_size,
        }
        if self.loss is not None:
            numbers["loss"] = [*self.loss.tolist(), self.losses]
        return numbers | {f"monitor.{name}": value.clone() for name, value in self.monitor.state().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`; lines of metrics.jsonl written after it are removed."""
        if not isinstance(state, dict) or not {"step", "t", "seconds", "skipped", "log_size"} <= state.keys():
            got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise InputError("state", "must be what watch.state() returned", got)
        self.step, self.t, self.seconds = int(state["step"]), float(state["t"]), float(state["seconds"])
        self.skipped, self.began = int(state["skipped"]), time.perf_counter()
        tensors = {k.removeprefix("monitor."): v for k, v in state.items() if k.startswith("monitor.")}
        self.monitor.load(tensors)
        self.fresh = self.monitor.seen > 0
        *sums, self.losses = state.get("loss", [0])
        if len(sums) == 1:  # of an older version, whose sum was not finite if a loss was not
            sums = [sums[0], self.losses] if math.isfinite(sums[0]) else [0.0, 0]
        self.loss = torch.tensor(sums, dtype=torch.float64) if sums else None
        if self.writer.folder is not None:
            self.writer.folder = RunFolder(self.writer.folder.folder, int(state["log_size"]))
            self.commentary.recall(self.writer.folder.folder / METRICS)
