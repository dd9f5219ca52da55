"""Lock a run folder for one process, and handle signals that ask a run to stop."""

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from stairwise.checks import InputError
from stairwise.files import check_folder, destination


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allow one process (group) per run folder; the lock ends with the process."""
    check_folder(folder, "run folder").mkdir(parents=True, exist_ok=True)
    with destination(folder / ".lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "run folder", "is being trained by another process", folder, "wait, or give another --out"
            ) from None
        yield


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the current step; a second one acts at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> "StopRequest":
        self.before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
