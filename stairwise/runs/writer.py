"""A background thread that completes and writes records during training."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from stairwise.runs.folder import RunFolder
from stairwise.runs.record import Record

Written = tuple[Record, Exception | None]  # a record, and the error if it could not be written


class BackgroundWriter:
    """Calls the given functions one after another, and writes the records that they return to `folder`, if given.

    `finished` and `wait` return the records in order, on the caller's thread.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1)
        self._queue: deque[Future[Written]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, make: Callable[[], Record]) -> None:
        """Queue a record; `make` may be slow, since it decomposes matrices."""
        try:
            self._queue.append(self._thread.submit(self._write, make))
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            self._queue.append(Future())
            self._queue[-1].set_result(self._write(make))

    def finished(self) -> Iterator[Written]:
        """Return the records that are complete. An exception in `make` is raised here."""
        while self._queue and self._queue[0].done():
            yield self._queue.popleft().result()

    def wait(self) -> Iterator[Written]:
        """Wait for all queued records and return them."""
        while self._queue:
            yield self._queue.popleft().result()

    def close(self) -> None:
        """Finish the queue, end the thread and close the file."""
        self._thread.shutdown()
        if self.folder is not None:
            self.folder.close()

    def _write(self, make: Callable[[], Record]) -> Written:
        record = make()
        try:
            if self.folder is not None:
                self.folder.write(record)
        except Warning as warning:  # warnings are errors here; this one was about older files
            return self._write(lambda: record)[0], warning
        except Exception as error:  # the caller decides whether it may go on
            return record, error
        return record, None
