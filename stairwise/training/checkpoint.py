"""Checkpoints: one safetensors file each, written atomically and verified when read; nothing is pickled."""

import hashlib
import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stairwise.checks import InputError, RunWarning
from stairwise.files import atomic

FORMAT = 1  # version of the files
KEEP = 2  # number of checkpoints to keep


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
    """Write step-N.safetensors and remove all but the two newest; if the disk is full, the older ones stay."""
    path = keep(folder, step, facts, tensors)
    leftovers = folder.glob(".step-*.safetensors")  # left by processes that were killed while writing
    for old in (*every(folder)[KEEP:], *leftovers):
        old.unlink(missing_ok=True)
    return path


def keep(folder: Path, step: int, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write step-N.safetensors and keep all others."""
    host = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    about = {"format": FORMAT, **facts, "step": step, "digest": _digest(host)}
    path = folder / f"step-{step:010d}.safetensors"
    with atomic(path) as part:
        try:
            save_file(host, part, metadata={"stairwise": json.dumps(about, allow_nan=False)})
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise OSError(28, f"could not be written ({error})", str(path)) from error
        with part.open("rb") as stream:
            os.fsync(stream.fileno())  # after a power failure there must not be a name without content
    return path


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint."""
    try:
        with safe_open(path, framework="pt", device="cpu") as stored:
            facts = json.loads((stored.metadata() or {})["stairwise"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise InputError("checkpoint", "must exist", path) from None
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise InputError(str(path), "must be a complete checkpoint of stairwise", error, "use an older one") from error
    if facts.get("format") != FORMAT:
        raise InputError(str(path), f"must have format {FORMAT}", facts.get("format"), "use the version that wrote it")
    if facts.get("digest") != _digest(tensors):
        raise InputError(str(path), "must be undamaged", "its contents do not match their digest", "use an older one")
    return Checkpoint(path, facts, tensors)


def identity(folder: Path) -> str:
    """The digest stored in the newest checkpoint; empty if there is no checkpoint."""
    for path in every(folder)[:1]:
        try:
            with safe_open(path, framework="pt", device="cpu") as stored:
                return str(json.loads((stored.metadata() or {})["stairwise"])["digest"])
        except (SafetensorError, KeyError, ValueError, OSError):
            return "damaged"
    return ""


def newest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint; damaged ones are skipped with a warning."""
    for path in every(folder):
        try:
            return load(path)
        except InputError as error:
            warnings.warn(f"{error}; falling back to the previous checkpoint", RunWarning, stacklevel=2)
    return None


def every(folder: Path) -> list[Path]:
    """All checkpoint files of a folder, newest first."""
    named = [p for p in folder.glob("step-*.safetensors") if re.fullmatch(r"step-\d{10}\.safetensors", p.name)]
    return sorted(named, reverse=True)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return digest.hexdigest()
