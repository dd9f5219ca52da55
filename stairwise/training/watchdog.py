"""Say so when the first steps of a training make no progress: torch may be stuck in a kernel that never returns."""

import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from types import FrameType

import torch

from stairwise.checks import RunWarning, number
from stairwise.defects import DEFECTS

STEPS = 3  # steps to watch; a kernel that returned for these returns for the others
GIVE_UP = 180  # times `patience`: six hours in one native call, by default
EXIT_CODE = 4


class Watchdog:
    """A context that watches `steps_taken()` in a thread until STEPS are taken, and tells once after `patience` seconds
    without progress.

    Slow training is only told about. The process is ended, with EXIT_CODE, only if its main thread has been in one and
    the same native call for GIVE_UP × patience seconds: then no signal handler runs either. A patience of 0 disables
    all of this. Native code that holds Python's lock also stops the watchdog; torch's does not hold it.
    """

    def __init__(self, steps_taken: Callable[[], int], patience: float, on_cpu: bool = True) -> None:
        self.steps_taken, self.patience, self.on_cpu = steps_taken, number(patience, "patience", least=0), on_cpu
        self.watched = threading.current_thread()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.patience:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        if self.patience:
            self.thread.join()

    def _watch(self) -> None:
        first = taken = self.steps_taken()
        since = moved = time.monotonic()
        place, told = self._place(), False
        while not self.done.wait(min(1.0, self.patience / 10)):
            now, steps, here = time.monotonic(), self.steps_taken(), self._place()
            if steps - first >= STEPS:
                return
            if steps != taken:
                taken, since = steps, now
            if here != place:
                place, moved = here, now
            if now - since > self.patience and not told:
                told = True
                self._tell(now - since, steps - first)
            if now - max(since, moved) > GIVE_UP * self.patience and self.watched is threading.main_thread():
                self._end(now - max(since, moved))

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self.watched.ident or 0)

    def _place(self) -> tuple[int, int]:
        """Where Python is; the same twice if it was in one call, or if it came back to it."""
        frame = self._frame()
        return (id(frame), frame.f_lasti) if frame else (0, 0)

    def _tell(self, seconds: float, taken: int) -> None:
        stuck = f"step {taken + 1} of this training has made no progress for {seconds:.0f} s {self._where()}"
        # not warn(): its filters belong to the other thread, and one that raises would only end this one
        warnings.showwarning(RunWarning(f"{stuck}; {self._why()}"), RunWarning, __file__, 0)
        if frame := self._stack_is_asked_for():
            sys.stderr.write("".join(traceback.format_stack(frame)))

    def _where(self) -> str:
        summary = traceback.extract_stack(self._frame())
        last = summary[-1] if summary else None
        return f"(Python is in {last.name}, {last.filename}:{last.lineno})" if last else ""

    def _why(self) -> str:
        slow = "it goes on, since it may only be slow (a smaller batch is faster; --patience 0 silences this)"
        if not self.on_cpu:
            return slow
        known = DEFECTS["strided 1 × 1 convolutions"]
        cpu = f"{known.machines}; this CPU: {torch.backends.cpu.get_cpu_capability()}"
        return (
            f"{slow}. If it never ends, torch {torch.__version__} may be stuck: {known.what} ({cpu}). "
            "Then set ONEDNN_MAX_CPU_ISA=AVX in the environment, keep images and weights out of channels_last, or try "
            "another version of torch; `python -m stairwise.defects` tries this machine, --debug shows the stack"
        )

    def _stack_is_asked_for(self) -> FrameType | None:
        return self._frame() if "--debug" in sys.orig_argv else None  # commands no longer have it in sys.argv

    def _end(self, seconds: float) -> None:
        sys.stderr.write(
            f"error: training was stuck in one call of native code for {seconds:.0f} s {self._where()} and was ended "
            f"with exit code {EXIT_CODE}; {self._why()}\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_CODE)
