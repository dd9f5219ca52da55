"""Which batch norm is fastest for images of 32 px in half precision?

    python -m benchmarks.bench_norms [--only error native cudnn contiguous fused steps] [--out FILE.json]

  error       largest relative error of a gradient of ResNet-18 with fused norms, against torch's, in float32

Milliseconds of all 20 norms of ResNet-18 with their ReLUs, forward and backward, for one view of 256 images, as a CUDA
graph:

  native      torch's own kernels for bf16 in channels-last order, which training uses
  cudnn       cuDNN's, which torch takes for float16 with float32 parameters, but never for bf16
  contiguous  native, in the order (N, C, H, W)
  fused       benchmarks/fused_norms.py: norm and ReLU in triton's kernels
  steps       views per second of whole steps (VICReg, Muon): as they are, with fused norms, and at 20 and 24 px;
              with both views as one batch; compiled, with the passes of the two views one after the other and on two
              streams

The last line is JSON. Each part is measured in a process of its own, of 90 s at most, so that one that fails or hangs
does not end the others.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bench_engine import JOINT, make, rate, step_call
from benchmarks.bench_train import smooth_images
from stairwise.training.graph import Recorded, on_two_streams
from stairwise.training.recipe import Recipe

BATCH = 256
SHAPES = {(64, 32): 5, (128, 16): 5, (256, 8): 5, (512, 4): 5}  # channels and side of the norms of ResNet-18: how many
NORMS = ("native", "cudnn", "contiguous", "fused")
FUSED = {"encoder": "benchmarks.fused_norms:resnet18"}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": FUSED,
    "plain 24 px": {"size": 24},
    "plain 20 px": {"size": 20},
    "fused 24 px": FUSED | {"size": 24},
    "fused 20 px": FUSED | {"size": 20},
    "fused, one batch": FUSED | {"together": True},
    "fused 24 px, one batch": FUSED | {"size": 24, "together": True},
    "plain batch 512": {"batch": 512},
    "fused batch 512": FUSED | {"batch": 512},
    "compiled": {"compile": True},
    "compiled, two streams": {"compile": True},
}
LIMIT = 90  # seconds of a part


def norm_of(kind: str, channels: int, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The module, whose parameters get gradients, and norm with ReLU."""
    norm = nn.BatchNorm2d(channels).to(device)
    if kind == "fused":
        from benchmarks.fused_norms import fused

        return norm, lambda x: fused(norm, x, relu=True)
    return norm, lambda x: torch.relu(norm(x))


def time_of_norms(kind: str, device: torch.device, seconds: float) -> float:
    """Milliseconds of all norms of the network."""
    dtype = torch.float16 if kind == "cudnn" else torch.bfloat16
    order = torch.contiguous_format if kind == "contiguous" else torch.channels_last
    total = 0.0
    for (channels, side), count in SHAPES.items():
        norm, work = norm_of(kind, channels, device)
        for p in norm.parameters():
            p.grad = torch.zeros_like(p)
        shape = BATCH, channels, side, side
        x, dy = (torch.randn(shape, device=device).to(dtype).contiguous(memory_format=order) for _ in range(2))
        x.requires_grad_()
        x.grad = torch.zeros_like(x)

        def both(work: Callable[[Tensor], Tensor] = work, x: Tensor = x, dy: Tensor = dy) -> None:
            x.grad = None
            work(x).backward(dy)

        total += count * 1e3 / rate(device, Recorded(both) if device.type == "cuda" else both, 1, seconds)
    return total


def error_of_fused(device: torch.device) -> float:
    """Largest relative error of the gradients of a network's parameters, against torch's norms."""
    from benchmarks import fused_norms
    from stairwise.nets import resnet

    torch.manual_seed(0)
    side, width = (24, 64) if device.type == "cuda" else (8, 2)
    plain, other = (net("small", width).to(device) for net in (resnet.resnet18, fused_norms.resnet18))
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1 * p.std().nan_to_num(1.0) * torch.randn_like(p))  # norms and biases that differ by channel
    other.load_state_dict(plain.state_dict())
    x = torch.randn(64, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    for net in (plain, other):
        h = net.train()(x)
        (h * torch.linspace(-1, 1, h.numel(), device=device).view_as(h)).sum().backward()
    pairs = zip(plain.parameters(), other.parameters(), strict=True)
    return max(float((p.grad - q.grad).norm() / p.grad.norm()) for p, q in pairs if p.grad is not None)


def embed_on_two_streams(objective: Any) -> Callable[..., tuple[Tensor, ...]]:
    """`objective.embed` with compiled passes at the same time; both write the running averages, so only for time."""

    def embed(x_a: Tensor, x_b: Tensor, together: bool) -> tuple[Tensor, ...]:
        if x_a.is_cuda and torch.cuda.is_current_stream_capturing():
            (h_a, z_a), (h_b, z_b) = on_two_streams(lambda: objective.compiled(x_a), lambda: objective.compiled(x_b))
        else:
            (h_a, z_a), (h_b, z_b) = objective.compiled(x_a), objective.compiled(x_b)
        return h_a, z_a, h_b, z_b

    return embed


def rate_of_steps(name: str, device: torch.device, seconds: float) -> float:
    """Views per second of updates on fixed views."""
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "images.npy"
        np.save(stored, smooth_images(2048, 32))
        recipe = Recipe(
            **{"data": f"array:{stored}", "views": "simclr-small", "encoder_options": {"stem": "small"}},
            **{"steps": 10**6, "batch": BATCH, "lr": 1e-4, "records": 1, "optimizer": "muon", "momentum": 0.95},
            **JOINT,
        )
        recipe = replace(recipe, **STEPS[name])
        if device.type == "cpu":  # to try the script
            recipe = replace(recipe, encoder_options={"stem": "small", "width": 2}, batch=8, compile=False)
        trainer = make(recipe, device)
        if "two streams" in name:
            trainer.objective.embed = embed_on_two_streams(trainer.objective)  # type: ignore[method-assign]
        found = rate(device, step_call(trainer), 2 * recipe.batch, seconds)
        trainer.close()
    return found


def part(name: str, seconds: float) -> float:
    """One measurement, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = device.type == "cuda"
    kind, _, what = name.partition(": ")
    if kind == "error":
        torch.backends.cudnn.allow_tf32 = False
        return error_of_fused(device)
    return rate_of_steps(what, device, 5 * seconds) if kind == "steps" else time_of_norms(kind, device, seconds)


def measured(name: str, seconds: float) -> float | str:
    """One measurement in a new process, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.bench_norms", "--part", name, "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    except subprocess.TimeoutExpired:
        return f"no result after {LIMIT} s"
    except subprocess.CalledProcessError as error:
        return f"failed: {error.stderr[-600:]}"
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["error", *NORMS, "steps", *STEPS], help="measure only these")
    parser.add_argument("--seconds", type=float, default=0.3, help="per norm; steps take five times as long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(part(options.part, options.seconds))
        return
    wanted = options.only or ["error", *NORMS, "steps"]
    names = [name for name in ("error", *NORMS) if name in wanted]
    names += [f"steps: {name}" for name in STEPS if name in wanted or "steps" in wanted]
    found: dict[str, float | str] = {}
    for name in names:
        found[name] = measured(name, options.seconds)
        shown = found[name] if isinstance(found[name], str) else f"{found[name]:,.6g}"
        print(f"{name:<32}{shown}", flush=True)
        if options.out:  # what was measured stays if the rest is killed
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
