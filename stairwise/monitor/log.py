"""Measurements as JSON lines: appended while a run goes on, cut back to the checkpoint when it resumes."""

import json
import os
from pathlib import Path
from typing import Any

from stairwise.files import plain

__all__ = ["CLOCKS", "MetricsLog", "read_log"]

CLOCKS = ("seconds", "views_per_second")  # the only fields that differ between equal runs on a CPU


class MetricsLog:
    """One line a record; flushed at once, so that a killed run keeps what it measured."""

    def __init__(self, path: Path, size: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stream = path.open("ab")
        self.stream.truncate(min(size, self.stream.tell()))
        self.stream.seek(0, 2)
        self.size = self.stream.tell()  # bytes written

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        line = json.dumps(plain(_rounded(record)), allow_nan=False) + "\n"
        self.size += self.stream.write(line.encode())
        self.stream.flush()

    def sync(self) -> None:
        """Make sure of it, before something relies on what has been written."""
        os.fsync(self.stream.fileno())

    def close(self) -> None:
        """Done."""
        self.stream.close()


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Records, and the number of lines that could not be read (a run may be writing, or have been killed writing)."""
    records, bad = [], 0
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    for line in text.splitlines():
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
            records.append(record)
        except (ValueError, RecursionError):
            bad += 1
    return records, bad


def _rounded(value: Any) -> Any:
    """Seven significant digits are more than is measured."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return _rounded(value.tolist())
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
