"""The live page of one or more runs: a server for this machine that gives no access to files."""

import json
from collections.abc import Callable, Sequence
from errno import EADDRINUSE
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from stairwise.checks import InputError, one_of
from stairwise.report.page import Page, plotly_library
from stairwise.report.reading import FOLLOWED
from stairwise.report.runs_page import distinct_names, runs_page
from stairwise.runs.folder import METRICS, PICTURE, RECIPE

HOST = "127.0.0.1"
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def live_page(folders: Sequence[Path], port: int = 0, spectrum: str = "") -> "LivePage":
    """Make a server for the live page of one or more runs at `address`; the caller starts it. The page is built when it
    is first asked for."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError("run", "must be a folder", folder, "start the run first, or check the path")
    distinct_names(folders)
    if spectrum:
        one_of(spectrum, "--spectrum", FOLLOWED)
    page = partial(runs_page, folders, spectrum, patient=len(folders) > 1)
    return LivePage(partial(_stamp, folders), page, port)


def _stamp(folders: Sequence[Path]) -> str:
    """A text that changes when a file of a run changes."""
    stamps = []
    for path in (folder / name for folder in folders for name in (METRICS, PICTURE, RECIPE)):
        try:
            state = path.stat()
            stamps.append(f"{state.st_mtime_ns:x}-{state.st_size:x}")
        except OSError:
            stamps.append("")
    return ".".join(stamps)


class LivePage(ThreadingHTTPServer):
    """Serves a page, and rebuilds it when its stamp changes.

    Arguments:
        stamp: returns a text that changes when there are new data; called for every request.
        page: returns the current page; may raise InputError while there is nothing to show.
        port: 0 chooses a free one.
    """

    daemon_threads = True

    def __init__(self, stamp: Callable[[], str], page: Callable[[], Page], port: int = 0) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except OverflowError:
            raise InputError("--port", "must lie between 0 and 65535", port) from None
        except PermissionError:
            raise InputError("--port", "must be a port you may use", port, "--port 0 chooses a free one") from None
        except OSError as error:
            if error.errno != EADDRINUSE:
                raise
            rule = "must be free: is another watcher running?"
            raise InputError("--port", rule, port, "--port 0 chooses a free one") from None
        self.stamp, self.page = stamp, page
        self.lock, self.made = Lock(), ("", Page("", ""))

    def handle_error(self, *_: object) -> None:
        """Ignore dropped connections."""

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def current(self) -> tuple[str, Page]:
        """Current stamp and page."""
        with self.lock:
            stamp = self.stamp()
            if stamp != self.made[0]:
                try:
                    self.made = stamp, self.page()
                except InputError as error:
                    self.made = stamp, Page("Waiting for records", str(error))
                except Exception as error:  # damaged files must not stop the server
                    self.made = stamp, Page("The run cannot be shown", f"{type(error).__name__}: {error}")
            return self.made


class _Handler(BaseHTTPRequestHandler):
    server: LivePage
    server_version = "stairwise"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: object) -> None:
        """Silence request logging."""

    def _answer(self, body: bool) -> None:
        # prevents DNS rebinding: a foreign page whose host name resolves to this machine sends its own name
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            return self._send(HTTPStatus.FORBIDDEN, b"this page is for this machine only\n", "text/plain", body)
        path = urlsplit(self.path).path
        if path == "/plotly.js":
            return self._send(
                HTTPStatus.OK, plotly_library().encode(), "text/javascript", body, {"Cache-Control": "max-age=3600"}
            )
        if path not in ("/", "/data.json"):
            return self._send(HTTPStatus.NOT_FOUND, b"not found; the page is at /\n", "text/plain", body)
        stamp, page = self.server.current()
        if path == "/":
            text = page.render('<script src="/plotly.js"></script>', live=True).encode()
            return self._send(HTTPStatus.OK, text, "text/html", body)
        status = page.facts.get("records", "no records yet")  # with folder names, and a header holds ASCII only
        more = {"ETag": f'"{stamp}"', "X-Status": "".join(c if " " <= c <= "~" else "?" for c in status)}
        if self.headers.get("If-None-Match") == more["ETag"]:
            return self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", body, more)
        data = json.dumps(page.parts(), allow_nan=False).encode()
        return self._send(HTTPStatus.OK, data, "application/json", body, more)

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str, body: bool, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {"Cache-Control": "no-store"} | (more or {})
        headers |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        headers |= {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body and content:
            self.wfile.write(content)
