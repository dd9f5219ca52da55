"""Defects of torch that this package steps around. `python -m stairwise.defects` says which of them this machine shows.

When torch mends one, its test in `tests/test_defects.py` says so: then remove the way around it and its entry here.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

MENDED, SHOWS, UNSUITED = 0, 1, 77  # exit codes of a reproducer; any other one is a crash, which shows the defect too
SECONDS = 30.0  # a reproducer that takes longer is in an endless loop; without the defect it takes about 2 s


@dataclass(frozen=True)
class Defect:
    """What is wrong, where it was seen, how we step around it, and a program that shows it.

    `settings` are environment variables under which a machine shows the defect that otherwise would not.
    """

    what: str
    torch: str
    machines: str
    way_around: str
    upstream: str
    reproducer: str
    settings: Mapping[str, str] = field(default_factory=dict)


_STRIDED_CONVOLUTION = """
import sys, torch
from torch.nn import functional as F
if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
    sys.exit(77)
torch.manual_seed(0)
def gradient(x, w):
    w = w.clone().requires_grad_()
    F.conv2d(x, w, stride=2).square().sum().backward()
    return w.grad
for channels in (4, 1, 2, 3, 5, 6, 7):
    x, w = torch.randn(32, channels, 32, 32), torch.randn(8, channels, 1, 1)
    right = gradient(x, w)
    wrong = gradient(*(v.contiguous(memory_format=torch.channels_last) for v in (x, w)))
    if not torch.allclose(right, wrong, rtol=1e-3, atol=1e-3 * float(right.abs().max())):
        sys.exit(1)
"""

_BATCH_NORM = """
import itertools, torch
torch.manual_seed(0)
for channels, side, kind in itertools.product((3, 4, 8, 64), (1, 6, 16), (torch.float32, torch.float64)):
    norm = torch.nn.BatchNorm2d(channels).eval().to(kind)
    x = torch.randn(8, channels, side, side, dtype=kind).contiguous(memory_format=torch.channels_last).requires_grad_()
    norm(x).square().sum().backward()
"""

_PADDED_POOL = """
import sys, torch
from torch.nn import functional as F
if not torch.cuda.is_available():
    sys.exit(77)
torch.manual_seed(0)
def gradient(x):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    F.avg_pool2d(x, 3, 1, 1).square().sum().backward()
    return x.grad
x = torch.randn(2, 4, 6, 6, device="cuda")
sys.exit(not torch.allclose(gradient(x), gradient(x.contiguous(memory_format=torch.channels_last)), atol=1e-4))
"""

DEFECTS = {
    "strided 1 × 1 convolutions": Defect(
        "gradients of strided 1 × 1 convolutions of fewer than 8 input channels on channels-last images are wrong, "
        "crash or loop for ever",
        "2.13",
        "CPUs without AVX-512 (oneDNN's jit_1x1:avx2)",
        "on a CPU, images and weights are contiguous: `data/augment.py` (`_laid_out`) and `training/loop.py`",
        "https://github.com/uxlfoundation/oneDNN/issues/6035",
        _STRIDED_CONVOLUTION,
        {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    ),
    "batch norm in evaluation mode": Defect(
        "the backward pass of batch norm in evaluation mode crashes on channels-last images",
        "2.13",
        "some CPUs",
        "tangent kernels take contiguous images on a CPU: `ntk/empirical.py` (`_prepared`)",
        "",
        _BATCH_NORM,
    ),
    "padded average pools": Defect(
        "gradients of padded average pools on channels-last images are wrong",
        "2.13",
        "CUDA",
        "tangent kernels compare convolutions by products with torch's: `ntk/trial.py`",
        "https://github.com/pytorch/pytorch/issues/188344",
        _PADDED_POOL,
    ),
}


def state(defect: Defect, threads: int = 1, settings: Mapping[str, str] | None = None) -> int:
    """MENDED, SHOWS or UNSUITED (the machine lacks what the reproducer needs), found in a process of its own.

    `settings` replace those of the defect; {} asks about this machine as it is.
    """
    chosen = defect.settings if settings is None else settings
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **chosen}
    try:
        done = subprocess.run(
            [sys.executable, "-c", defect.reproducer], env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return SHOWS
    if b"Traceback" in done.stderr:
        raise RuntimeError(f"the reproducer itself failed: {done.stderr.decode(errors='replace')}")
    return done.returncode if done.returncode in (MENDED, UNSUITED) else SHOWS


def main() -> None:
    """Print each defect and whether this machine shows it."""
    words = {MENDED: "not on this machine", SHOWS: "shows on this machine", UNSUITED: "cannot be tried here"}
    for name, defect in DEFECTS.items():
        print(f"{name}: {words[state(defect, settings={})]}\n  {defect.what}")
        print(f"  seen with torch {defect.torch} on {defect.machines}\n  stepped around: {defect.way_around}")
        if defect.upstream:
            print(f"  {defect.upstream}")


if __name__ == "__main__":
    main()
