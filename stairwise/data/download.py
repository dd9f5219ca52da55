"""Resumable downloads with checked size and checksum, and extraction of expected archive members only."""

import hashlib
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO

from stairwise.checks import InputError
from stairwise.files import atomic, destination
from stairwise.progress import Progress, silent

CHUNK = 1 << 20
AGAIN = "run the command again; it continues"


class Unreachable(InputError):
    """The host could not be reached or the connection was lost; calling again resumes the download."""


@dataclass(frozen=True)
class Whole:
    """Published size in bytes and MD5 checksum of a file."""

    size: int
    md5: str


def check_file(path: Path, whole: Whole) -> str | None:
    """What is wrong with the file at `path`, or None."""
    if not path.is_file():
        return "missing"
    if path.stat().st_size != whole.size:
        return f"has {path.stat().st_size:,} bytes instead of {whole.size:,}"
    with path.open("rb") as stream:
        md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return None if md5 == whole.md5 else f"has MD5 {md5} instead of {whole.md5}"


def fetch(
    url: str, target: Path, whole: Whole, progress: Progress = silent, remedy: str = AGAIN, timeout: float = 30
) -> None:
    """Download `url` to `target`. An interrupted download stays in `target`.part, and the next call resumes it.

    It never writes more bytes than the file should have, and renames the file only if its checksum is correct. `remedy`
    ends the error message if the host cannot be reached.
    """
    if check_file(target, whole) is None:
        return
    target = destination(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    part = destination(target.with_name(target.name + ".part"))
    have = part.stat().st_size if part.exists() else 0
    if have > whole.size:
        part.unlink()
        have = 0
    if free < whole.size - have:
        raise InputError(str(target.parent), f"must have {whole.size - have:,} bytes free", f"{free:,}", "make room")
    if have < whole.size:
        try:
            have = _transfer(url, part, have, whole.size, progress, timeout)
        except (urllib.error.URLError, TimeoutError, ConnectionError, HTTPException) as error:
            raise Unreachable(url, "could not be fetched", getattr(error, "reason", error), remedy) from error
        if have < whole.size:
            raise Unreachable(url, f"broke off at {have:,} of {whole.size:,} bytes", None, remedy)
    problem = check_file(part, whole)
    if problem:
        part.unlink(missing_ok=True)
        raise InputError(url, "is not the published file", problem, "run the command again; it starts over")
    part.replace(target)


def _transfer(url: str, part: Path, have: int, size: int, progress: Progress, timeout: float) -> int:
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        if have and response.status != 206:  # the server cannot resume: start over
            have = 0
        with part.open("ab" if have else "wb") as out:
            while chunk := response.read(CHUNK):
                have += len(chunk)
                if have > size:
                    part.unlink()
                    raise InputError(url, f"must have {size:,} bytes", "more", "the server sends another file")
                out.write(chunk)
                progress(have, size, "")
    return have


def extract(archive: Path, wanted: Mapping[str, tuple[Path, Whole]]) -> None:
    """Extract the wanted members of a tar archive by exact name; check type and size before and MD5 after.

    All other members are ignored, so none can write elsewhere.
    """
    missing = dict(wanted)
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if member.name not in missing:
                    continue
                target, whole = missing.pop(member.name)
                if not member.isfile() or member.size != whole.size:
                    raise InputError(
                        f"{archive.name}:{member.name}", f"must be a file of {whole.size:,} bytes", member.size
                    )
                stream = tar.extractfile(member)
                assert stream is not None  # it is a regular file
                _write_checked(stream, target, whole, f"{archive.name}:{member.name}")
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(archive.name, "must be a whole tar archive", error, "delete it and fetch it again") from error
    if missing:
        raise InputError(archive.name, "must hold all members", None, f"missing: {', '.join(missing)}")


def _write_checked(stream: IO[bytes], target: Path, whole: Whole, name: str) -> None:
    with atomic(target) as part:
        with part.open("wb") as out:
            shutil.copyfileobj(stream, out, CHUNK)
        problem = check_file(part, whole)
        if problem:
            raise InputError(name, "is not the published file", problem, "delete the archive and fetch it again")
