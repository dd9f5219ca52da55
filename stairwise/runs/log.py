"""metrics.jsonl: one line per record, appended during a run, and truncated to the checkpoint when it resumes."""

import json
import os
import warnings
from pathlib import Path

from stairwise.checks import RunWarning
from stairwise.files import destination, plain, regular
from stairwise.runs.record import Record


class MetricsLog:
    """Appends records and flushes each, so that a killed run loses none."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        self._open(size)

    def _open(self, size: int) -> None:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stream = destination(path).open("a+b")
        self.stream.truncate(min(size, self.stream.seek(0, os.SEEK_END)))
        if self.stream.seek(0, os.SEEK_END) and not self._ends_a_line():
            self.stream.write(b"\n")  # what is left of a line must not spoil the next one
        self.stream.flush()
        self.size = self.stream.seek(0, os.SEEK_END)  # bytes written

    def _ends_a_line(self) -> bool:
        self.stream.seek(-1, os.SEEK_END)
        return self.stream.read(1) == b"\n"

    def write(self, record: Record) -> None:
        line = json.dumps(plain(record.as_json()), allow_nan=False) + "\n"
        if not self.path.exists():
            self.stream.close()
            self._open(0)
            warnings.warn(f"{self.path} was removed: it begins again with step {record.step}", RunWarning, stacklevel=2)
        self.size += self.stream.write(line.encode())
        self.stream.flush()

    def sync(self) -> None:
        """Flush the file to disk, before a checkpoint refers to it."""
        os.fsync(self.stream.fileno())

    def close(self) -> None:
        self.stream.close()


def read_log(path: Path) -> tuple[list[Record], int]:
    """Records, and the number of damaged lines (left by a run that is writing or was killed)."""
    records, bad = [], 0
    try:
        text = regular(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    for line in text.splitlines():
        try:
            records.append(Record.from_json(json.loads(line)))
        except (ValueError, TypeError, OverflowError, RecursionError):
            bad += 1
    return records, bad
