"""Run command lines: in this process, or in one of their own."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import warnings

import pytest

from stairwise.cli import main

COMMAND = [sys.executable, "-m", "stairwise"]


def settings(cwd, environment):
    return {"STAIRWISE_DATA": str(cwd / "data"), "COLUMNS": "200", "NO_COLOR": "1", **environment}


def alone(*arguments, cwd, **environment):
    """Run a command line in a process of its own."""
    env = os.environ | settings(cwd, environment)
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, env=env, timeout=300)


def stairwise(*arguments, cwd, **environment):
    """Run a command line in this process, because starting Python takes longer than most commands."""
    out, err, code, interrupt = io.StringIO(), io.StringIO(), 0, signal.getsignal(signal.SIGINT)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(cwd),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("default")  # not errors, as in other tests: commands print them as notes
        patch.setattr(sys, "argv", ["stairwise", *map(str, arguments)])
        for name, value in settings(cwd, environment).items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        finally:
            signal.signal(signal.SIGINT, interrupt)
    return subprocess.CompletedProcess(arguments, code or 0, out.getvalue(), err.getvalue())
