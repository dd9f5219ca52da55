"""Try a command line or a call in this process, and say how it ended."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from sklearn.exceptions import NotFittedError

from stairwise.checks import InputError, RunWarning
from tests.fuzz.calls import Names

SECONDS = 10.0  # by the clock; more is a hang. Waiting for a processor that other programs use does not count,
PATIENCE = 6  # up to so many times SECONDS
FINE, REFUSED = "fine", "refused"
WARNED, PASSED_ON = "warned", "passed on"  # not finite: with a warning; because the embeddings of a loss were not
BAD = ("traceback", "unexpected", "hang", "nan", "crash", "wordy")
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""


class Late(BaseException):
    """The time is up. Not an Exception, which the code under test may catch."""


def idle_clock(process: int | str = "self") -> Callable[[], float]:
    """Seconds since now by the clock of an idle machine: without the time in which the main thread of a process was
    ready to run and other programs ran. That is told by Linux; elsewhere it is the ordinary clock."""
    file, began = Path(f"/proc/{process}/schedstat"), time.monotonic()

    def waited() -> float:
        with suppress(OSError, IndexError, ValueError):
            return int(file.read_text().split()[1]) / 1e9
        return 0.0

    before = waited()
    return lambda: time.monotonic() - began - max(0.0, waited() - before)


@contextmanager
def _time_limit():
    taken, began = idle_clock(), time.monotonic()

    def late(number: int, frame: FrameType | None) -> None:
        if taken() > SECONDS or time.monotonic() - began > PATIENCE * SECONDS:
            raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS / 20)  # again and again, in case the first is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def of_call(source: str) -> Outcome:
    """Anything but InputError is bad, and so is a result with NaN or an undocumented inf that no warning came with."""
    try:
        with warnings.catch_warnings(record=True) as heard, _time_limit():
            warnings.simplefilter("always")
            value = eval(source, Names())
    except Late:
        return Outcome("hang")
    except InputError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(REFUSED if _is_others(error) else "traceback", _place(error))
    if not _has(value, np.isnan if _INFINITE.search(source) else lambda x: ~np.isfinite(x)):
        return Outcome(FINE)
    if any(issubclass(one.category, RunWarning) and "overflow" in str(one.message) for one in heard):
        return Outcome(WARNED)
    return Outcome(PASSED_ON if _PASSING_ON.match(source) else "nan", source.partition("(")[0])


# losses of embeddings that are not finite are NaN, as torch's are: a check would make a GPU wait at every step
_PASSING_ON = re.compile(r"sw\.(losses|precondition)\b.*z_[ab] \* np\.(nan|inf)")
# results may hold an infinite time that was given; documented: what is never learned has the step time inf, and the
# last time of a probe curve is inf
_INFINITE = re.compile(
    r"np\.inf|step_times|sw\.(predict|predict_staircase|probe_curve|advise|forecast_steps|detect_steps)\("
)


def _is_others(error: Exception) -> bool:
    """Python refused the source before it reached the package, or scikit-learn checked arguments as it always does."""
    files = [line.filename for line in traceback.extract_tb(error.__traceback__)]
    contract = isinstance(error, ValueError | TypeError | NotFittedError) and "/sklearn/" in files[-1]
    return contract or not any("/stairwise/" in file for file in files)


def _place(error: BaseException) -> str:
    ours = [line for line in traceback.extract_tb(error.__traceback__) if "/stairwise/" in line.filename]
    where = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}{where}"


def _has(value: Any, bad: Callable[[Any], Any], depth: int = 3) -> bool:
    """Whether a number in the result is bad."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense().double().numpy() if value.is_floating_point() else 0
    if isinstance(value, float | np.floating | np.ndarray):
        return np.asarray(value).dtype.kind in "fc" and bool(np.any(bad(value)))
    if not depth:
        return False
    if isinstance(value, dict):
        return any(_has(item, bad, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has(item, bad, depth - 1) for item in value)
    return any(_has(item, bad, depth - 1) for item in getattr(value, "__dict__", {}).values())


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
    """Run it as a command of its own."""
    if any("\0" in word for word in line):
        return Outcome(REFUSED)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "stairwise", *line]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err) as process:
            taken, began = idle_clock(process.pid), time.monotonic()
            while process.poll() is None:
                if taken() > SECONDS or time.monotonic() - began > PATIENCE * SECONDS:
                    process.kill()
                    return Outcome("hang")
                time.sleep(0.02)
        texts = [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]
    if process.returncode < 0:
        return Outcome("crash", signal.Signals(-process.returncode).name)
    return judge(process.returncode, *texts)


def judge(code: Any, out: str, err: str) -> Outcome:
    """0 and 1 are results (1: claims that do not hold), 2 is an error in one line, 3 is ours; no NaN is printed."""
    said = [line for line in err.splitlines() if line.strip() and not line.startswith("note:")]
    last = said[-1][:200] if said else ""
    if "Traceback (most recent call last)" in err:
        return Outcome("traceback", last)
    if code in (0, 1):
        printed = re.search(r"(?<![\w=-])[-−]?(nan|inf|infinity)\b", out, re.IGNORECASE)
        return Outcome("nan", out[max(0, printed.start() - 60) : printed.end()]) if printed else Outcome(FINE)
    if code == 2:
        errors = [line for line in said if line.startswith("error:")]
        return Outcome(REFUSED, last) if "Usage:" in err or len(errors) == 1 else Outcome("wordy", last)
    return Outcome("unexpected" if code == 3 else "crash", f"exit code {code}: {last}")


def each(how: Callable[[Any], Outcome], case: Any) -> dict[str, Any]:
    """One line of the log: the case, how it ended, its time by the clock and of the processor, also of children."""
    clock, processor = time.monotonic(), sum(os.times()[:4])
    outcome = how(case)
    taken = {"seconds": time.monotonic() - clock, "processor": sum(os.times()[:4]) - processor}
    return {"case": case, "kind": outcome.kind, "detail": outcome.detail, **taken}
