"""One thread that makes and writes records while training goes on."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from stairwise.runs.folder import RunFolder
from stairwise.runs.record import Record

__all__ = ["BackgroundWriter"]

Written = tuple[Record, OSError | None]  # a record, and what kept it from being written


class BackgroundWriter:
    """Calls what it is given one after the other, and writes the records it gets into `folder`, if there is one.

    Results come back by `finished` or `wait`, in order, on the caller's thread.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1)
        self._queue: deque[Future[Written]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, make: Callable[[], Record]) -> None:
        """Queue a record; `make` may decompose matrices, which takes time."""
        self._queue.append(self._thread.submit(self._write, make))

    def finished(self) -> Iterator[Written]:
        """Take back what is done. An exception of `make` is raised here."""
        while self._queue and self._queue[0].done():
            yield self._queue.popleft().result()

    def wait(self) -> Iterator[Written]:
        """Take back everything; waits for it."""
        while self._queue:
            yield self._queue.popleft().result()

    def close(self) -> None:
        """Finish what is queued, end the thread and close the file."""
        self._thread.shutdown()
        if self.folder is not None:
            self.folder.close()

    def _write(self, make: Callable[[], Record]) -> Written:
        record = make()
        try:
            if self.folder is not None:
                self.folder.write(record)
        except OSError as error:
            return record, error
        return record, None
