"""An HTTP server of bounded threads, connections and waiting: many or slow clients get an answer, or a 503, in turn."""

import socket
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Empty, Full, Queue
from threading import Lock, Thread

WORKERS = 16  # requests answered at the same time
WAITING = 128  # accepted connections that wait for a worker; later ones get a 503
LINGERING = 128  # refused connections kept open until their client has read the 503
READ_SECONDS, WRITE_SECONDS, LINGER_SECONDS = 10.0, 30.0, 1.0
RETRY_SECONDS = 1

_BODY = b"busy: try again in a second\n"
_REFUSAL = (
    f"HTTP/1.0 503 Service Unavailable\r\nRetry-After: {RETRY_SECONDS}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(_BODY)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
).encode() + _BODY


class PoolServer(HTTPServer):
    """Answers at most WORKERS requests at once and lets WAITING wait; refuses the rest with 503 and Retry-After.

    A client that takes longer than READ_SECONDS to send its request, or WRITE_SECONDS to read the answer, is cut off.
    """

    request_queue_size = 256  # connections that the system holds until they are accepted; Python's default is 5

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._queue: Queue[tuple[socket.socket, tuple[str, int]] | None] = Queue(WAITING)
        self._due: dict[socket.socket, float] = {}  # when each connection that a worker holds is cut off
        self._due_lock = Lock()
        self._refused: list[tuple[socket.socket, float]] = []
        self._closed = False
        super().__init__(address, handler)
        for _ in range(WORKERS):
            Thread(target=self._work, daemon=True).start()

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Hand the connection to a worker, or refuse it."""
        try:
            self._queue.put_nowait((request, client_address))
        except Full:
            self._refuse(request)

    def handle_error(self, *_: object) -> None:
        """Ignore dropped connections."""

    def service_actions(self) -> None:
        """Cut off slow clients, and close refused connections; called twice a second, and after each new connection."""
        now = time.monotonic()
        with self._due_lock:
            late = [connection for connection, due in self._due.items() if now > due]
        for connection in late:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes its worker, which closes it
        refused, self._refused = self._refused, []
        excess = len(refused) - LINGERING
        for i, (connection, due) in enumerate(refused):
            if i < excess or now > due or _hung_up(connection):
                connection.close()
            else:
                self._refused.append((connection, due))

    def allow(self, connection: socket.socket, seconds: float) -> None:
        """Cut the connection off after this time from now."""
        with self._due_lock:
            self._due[connection] = time.monotonic() + seconds

    def server_close(self) -> None:
        super().server_close()
        self._closed = True
        with suppress(Empty):
            while True:
                waiting = self._queue.get_nowait()
                if waiting is not None:
                    waiting[0].close()
        for _ in range(WORKERS):
            with suppress(Full):
                self._queue.put_nowait(None)
        for connection, _ in self._refused:
            connection.close()

    def _work(self) -> None:
        while not self._closed and (one := self._queue.get()) is not None:
            connection, client = one
            self.allow(connection, READ_SECONDS)
            try:
                self.finish_request(connection, client)
            except Exception:
                self.handle_error(connection, client)
            finally:
                with self._due_lock:
                    self._due.pop(connection, None)
                self.shutdown_request(connection)

    def _refuse(self, connection: socket.socket) -> None:
        """Send the 503 and stay open for a while: closing with an unread request would discard the answer."""
        try:
            connection.setblocking(False)
            connection.send(_REFUSAL)
            connection.shutdown(socket.SHUT_WR)
            self._refused.append((connection, time.monotonic() + LINGER_SECONDS))
        except OSError:
            connection.close()


def _hung_up(connection: socket.socket) -> bool:
    """Whether the client has closed its end; reads and forgets what it has sent."""
    try:
        while received := connection.recv(1 << 16):
            del received
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
