"""Checkpoints: one safetensors file each, written atomically and verified when read; nothing is pickled.

The metadata hold the facts of a run, a digest of the tensors, and a seal: a digest of the facts, that digest included.
Files of format 1, which version 0.2 and earlier ones wrote, have no seal. Of their facts only the types are checked,
and that the step is the one in the name of the file.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stairwise.checks import InputError, RunWarning
from stairwise.files import atomic, regular, set_aside

FORMAT = 2  # version of the files
UNSEALED = 1  # the version whose facts have no digest
KEEP = 2  # number of checkpoints to keep
RESUMABLE = ("recipe", "t", "alpha", "seconds", "log_size", "images")  # facts without which no run can continue


class Damaged(InputError):
    """The file is not what was written."""

    def __init__(self, path: Path, reason: object) -> None:
        self.reason = " ".join(str(reason).split())[:300] or type(reason).__name__
        super().__init__(str(path), "must be a whole checkpoint of stairwise", self.reason, "use an older one")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after `facts["step"]` steps."""

    path: Path
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin with `prefix.`, by the rest of the name."""
        return {name.removeprefix(f"{prefix}."): t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}


def save(folder: Path, step: int, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write step-N.safetensors and remove all but the two newest; if the disk is full, the older ones stay.

    Files of later steps are damaged, since the run would have continued from them; they are renamed.
    """
    path = keep(folder, step, facts, tensors)
    for later in every(folder):
        if later.name > path.name:
            set_aside(later)
    killed = folder.glob(".step-*.safetensors")  # left by version 0.2 when it was killed while writing
    for old in (*every(folder)[KEEP:], *killed):
        old.unlink(missing_ok=True)
    return path


def keep(folder: Path, step: int, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write step-N.safetensors and keep all others."""
    host = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    about = {**facts, "format": FORMAT, "step": step, "digest": _digest(host)}
    about["seal"] = _seal(about)
    path = folder / f"step-{step:010d}.safetensors"
    if path.exists() and not path.is_file():
        set_aside(path)  # a folder of this name
    with atomic(path, durable=True) as part:
        try:
            save_file(host, part, metadata={"stairwise": json.dumps(about, allow_nan=False)})
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise OSError(28, f"could not be written ({error})", str(path)) from error
    return path


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint."""
    try:
        with safe_open(regular(path), framework="pt", device="cpu") as stored:
            facts = json.loads((stored.metadata() or {})["stairwise"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
        found = _digest(tensors)
    except FileNotFoundError:
        raise InputError("checkpoint", "must exist", path) from None
    except KeyError as error:
        raise Damaged(path, f"its metadata lack {error}") from error
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # safetensors, json and torch raise many kinds of errors for a damaged file
        raise Damaged(path, error) from error
    problem = _problem(facts, path)
    if problem:
        raise Damaged(path, problem)
    if facts["format"] > FORMAT:
        remedy = "use the version that wrote it"
        raise InputError(str(path), f"must have at most format {FORMAT}", facts["format"], remedy)
    if facts.get("digest") != found:
        raise Damaged(path, "its tensors do not match their digest")
    return Checkpoint(path, facts, tensors)


def identity(folder: Path) -> str:
    """The digest of the tensors of the newest checkpoint; empty if there is no checkpoint."""
    for path in every(folder)[:1]:
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                return str(json.loads((stored.metadata() or {})["stairwise"])["digest"])
        except (SafetensorError, KeyError, TypeError, ValueError, OSError):
            return "damaged"
    return ""


def newest(folder: Path, needed: Iterable[str] = ()) -> Checkpoint | None:
    """The newest whole checkpoint that has all needed facts; one warning names those that were passed over, and why."""
    problems, found = [], None
    for path in every(folder):
        try:
            found = load(path)
            lacking = [name for name in needed if name not in found.facts]
            if not lacking:
                break
            found = None
            problems.append(f"{path} is incomplete: its metadata lack {', '.join(lacking)}")
        except Damaged as error:
            problems.append(f"{path} is damaged: {error.reason}")
    if problems:
        end = f"falling back to {found.path.name}" if found else "no whole checkpoint is left"
        warnings.warn("; ".join((*problems, end)), RunWarning, stacklevel=2)
    return found


def every(folder: Path) -> list[Path]:
    """All checkpoint files of a folder, newest first; folders of such names are passed over."""
    named = [p for p in folder.glob("step-*.safetensors") if re.fullmatch(r"step-\d{10}\.safetensors", p.name)]
    return sorted((p for p in named if p.is_file()), reverse=True)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return digest.hexdigest()


def _seal(facts: dict[str, Any]) -> str:
    """A digest of all facts. It stays the same in later formats, so that they are told from damaged files."""
    sealed = {name: value for name, value in facts.items() if name != "seal"}
    return hashlib.blake2b(json.dumps(sealed, sort_keys=True).encode(), digest_size=16).hexdigest()


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # False for NaN


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda value: _count(value) and value > 0, "a whole number from 1"),
    "step": (_count, "a whole number"),
    "t": (_number, "a number"),
    "alpha": (_number, "a number"),
    "seconds": (_number, "a number"),
    "log_size": (_count, "a whole number"),
    "recipe": (lambda value: isinstance(value, dict), "a table"),
    "about": (lambda value: isinstance(value, dict), "a table"),
    "images": (lambda value: isinstance(value, list) and [type(v) for v in value] == [str, str], "two texts"),
    "continued": (lambda value: isinstance(value, list) and all(_counts(v) and len(v) == 2 for v in value), "pairs"),
    "view_shape": (lambda value: _counts(value) and len(value) == 3 and math.prod(value) > 0, "three whole numbers"),
}


def _problem(facts: Any, path: Path) -> str:
    """What is wrong with the metadata; empty if nothing is."""
    if not isinstance(facts, dict):
        return "its metadata are not a table"
    if "format" not in facts or "step" not in facts:
        return "its metadata lack format or step"
    for name, (good, rule) in CHECKS.items():
        if name in facts and not good(facts[name]):
            return f"{name} in its metadata is not {rule}: {facts[name]!r}"
    if facts["format"] == UNSEALED and "seal" in facts:
        return "its metadata have another format"
    if facts["format"] != UNSEALED and facts.get("seal") != _seal(facts):
        return "its metadata do not match their digest"
    named = re.fullmatch(r"step-(\d{10})\.safetensors", path.name)
    if named and int(named[1]) != facts["step"]:
        return f"it is named step {int(named[1])}, but holds step {facts['step']}"
    return ""
