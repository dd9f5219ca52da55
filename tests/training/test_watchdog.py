"""Training that makes no progress in its first steps says so; slow training is not ended; a stuck process is."""

import subprocess
import sys
import time
import warnings

import pytest
from torch import nn

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.training.recipe import Recipe
from stairwise.training.watchdog import EXIT_CODE, STEPS, Watchdog

SLOW = {"seconds": 0.0}
RECIPE = Recipe(
    data="digits", views="none", encoder="slow_package:Slow", hidden=[], head_norm=False, d=2, batch=64, steps=6,
    lr=0.01, records=2, window=64, precision="float32", hidden_spectrum=False,
)  # fmt: skip


class Slow(nn.Module):
    """Its passes sleep, as if they were stuck in a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))

    def forward(self, x):
        if self.training:
            time.sleep(SLOW["seconds"])
        return self.net(x)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "slow_package", sys.modules[__name__])


def test_a_slow_first_step_is_told_about_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(SLOW, "seconds", 0.5)
    words = r"step 1 .*no progress.* in forward, .*ONEDNN_MAX_CPU_ISA=AVX .*another version"
    with pytest.warns(RunWarning, match=words):
        run = sw.train(RECIPE, tmp_path, device="cpu", patience=0.2)
    assert run.records[-1].step == 6


@pytest.mark.parametrize(("seconds", "patience"), [(0.0, 60.0), (0.1, 0.0)])
def test_silence(seconds, patience, tmp_path, monkeypatch):
    monkeypatch.setitem(SLOW, "seconds", seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.train(RECIPE, tmp_path, device="cpu", patience=patience)


def test_later_steps_are_not_watched():
    taken = [0]
    with Watchdog(lambda: taken[0], 0.2) as dog:
        taken[0] = STEPS
        dog.thread.join(5)
        assert not dog.thread.is_alive()


def test_patience_is_a_number(tmp_path):
    for wrong in (-1, float("nan"), "long"):
        with pytest.raises(InputError, match="patience"):
            Watchdog(lambda: 0, wrong)


PROGRAM = """
import sys, time
from stairwise.training import watchdog
watchdog.GIVE_UP = 5
def stuck():
    {stuck}
with watchdog.Watchdog(lambda: 0, 0.2):
    stuck()
"""


def test_a_process_in_one_native_call_is_ended_and_python_at_work_is_not():
    def ended(stuck, *arguments):
        command = [sys.executable, "-c", PROGRAM.format(stuck=stuck), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = ended("time.sleep(50)", "--debug")
    assert done.returncode == EXIT_CODE
    assert "in stuck" in done.stderr  # the stack
    assert "error: training was stuck in one call of native code" in done.stderr
    assert ended("end = time.monotonic() + 2\n    while time.monotonic() < end: len(str(end))").returncode == 0
