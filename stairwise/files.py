"""Write files whole or not at all, and refuse to replace or to read what is not a regular file.

A file is written under a temporary name next to its target, and then renamed. Its writer holds a lock on it, so that
the next writer in the same folder recognizes what killed ones have left, and removes it.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from stairwise.checks import InputError

TEMPORARY = re.compile(r"\..{0,40}\.part-[0-9a-f]{12}(\.[^.]*)?", re.DOTALL)  # as `_temporary` names files
OLD = 24 * 3600  # seconds after which a leftover is removed where the file system has no locks
# of file systems that cannot flush a folder; a rename is then as durable as they make it
CANNOT_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def atomic(target: str | Path, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path. It replaces `target` when the block succeeds and is deleted when it fails.

    A link is written through: the file that it leads to is replaced. A file that is replaced keeps its permissions.
    `durable`: flush the file and its folder, so that they survive a power failure.
    """
    final = destination(target)
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep(final.parent)
    try:
        with _temporary(final) as part:
            yield part
            _keep_permissions(final, part)
            if durable:
                flush(part)
            part.replace(final)
            if durable:
                flush(final.parent)
                flush(final.parent.parent)  # which may have got a new folder
    except OSError as error:
        error.filename = error.filename or str(target)  # the error of a full disk has no file name
        raise


def destination(target: str | Path, name: str = "") -> Path:
    """The file that writing to `target` creates or replaces. Refuses what exists and is not a regular file.

    `name`: of the argument, for the message.
    """
    target = Path(target)

    def refused(kind: str) -> InputError:
        rule = "must be a regular file that you may write, or not exist yet"
        return InputError(name or str(target), rule, f"{target}, {kind}" if name else kind, "choose another name")

    try:
        mode = target.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refused("a link to itself") from None
        if error.errno != errno.ENOENT:
            raise
        return Path(os.path.realpath(target))  # absent, or a link to a file that is absent
    if not stat.S_ISREG(mode):
        raise refused(KINDS.get(stat.S_IFMT(mode), "something else"))
    final = Path(os.path.realpath(target))
    if not final.exists():  # links of /proc may lead to deleted files
        raise refused("a link to a deleted file")
    if not os.access(final, os.W_OK):
        raise refused("a read-only file")
    return final


def regular(source: str | Path, name: str = "") -> Path:
    """`source`, unless it is a pipe, a device or a folder: reading it might never end."""
    source = Path(source)
    mode = source.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise InputError(name or str(source), "must be a regular file", f"{source}, {kind}" if name else kind)
    return source


def check_target(target: str | Path, name: str, suffixes: Sequence[str] = ()) -> Path:
    """Refuse a file that could not be written later: a wrong ending, a folder, a place below a file or without rights.

    >>> check_target("figure.txt", "--out", (".png", ".pdf"))
    Traceback (most recent call last):
    ...
    stairwise.checks.InputError: --out must end in .png or .pdf (got figure.txt)
    """
    target = Path(target)
    if suffixes and target.suffix not in suffixes:
        raise InputError(name, f"must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}", target)
    if target.is_dir():
        remedy = f"add a name: {target / 'figure'}{suffixes[0]}" if suffixes else "add the name of a file"
        raise InputError(name, "must be a file", f"the folder {target}", remedy)
    check_folder(target.parent, name)
    destination(target, name)
    return target


def check_folder(folder: str | Path, name: str) -> Path:
    """Refuse a folder that could not be made or written to later."""
    folder = Path(folder)
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not above.is_dir():
        kind = "a file" if above.is_file() else "not a folder"
        raise InputError(name, "must lie in a folder", f"{folder}, but {above} is {kind}", "choose another place")
    if not os.access(above, os.W_OK):
        raise InputError(name, "must be in a folder where you may write", above, "choose another place")
    return folder


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that it is neither used nor lost, and return its new name."""
    kept = spare_name(path)
    path.rename(kept)
    return kept


def spare_name(path: Path) -> Path:
    """The first free name of NAME.damaged, NAME.damaged-2, …"""
    names = (path.with_name(f"{path.name}.damaged{'' if i == 1 else f'-{i}'}") for i in range(1, 10**6))
    return next(name for name in names if not os.path.lexists(name))


def sweep(folder: Path) -> None:
    """Remove what killed writers have left in a folder."""
    for path in leftovers(folder):
        with suppress(OSError):
            path.unlink()


def leftovers(folder: Path) -> list[Path]:
    """Temporary files in a folder that nobody is writing any more."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if TEMPORARY.fullmatch(entry.name)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if _abandoned(folder / name)]


def _abandoned(path: Path) -> bool:
    """Whether the writer of a temporary file has ended; without locks, whether the file is a day old."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # it is gone, or it is not ours
        return False
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - facts.st_mtime > OLD
    finally:
        os.close(handle)
    return True


@contextmanager
def _temporary(final: Path) -> Iterator[Path]:
    """A new locked file next to `final`; it keeps the suffix, because libraries choose the format by it."""
    while True:
        part = final.with_name(f".{final.stem[:40]}.part-{secrets.token_hex(6)}{final.suffix}")
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if part.exists():  # else another writer took it for a leftover before it was locked
            break
        os.close(handle)
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _keep_permissions(final: Path, part: Path) -> None:
    """Give `part` owner and permissions of the file that it replaces, but no setuid, setgid or sticky bit."""
    with suppress(FileNotFoundError):
        before, now = final.stat(), part.stat()
        if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
            with suppress(OSError):  # only root may give files away
                os.chown(part, before.st_uid, before.st_gid)
        part.chmod(stat.S_IMODE(before.st_mode) & 0o777)


def flush(path: Path) -> None:
    """Flush a file or a folder to disk. Folders of file systems that cannot do this are left to them."""
    folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not folder or error.errno not in CANNOT_FLUSH:
            error.filename = error.filename or str(path)
            raise


def save_text(target: str | Path, text: str, durable: bool = False) -> None:
    with atomic(target, durable) as part:
        part.write_text(text, encoding="utf-8")


def save_json(target: str | Path, value: Any, durable: bool = False) -> None:
    """Write indented JSON. numpy values become plain ones; NaN and infinities become null."""
    save_text(target, json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n", durable)


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
