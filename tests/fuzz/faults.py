"""Kill, interrupt and starve short trainings, let them continue, and compare them bit for bit with one that was spared.

Every training is a fork of one process that has loaded torch, so that a trial takes a second. The faults are real
signals, a real limit on the size of files, and errors of the calls that open, write out and rename files.
"""

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stairwise as sw
from stairwise.runs.log import read_log
from stairwise.runs.record import CLOCKS
from stairwise.training import checkpoint
from stairwise.training.loop import Stopped
from tests.fuzz.outcome import PATIENCE, SECONDS, idle_clock

RECIPE = sw.Recipe(
    data="digits", views="none", encoder="mlp", encoder_options={"inputs": 64, "widths": [32]}, hidden=[16], d=4,
    batch=64, steps=60, lr=0.05, records=20, window=64, precision="float32",
)  # fmt: skip
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
ERRORS = {"full disk": errno.ENOSPC, "I/O error": errno.EIO, "read-only": errno.EROFS}
KINDS = (*SIGNALS, *ERRORS, "file size limit")


def trials(n: int, seed: int, folder: Path) -> dict[str, Any]:
    """Inject n faults, one to three into each run, and count runs that were lost or differ."""
    rng = random.Random(seed)
    whole, began = folder / "whole", time.monotonic()
    assert _in_a_fork(lambda: _train(whole)) == 0, "a training without faults failed"
    expected, duration = _content(whole), time.monotonic() - began
    tally: dict[str, Any] = {
        "faults": 0,
        "runs": 0,
        "lost": 0,
        "different": 0,
        "tracebacks": 0,
        "hangs": 0,
        "kinds": {},
    }
    problems: list[dict[str, Any]] = []
    while tally["faults"] < n:
        number, run = rng.randrange(1 << 30), folder / "run"
        record, problem = trial(number, run, expected, duration)
        tally["runs"] += 1
        for kind in record:
            tally["faults"] += 1
            tally["kinds"][kind] = tally["kinds"].get(kind, 0) + 1
        if problem:
            tally[problem[0]] += 1
            problems.append({"seed": number, "faults": record, "problem": problem[0], "detail": problem[1]})
        shutil.rmtree(run, ignore_errors=True)
    return {**tally, "problems": problems}


def trial(seed: int, run: Path, expected: Any, duration: float) -> tuple[list[str], tuple[str, str] | None]:
    """The faults that hit one run, and what went wrong, if anything did."""
    rng, hit = random.Random(seed), []
    log = run.with_suffix(".txt")
    log.unlink(missing_ok=True)
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(KINDS)
        code = _faulty(kind, rng, run, log, duration)
        if code == 0:
            break
        hit.append(kind)
        if code is None:
            return hit, ("hangs", kind)
    if log.exists():
        return hit, ("tracebacks", log.read_text())
    code = _in_a_fork(lambda: _train(run), log)
    if code is None:
        return hit, ("hangs", "while it continued")
    if code:
        return hit, ("lost", log.read_text() if log.exists() else f"exit code {code}")
    return hit, None if _same(_content(run), expected) else ("different", "metrics or weights")


def _faulty(kind: str, rng: random.Random, run: Path, log: Path, duration: float) -> int | None:
    if kind in SIGNALS:
        return _in_a_fork(lambda: _train(run), log, (SIGNALS[kind], rng.uniform(0, duration)))
    if kind == "file size limit":
        size = int(2 ** rng.uniform(0, 18))
        return _in_a_fork(lambda: _limited(run, size), log)
    first = rng.randint(0, 60)
    return _in_a_fork(lambda: _failing(run, ERRORS[kind], first, once=kind == "I/O error"), log)


def _in_a_fork(work: Callable[[], None], log: Path | None = None, stop: tuple[int, float] | None = None) -> int | None:
    """Exit code of a child that does the work, negative for a signal, None if it hangs. Errors that users should not
    see as such go to `log`."""
    child = os.fork()
    if not child:
        os._exit(_exit_code(work, log))
    if stop:
        time.sleep(stop[1])
        os.kill(child, stop[0])  # still there, if only as a zombie, until it is waited for
    taken, began = idle_clock(child), time.monotonic()
    while taken() < SECONDS and time.monotonic() - began < PATIENCE * SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _exit_code(work: Callable[[], None], log: Path | None) -> int:
    warnings.simplefilter("ignore")
    try:
        work()
    except (OSError, Stopped, KeyboardInterrupt):
        return 2
    except BaseException:
        if log is not None:
            log.write_text(traceback.format_exc()[-3000:])
        return 3
    return 0


def _train(run: Path) -> None:
    sw.train(RECIPE, run, device="cpu", checkpoint_minutes=0.02 / 60)


def _limited(run: Path, size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        _train(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _failing(run: Path, number: int, first: int, once: bool) -> None:
    """Train while the calls that change files fail: one of them (`once`), or all from the first on."""
    calls = 0

    def failing(real: Callable[..., Any], writes: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if writes(*arguments, **options):
                calls += 1
                if calls == first + 1 or (calls > first and not once):
                    raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        return call

    def opens_to_write(file: Any, mode: Any = "r", *_: Any, **__: Any) -> bool:
        return isinstance(mode, str) and any(letter in mode for letter in "wax+")

    for name in ("fsync", "replace", "rename", "mkdir"):
        setattr(os, name, failing(getattr(os, name)))
    io.open = failing(io.open, opens_to_write)  # type: ignore[assignment]
    checkpoint.save_file = failing(checkpoint.save_file)  # type: ignore[attr-defined]
    _train(run)


def _content(run: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Records without timings, and the tensors of the last checkpoint."""
    records = [{k: v for k, v in r.as_json().items() if k not in CLOCKS} for r in read_log(run / "metrics.jsonl")[0]]
    stored = checkpoint.newest(run / "checkpoints")
    return json.dumps(records), stored.tensors if stored else {}


def _same(a: tuple[str, dict[str, torch.Tensor]], b: tuple[str, dict[str, torch.Tensor]]) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][k], b[1][k]) for k in a[1])
