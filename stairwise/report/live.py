"""The live page of one or more runs: a server for this machine that gives no access to files."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import EADDRINUSE
from functools import cache, cached_property, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from stairwise.checks import InputError, one_of
from stairwise.report.page import Page, plotly_library
from stairwise.report.pool import READ_SECONDS, WRITE_SECONDS, PoolServer
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


@dataclass(frozen=True, eq=False)
class _Built:
    """A page and its stamp; each form is made once, however many clients ask for it."""

    stamp: str
    page: Page

    @cached_property
    def html(self) -> bytes:
        return self.page.render('<script src="/plotly.js"></script>', live=True).encode()

    @cached_property
    def data(self) -> bytes:
        return json.dumps(self.page.parts(), allow_nan=False).encode()

    @property
    def status(self) -> str:
        """Number of records, with folder names, in ASCII, because it goes into a header."""
        text = self.page.facts.get("records", "no records yet")
        return "".join(c if " " <= c <= "~" else "?" for c in text)


class LivePage(PoolServer):
    """Serves a page, and rebuilds it when its stamp changes.

    Arguments:
        stamp: returns a text that changes when there are new data; called for every request.
        page: returns the current page; may raise InputError while there is nothing to show.
        port: 0 chooses a free one.
    """

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
        self.lock, self.built = Lock(), _Built("", Page("", ""))

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def current(self) -> _Built:
        """The page of the current stamp."""
        with self.lock:
            stamp = self.stamp()
            if stamp != self.built.stamp:
                try:
                    page = self.page()
                except InputError as error:
                    page = Page("Waiting for records", str(error))
                except Exception as error:  # damaged files must not stop the server
                    page = Page("The run cannot be shown", f"{type(error).__name__}: {error}")
                self.built = _Built(stamp, page)
            return self.built


class _Handler(BaseHTTPRequestHandler):
    server: LivePage
    server_version = "stairwise"
    sys_version = ""
    timeout = READ_SECONDS  # between two packets; the pool limits the whole request

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
            return self._send(HTTPStatus.OK, _plotly(), "text/javascript", body, {"Cache-Control": "max-age=3600"})
        if path not in ("/", "/data.json"):
            return self._send(HTTPStatus.NOT_FOUND, b"not found; the page is at /\n", "text/plain", body)
        self.server.allow(self.connection, math.inf)  # building a page takes its time
        built = self.server.current()
        if path == "/":
            return self._send(HTTPStatus.OK, built.html, "text/html", body)
        more = {"ETag": f'"{built.stamp}"', "X-Status": built.status}
        if self.headers.get("If-None-Match") == more["ETag"]:
            return self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", body, more)
        return self._send(HTTPStatus.OK, built.data, "application/json", body, more)

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str, body: bool, more: dict[str, str] | None = None
    ) -> None:
        self.server.allow(self.connection, WRITE_SECONDS)
        self.connection.settimeout(WRITE_SECONDS)
        self.send_response(status)
        headers = {"Cache-Control": "no-store"} | (more or {})
        headers |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        headers |= {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body and content:
            self.wfile.write(content)


@cache
def _plotly() -> bytes:
    return plotly_library().encode()
