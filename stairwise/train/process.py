"""Processes, devices and signals around a run."""

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from stairwise.checks import InputError
from stairwise.losses.ranks import world

__all__ = ["StopRequest", "agreed", "choose_device", "launched_rank", "locked", "process_group"]


def choose_device(name: str = "auto") -> torch.device:
    """A device by name; "auto" takes a GPU where there is one, each local process its own."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("device", "must be cpu, cuda or cuda:N", repr(name)) from error
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", "must be cpu, cuda or cuda:N", repr(name))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError("device", "must be present", name, "use --device cpu, or install a CUDA build of torch")
        device = torch.device("cuda", local if device.index is None else device.index)
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise InputError("device", f"must be one of {torch.cuda.device_count()} GPUs", device)
        torch.cuda.set_device(device)
    return device


def launched_rank() -> int:
    """Number of this process among those that torchrun has started, before, in and after their process group."""
    return int(os.environ.get("RANK", 0))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun has started, if it has."""
    mine = "RANK" in os.environ and dist.is_available() and not dist.is_initialized()
    if mine:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        if mine and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process (group) at a time per run folder; the lock ends with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "run folder", "is being trained by another process", folder, "wait, or give another --out"
            ) from None
        yield


def agreed(flag: int, device: torch.device) -> int:
    """The largest flag of any process."""
    if world() == 1:
        return flag
    value = torch.tensor(flag, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request that the loop honours after its step; a second one is final."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> "StopRequest":
        self.before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
