"""One clock for all benchmarks: it waits for a GPU before it is read."""

import sys
from time import perf_counter


def now(device):
    """Seconds, after all work on the device is done; device: "cpu", "cuda" or a torch.device."""
    if "torch" in sys.modules and not str(device).startswith("cpu"):
        sys.modules["torch"].cuda.synchronize()
    return perf_counter()


def timed(call, device):
    """Seconds that a call takes, and its result."""
    started = now(device)
    result = call()
    return now(device) - started, result
