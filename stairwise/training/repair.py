"""What is wrong in a run folder, and how it is repaired without losing anything.

Damaged files are renamed to NAME.damaged. Only temporary files of killed writers are deleted.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stairwise.checks import InputError, RunWarning
from stairwise.files import atomic, leftovers, save_json, set_aside, spare_name
from stairwise.runs.folder import CHECKPOINTS, KERNELS, METRICS, PICTURE, RECIPE, WEIGHTS, read_picture
from stairwise.runs.log import read_log
from stairwise.runs.record import Record
from stairwise.training import checkpoint
from stairwise.training.checkpoint import Checkpoint
from stairwise.training.description import from_checkpoint, problem_of, unreadable
from stairwise.training.process import locked

# temporary files of version 0.2, which named them so
LEFT_BY_0_2 = re.compile(r"\.(step-\d{10}|recipe|embeddings|figure|report|tangent|drift)-[a-z0-9_]{8}\.[a-z]+")


@dataclass(frozen=True, eq=False)
class Finding:
    """Something that is wrong. `mend` repairs it, or is None if nothing here can; `remedy` says what is done."""

    path: Path
    problem: str
    remedy: str
    mend: Callable[[], object] | None = None


def examine(folder: Path) -> list[Finding]:
    """All that is wrong in the folder of a run, of `stairwise train` or of a monitor. Changes nothing."""
    if not any((folder / name).exists() for name in (METRICS, RECIPE, CHECKPOINTS)):
        raise InputError("RUN", "must be the folder of a run", folder, f"it holds no {METRICS}, for example")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)  # the damaged ones are listed below
        newest = checkpoint.newest(folder / CHECKPOINTS, checkpoint.RESUMABLE)
    found = [*_checkpoints(folder / CHECKPOINTS), *_checkpoints(folder / WEIGHTS)]
    if newest is None and checkpoint.every(folder / CHECKPOINTS):
        remedy = "the same `stairwise train` command begins again and keeps the old log"
        found.append(Finding(folder / CHECKPOINTS, "no whole checkpoint is left", remedy))
    return [*_recipe(folder, newest), *_log(folder / METRICS, newest), *_picture(folder), *found, *_killed(folder)]


def repair(folder: Path) -> list[Finding]:
    """Repair a run folder that nobody trains in, and return what was wrong."""
    examine(folder)  # an error, if it is not the folder of a run
    with locked(folder):
        found = examine(folder)
        for finding in found:
            if finding.mend is not None:
                finding.mend()
    return found


def _recipe(folder: Path, newest: Checkpoint | None) -> Iterator[Finding]:
    path = folder / RECIPE
    if newest is not None:
        problem = problem_of(folder, newest)
        facts = from_checkpoint(newest)
        if problem and facts is None:
            yield Finding(path, problem, "the same `stairwise train` command rebuilds it")
        elif problem:
            yield Finding(path, problem, f"rebuild it from {newest.path.name}", partial(_rebuild, path, facts))
    elif path.exists():
        problem = unreadable(folder)
        if problem:
            yield Finding(path, problem, "train the run again: there is no whole checkpoint to rebuild it from")


def _rebuild(path: Path, facts: object) -> None:
    if os.path.lexists(path):
        set_aside(path)
    save_json(path, facts, durable=True)


def _log(path: Path, newest: Checkpoint | None) -> Iterator[Finding]:
    if not path.exists():
        if newest is not None and newest.facts["log_size"]:
            yield Finding(path, "it is missing", "training goes on without the earlier records")
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    bad, rest = read_log(path)[1], content[whole:]
    if _is_record(rest):
        yield Finding(path, "its last line has no end", "end it", partial(_end_line, path, len(content)))
        whole = len(content) + 1
    elif rest:
        bad -= 1
        yield Finding(path, "its last line breaks off", "move it", partial(_cut, path, whole, len(content)))
    if bad:
        # they stay, because checkpoints refer to the length of the log
        yield Finding(path, f"{bad} of its lines are not records", "readers skip them")
    if newest is not None and whole < newest.facts["log_size"]:
        lost = newest.facts["log_size"] - whole
        yield Finding(path, f"{lost} bytes are missing at its end", "training goes on without those records")


def _is_record(line: bytes) -> bool:
    try:
        Record.from_json(json.loads(line))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False
    return True


def _end_line(path: Path, size: int) -> None:
    _unchanged(path, size)
    with path.open("ab") as stream:
        stream.write(b"\n")


def _cut(path: Path, whole: int, size: int) -> None:
    """Move the rest of a line to a file of its own. The log is cut in place, for a monitor may have it open."""
    with atomic(spare_name(path), durable=True) as part:
        part.write_bytes(_unchanged(path, size)[whole:])
    os.truncate(path, whole)


def _unchanged(path: Path, size: int) -> bytes:
    content = path.read_bytes()
    if len(content) != size:
        raise InputError(str(path), "must not be written while it is repaired", None, "wait until the run has ended")
    return content


def _picture(folder: Path) -> Iterator[Finding]:
    path = folder / PICTURE
    if path.exists() and read_picture(folder) is None:
        yield Finding(path, "it is damaged", "rename it; the next record writes it anew", partial(set_aside, path))


def _checkpoints(folder: Path) -> Iterator[Finding]:
    whole = set(checkpoint.every(folder))
    for path in sorted(folder.glob("step-*.safetensors")):
        if path in whole:
            try:
                checkpoint.load(path)
            except checkpoint.Damaged as error:
                yield Finding(path, f"it is damaged: {error.reason}", "rename it", partial(set_aside, path))
            except InputError as error:
                yield Finding(path, str(error), "leave it as it is")
        elif re.fullmatch(r"step-\d{10}\.safetensors", path.name):
            yield Finding(path, "it is not a file", "rename it", partial(set_aside, path))


def _killed(folder: Path) -> Iterator[Finding]:
    for place in (folder, folder / CHECKPOINTS, folder / WEIGHTS, folder / KERNELS):
        old = [path for path in place.glob(".*") if path.is_file() and LEFT_BY_0_2.fullmatch(path.name)]
        for path in (*leftovers(place), *old):
            yield Finding(
                path, "a killed process left it unfinished", "delete it", partial(path.unlink, missing_ok=True)
            )
