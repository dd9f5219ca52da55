"""Results of the race: one line of JSON per run, merged by key, so that the race can grow over days and machines."""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stairwise.checks import InputError
from stairwise.files import atomic

Result = dict[str, Any]


class Store:
    """A file of results. Lines may be appended by several processes; a line cut off by a kill is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def results(self) -> dict[str, Result]:
        """All results by key. Of two with one key a run that had the machine to itself wins, then the later one."""
        kept: dict[str, Result] = {}
        for result in read_lines(self.path):
            earlier = kept.get(result["key"])
            if earlier is None or not earlier.get("alone") or result.get("alone"):
                kept[result["key"]] = result
        return kept

    def add(self, result: Result) -> None:
        """Append one result at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 1))
            whole = stream.read(1) in (b"", b"\n")  # if not, a process was killed in the middle of a line
            stream.write((b"" if whole else b"\n") + json.dumps(result).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def merge(self, others: Iterable[Path]) -> int:
        """Take in the results of other files; returns the number of results now stored."""
        for other in others:
            if not other.is_file():
                raise InputError("--merge", "must name files of results", other)
            for result in read_lines(other):
                self.add(result)
        merged = self.results()
        with atomic(self.path) as part:
            part.write_text("".join(json.dumps(merged[key]) + "\n" for key in sorted(merged)))
        return len(merged)


def read_lines(path: Path) -> list[Result]:
    """The complete lines of a file; none if it does not exist."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(result, dict) and "key" in result:
            found.append(result)
    return found
