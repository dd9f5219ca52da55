"""Arrays in .npz files. Nothing is unpickled, and nothing is expanded before its size is known."""

import errno
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from stairwise.checks import InputError
from stairwise.files import atomic, regular

LARGEST = 4 << 30  # bytes that the arrays of a file may take, unless the caller allows more
END = 22  # bytes at the end of a .zip file, without its comment
METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # those of numpy; Python expands others without a bound


def save_arrays(target: str | Path, arrays: dict[str, Any]) -> None:
    """Write a compressed .npz file; Python objects are refused."""
    values = {name: np.asarray(value) for name, value in arrays.items()}
    for name, value in values.items():
        if value.dtype.hasobject:
            raise InputError(f"arrays[{name!r}]", "must not hold Python objects", value.dtype)
    with atomic(target) as part, part.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **values)


def load_arrays(source: str | Path, largest: int = LARGEST) -> dict[str, np.ndarray]:
    """Read a .npz file whose arrays take at most `largest` bytes."""
    try:
        with zipfile.ZipFile(regular(source)) as stored:
            members = stored.infolist()
            _check_number(source, stored)
            _check_size(source, sum(member.file_size for member in members), largest)
            names = [_check_member(stored, member) for member in members]
            if len(set(names)) < len(names):
                raise ValueError("two arrays of one name")
            return {name: _read(stored, member) for name, member in zip(names, members, strict=True)}
    except InputError:
        raise
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # damaged offsets are invalid arguments
            raise
        raise _damaged(source, error) from error
    except Exception as error:  # numpy and zipfile raise many kinds of errors for a damaged file
        raise _damaged(source, error) from error


def _damaged(source: str | Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return InputError(str(source), "must be a whole .npz file of numbers or text", reason, "create it again")


def _check_number(source: str | Path, stored: zipfile.ZipFile) -> None:
    """Require as many arrays as the end of the file counts: damage may hide one in the directory entry before it."""
    with regular(source).open("rb") as stream:
        stream.seek(-END - len(stored.comment), os.SEEK_END)
        counted = int.from_bytes(stream.read(END)[10:12], "little")
    if counted not in (len(stored.infolist()), 0xFFFF):  # a file of more arrays counts them elsewhere
        raise ValueError(f"{len(stored.infolist())} of {counted} arrays")


def _check_size(source: str | Path, size: int, largest: int) -> None:
    if size > largest:
        rule = f"must expand to at most {_gigabytes(largest)}"
        remedy = f"if you trust it, allow more: largest={size}"
        raise InputError(str(source), rule, _gigabytes(size), remedy)


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def _check_member(stored: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """The name of an array, if its header agrees with its size."""
    name = member.filename.removesuffix(".npy")
    if member.compress_type not in METHODS:
        raise ValueError(f"{name} is compressed in a way that numpy does not use")
    with stored.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects")
        if member.file_size - stream.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} claims {dtype} of shape {shape} in {member.file_size} bytes")
    return name


def _read(stored: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with stored.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)
