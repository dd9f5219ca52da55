"""Try a command line or a call in this process, and say how it ended."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from sklearn.exceptions import NotFittedError

from stairwise.checks import InputError
from tests.fuzz.calls import Names

SECONDS = 10.0  # of processor time; more is a hang
CLOCK = 30.0  # seconds by the clock, which on a busy machine runs ahead of the processor
FINE, REFUSED = "fine", "refused"
BAD = ("traceback", "unexpected", "hang", "nan", "crash", "wordy")
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""


class Late(BaseException):
    """The time is up. Not an Exception, which the code under test may catch."""


@contextmanager
def _time_limit():
    def late(number: int, frame: FrameType | None) -> None:
        raise Late

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, CLOCK)}
    before = {number: signal.signal(number, late) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds, 1.0)  # again and again, in case the first is swallowed
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def of_call(source: str) -> Outcome:
    """Anything but InputError, or a result with NaN, is bad."""
    try:
        with warnings.catch_warnings(), _time_limit():
            warnings.simplefilter("ignore")
            value = eval(source, Names())
    except Late:
        return Outcome("hang")
    except InputError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(REFUSED if _is_others(error) else "traceback", _place(error))
    return Outcome("nan", source.partition("(")[0]) if _has_nan(value) and not _passes_on(source) else Outcome(FINE)


def _passes_on(source: str) -> bool:
    """Losses of embeddings that are not finite are NaN, as torch's are: a check would make a GPU wait at every step."""
    return bool(re.match(r"sw\.(losses|precondition)\b.*z_[ab] \* np\.(nan|inf)", source))


def _is_others(error: Exception) -> bool:
    """Python refused the source before it reached the package, or scikit-learn checked arguments as it always does."""
    files = [line.filename for line in traceback.extract_tb(error.__traceback__)]
    contract = isinstance(error, ValueError | TypeError | NotFittedError) and "/sklearn/" in files[-1]
    return contract or not any("/stairwise/" in file for file in files)


def _place(error: BaseException) -> str:
    ours = [line for line in traceback.extract_tb(error.__traceback__) if "/stairwise/" in line.filename]
    where = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}{where}"


def _has_nan(value: Any, depth: int = 3) -> bool:
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and bool(torch.isnan(value).any())
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fc" and bool(np.isnan(value).any())
    if not depth:
        return False
    if isinstance(value, dict):
        return any(_has_nan(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_nan(item, depth - 1) for item in value)
    return any(_has_nan(item, depth - 1) for item in getattr(value, "__dict__", {}).values())


def of_line(line: list[str], folder: Path) -> Outcome:
    """Run it through the entry point, in `folder`."""
    from stairwise.cli import main

    mpl.use("Agg")
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before, argv, path, show = Path.cwd(), sys.argv, list(sys.path), warnings.showwarning
    out, err = io.StringIO(), io.StringIO()
    os.chdir(folder)
    sys.argv, sys.path = ["stairwise", *line], [str(folder), *sys.path]
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err), _time_limit():
            main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    except Late:
        return Outcome("hang")
    except BaseException as error:
        return Outcome("traceback", _place(error))
    finally:
        os.chdir(before)
        sys.argv, sys.path, warnings.showwarning = argv, path, show
        for number, handler in kept.items():
            signal.signal(number, handler)
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
    return judge(code, out.getvalue(), err.getvalue())


def of_real_line(line: list[str], folder: Path) -> Outcome:
    """Run it as a command of its own; Python and torch have to start, so it may take twice as long."""
    if any("\0" in word for word in line):
        return Outcome(REFUSED)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "stairwise", *line]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=2 * CLOCK)
    except subprocess.TimeoutExpired:
        return Outcome("hang")
    if done.returncode < 0:
        return Outcome("crash", signal.Signals(-done.returncode).name)
    return judge(done.returncode, *(text.decode(errors="replace") for text in (done.stdout, done.stderr)))


def judge(code: Any, out: str, err: str) -> Outcome:
    """0 and 1 are results (1: claims that do not hold), 2 is an error in one line, 3 is ours; no NaN is printed."""
    said = [line for line in err.splitlines() if line.strip() and not line.startswith("note:")]
    last = said[-1][:200] if said else ""
    if "Traceback (most recent call last)" in err:
        return Outcome("traceback", last)
    if code in (0, 1):
        printed = re.search(r"\bnan\b", out, re.IGNORECASE)
        return Outcome("nan", out[max(0, printed.start() - 60) : printed.end()]) if printed else Outcome(FINE)
    if code == 2:
        errors = [line for line in said if line.startswith("error:")]
        return Outcome(REFUSED, last) if "Usage:" in err or len(errors) == 1 else Outcome("wordy", last)
    return Outcome("unexpected" if code == 3 else "crash", f"exit code {code}: {last}")


def each(how: Callable[[Any], Outcome], case: Any) -> dict[str, Any]:
    """One line of the log: the case and how it ended."""
    outcome = how(case)
    return {"case": case, "kind": outcome.kind, "detail": outcome.detail}
