"""Shared by all commands: consoles, progress bars, tables, JSON and error messages."""

import errno
import io
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from stairwise.progress import Progress
    from stairwise.table import Table

out, err = Console(), Console(stderr=True)

SECONDS, SHORTEST = 30.0, 3.0  # between two lines of progress; work of a few seconds needs none

LONGEST = 500  # characters of an unexpected error
FIXABLE, UNEXPECTED = 2, 3  # exit codes; 1 is for claims of the paper that do not hold

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


class Interrupted(BaseException):
    """Ctrl-C; not a KeyboardInterrupt, because typer would handle that itself."""


def run_app(app: typer.Typer) -> None:
    """Run the command line. Every error prints one line; --debug shows its traceback.

    Errors that the user can fix exit with 2, all others, which are ours, with 3.
    """
    debug = "--debug" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--debug"]
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGINT, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text, terminals not Unicode
    try:
        app(prog_name="stairwise")
    except Interrupted:
        _fail("error", "interrupted: no partial files remain; run the same command again to continue", FIXABLE)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        if words := _remedy(error):
            _fail("error", words, FIXABLE)
        text = ": ".join(filter(None, (type(error).__name__, _one_line(error)[:LONGEST])))
        _fail("unexpected", f"{text}; please report this; --debug shows where", UNEXPECTED)


def _interrupt(*_: object) -> None:
    raise Interrupted


def _remedy(error: Exception) -> str:
    """What went wrong and how to fix it; empty if the error is unexpected."""
    out_of_memory = (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    )  # the latter is torch's
    if out_of_memory or "can't allocate memory" in str(error):
        return f"not enough memory: {_one_line(error)}: use fewer pairs or features, a smaller batch or a smaller d"
    if isinstance(error, OSError) and error.strerror and error.filename:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = (
            "free space or change the folder (--out, $STAIRWISE_DATA)" if full else "check the path and your rights"
        )
        return _one_line(f"{error.filename}: {error.strerror.lower()}: {remedy}")
    ours = type(error).__module__.partition(".")[0] == "stairwise"
    return _one_line(error) or type(error).__name__ if ours or isinstance(error, OSError) else ""


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _fail(kind: str, message: str, code: int) -> None:
    err.print(f"[red]{kind}:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    from stairwise.checks import RunWarning, TheoryWarning

    if issubclass(category, TheoryWarning | RunWarning):
        err.print(f"[yellow]note:[/yellow] {escape(str(message))}", highlight=False, soft_wrap=True)


@contextmanager
def bar(name: str, *columns: ProgressColumn) -> Iterator["Progress"]:
    """Show progress and the remaining time while the block runs: a bar in a terminal, plain lines in a file or a pipe.

    `columns` replace the percentage of the bar.
    """
    if not err.is_terminal:
        yield plain_lines(name, lambda line: err.print(escape(line), highlight=False, soft_wrap=True))
        return
    shown = (TextColumn("{task.description}"), BarColumn(), *(columns or (TaskProgressColumn(),)))
    with Bar(*shown, TimeRemainingColumn(), console=err, transient=True) as progress:
        task = progress.add_task(name, total=None)

        def report(done: float, total: float, words: str) -> None:
            progress.update(task, completed=done, total=total)
            if words:
                progress.update(task, description=escape(f"{name}: {words}" if name else words))

        yield report


def plain_lines(name: str, write: Callable[[str], None], clock: Callable[[], float] = monotonic) -> "Progress":
    """Progress as lines of text: one for every tenth of the work, or every 30 s, but none within 3 s of the last."""
    began = clock()
    start: float | None = None
    tenths, said_at, topic = 0, began, ""

    def report(done: float, total: float, words: str) -> None:
        nonlocal start, tenths, said_at, topic
        now, share, topic = clock(), done / total if total else 0.0, words or topic
        full = int(10 * share + 1e-9)
        if start is None:  # a run that continues does not begin at 0
            start, tenths = share, full
        if now - said_at < SHORTEST or (full <= tenths and now - said_at < SECONDS):
            return
        tenths, said_at = full, now
        write(_line(": ".join(filter(None, (name, topic))), share, start, now - began))

    return report


def _line(what: str, share: float, start: float, seconds: float) -> str:
    from stairwise.staircase.clock import duration  # here because it loads numpy

    left = seconds * (1 - share) / (share - start) if share > start else None
    ahead = f", about {duration(left)} left" if left else ""
    return f"{what}: {100 * share:.0f} % after {duration(seconds)}{ahead}"


def print_table(table: "Table") -> None:
    shown = RichTable(*table.header, title=escape(table.title), caption=escape(table.note) or None)
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in table.rows:
        shown.add_row(*row)
    out.print(shown)


def print_catalog(headings: dict[str, str], labels: dict[str, str]) -> None:
    """Print names with their headings, each followed by its label."""
    for name, heading in headings.items():
        out.print(f"[bold]{name}[/bold]  {heading}".rstrip(), highlight=False)
        print(f"{labels[name]}\n")


def print_json(value: Any) -> None:
    """Print one line of JSON, for scripts."""
    from stairwise.files import plain

    unicode = "utf" in (sys.stdout.encoding or "").lower()
    print(json.dumps(plain(value), ensure_ascii=not unicode, allow_nan=False))


def setting(text: str, name: str = "--set") -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        from stairwise.checks import InputError

        raise InputError(name, "must be KEY=VALUE", repr(text))
    return key.strip(), value.strip()
