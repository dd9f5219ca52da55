"""Atomic file writes: write to a temporary file next to the target, then move it into place."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stairwise.checks import InputError


@contextmanager
def atomic(target: str | Path) -> Iterator[Path]:
    """Yield a temporary path. It replaces `target` when the block succeeds and is deleted when it fails."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # keep the suffix, because libraries choose the format by it
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o666 & ~_umask())
        part.replace(target)
    except OSError as error:
        error.filename = error.filename or str(target)  # the error of a full disk has no file name
        raise
    finally:
        part.unlink(missing_ok=True)


def check_target(target: str | Path, name: str, suffixes: Sequence[str]) -> Path:
    """Refuse a file that could not be written later: a wrong ending, a folder, a place below a file or without rights.

    >>> check_target("figure.txt", "--out", (".png", ".pdf"))
    Traceback (most recent call last):
    ...
    stairwise.checks.InputError: --out must end in .png or .pdf (got figure.txt)
    """
    target = Path(target)
    if target.suffix not in suffixes:
        raise InputError(name, f"must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}", target)
    if target.is_dir():
        raise InputError(
            name, "must be a file", f"the folder {target}", f"add a name: {target / 'figure'}{suffixes[0]}"
        )
    check_folder(target.parent, name)
    return target


def check_folder(folder: str | Path, name: str) -> Path:
    """Refuse a folder that could not be made or written to later."""
    folder = Path(folder)
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise InputError(name, "must lie in a folder", f"{folder}, but {above} is a file", "choose another place")
    if not os.access(above, os.W_OK):
        raise InputError(name, "must be in a folder where you may write", above, "choose another place")
    return folder


def save_text(target: str | Path, text: str) -> None:
    with atomic(target) as part:
        part.write_text(text, encoding="utf-8")


def save_json(target: str | Path, value: Any) -> None:
    """Write indented JSON. numpy values become plain ones; NaN and infinities become null."""
    save_text(target, json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def save_arrays(target: str | Path, arrays: dict[str, Any]) -> None:
    """Write a compressed .npz file; Python objects are refused."""
    values = {name: np.asarray(value) for name, value in arrays.items()}
    for name, value in values.items():
        if value.dtype.hasobject:
            raise InputError(f"arrays[{name!r}]", "must not hold Python objects", value.dtype)
    with atomic(target) as part, part.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **values)


def load_arrays(source: str | Path) -> dict[str, np.ndarray]:
    """Read a .npz file. Nothing is unpickled."""
    try:
        with Path(source).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds of errors for a damaged file
        raise InputError(str(source), "must be a whole .npz file", error, "create it again") from error


def plain(value: Any) -> Any:
    """`value` with numpy types replaced by JSON types; NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
