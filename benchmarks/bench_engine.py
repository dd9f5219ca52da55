"""What does a step on small images wait for, and which changes to the engine make it faster?

    python benchmarks/bench_engine.py [--quick] [--seconds 3] [--only base compile …] [--large] [--out FILE.json]

ResNet-18 with the small stem, 32 px, or ResNet-50, 96 px (`--large`); SimCLR, bf16, random smooth images. Rates are
views per second (two per image), medians of five parts, after ten steps.

  step     loss, backward and optimizer on fixed views
  run      the same with new views for every step, as in `stairwise train`
  views    drawing two views of every image, nothing else
  kernels  time on the GPU by kind of kernel, from torch's profiler, and the share of time in which no kernel runs
  team     several runs whose steps are recorded in one graph
  jobs     several processes at once, with and without NVIDIA's multi-process service if that can be started

The last line is JSON.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.bench_train import smooth_images, sync
from benchmarks.race.single import free_memory
from benchmarks.race.team import Team
from stairwise.data.feed import batch_rows
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer
from stairwise.training.recipe import Recipe

PARTS, WARM, JOBS = 5, 10, 3
JOINT = {"loss": "vicreg", "hidden": [1024], "d": 512}
SMALL: dict[str, Any] = {"views": "simclr-small", "encoder_options": {"stem": "small"}}
LARGE: dict[str, Any] = {"views": "simclr", "encoder": "resnet50", "size": 96}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "fused": {"encoder": "benchmarks.fused_norms:{encoder}"},
    "lars": {"optimizer": "lars"},
    "adamw": {"optimizer": "adamw"},
    "muon": {"optimizer": "muon", "momentum": 0.95},
    "vicreg": JOINT,
    "vicreg muon": JOINT | {"optimizer": "muon", "momentum": 0.95},
    "together": {"together": True},
    "channels first": {"channels_last": False},
    "float32": {"precision": "float32"},
    "batch 512": {"batch": 512},
    "batch 1024": {"batch": 1024},
    "compile": {"compile": True},
    "compile together": {"compile": True, "together": True},
    "compile batch 1024": {"compile": True, "batch": 1024},
    "compile muon": {"compile": True, "optimizer": "muon", "momentum": 0.95},
}
KINDS = {  # the first pattern that a kernel's name matches
    "convolution": r"conv|fprop|wgrad|dgrad|implicit",
    "matrix products": r"gemm|cublas|cutlass|nvjet|splitK",
    "batch norm": r"batch_norm|bn_|norm_",
    "compiled": r"triton",
    "copy": r"[Mm]em(cpy|set)|copy",
    "reduce": r"reduce|softmax|cross",
    "elementwise": r"elementwise|vectorized|foreach|multi_tensor",
}


def make(recipe: Recipe, device: torch.device) -> Trainer:
    trainer = Trainer(recipe, Path("unused"), device)  # the folder is only written by Trainer.run
    trainer.objective.train()
    return trainer


def rate(device: torch.device, call: Callable[[], Any], views: int, seconds: float) -> float:
    """Views per second of a call that handles `views` of them: the median of five parts."""
    for _ in range(WARM):
        call()
    sync(device)
    began = perf_counter()
    call()
    sync(device)
    calls = max(1, int(seconds / PARTS / max(perf_counter() - began, 1e-6)))
    rates = []
    for _ in range(PARTS):
        began = perf_counter()
        for _ in range(calls):
            call()
        sync(device)
        rates.append(views * calls / (perf_counter() - began))
    return float(np.median(rates))


def step_call(trainer: Trainer) -> Callable[[], Any]:
    x_a, x_b = trainer.material.pairs.copy().fixed(torch.arange(trainer.material.batch))
    trainer.optimizer.lr.fill_(1e-4)
    return lambda: trainer.take(x_a, x_b, measure=False)


def run_call(trainer: Trainer, ahead: bool = True) -> Callable[[], Any]:
    material = trainer.material
    if ahead:
        pairs = trainer.remaining_pairs()
    else:
        pairs = material.pairs.stream(batch_rows(material.training, material.batch, 0), 0)
    return lambda: trainer.advance(pairs)


def views_call(trainer: Trainer) -> Callable[[], Any]:
    material = trainer.material
    pairs = material.pairs.stream(batch_rows(material.training, material.batch, 0), 0)
    return lambda: next(pairs)


def optimizer_call(trainer: Trainer) -> Callable[[], Any]:
    trainer.optimizer.gradient.normal_()
    trainer.optimizer.lr.fill_(1e-6)
    if trainer.device.type != "cuda":
        return trainer.optimizer.step
    return Recorded(trainer.optimizer.step)


def measure(recipe: Recipe, device: torch.device, seconds: float) -> dict[str, float]:
    """Rates of one variant, and milliseconds per step of its parts."""
    views, began = 2 * recipe.batch, perf_counter()
    trainer = make(recipe, device)
    found = {"step": rate(device, step_call(trainer), views, seconds)}
    found["started in s"] = perf_counter() - began - seconds
    found["run"] = rate(device, run_call(trainer), views, seconds)
    found["views"] = rate(device, views_call(trainer), views, seconds / 3)
    found["optimizer ms"] = 1e3 * views / rate(device, optimizer_call(trainer), views, seconds / 3)
    trainer.close()
    return found


# kernels


def kernels(call: Callable[[], Any], steps: int = 20) -> dict[str, Any]:
    """Milliseconds per step by kind of kernel, the ten largest kernels, and the share of time without any kernel."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    names: dict[str, float] = {}
    for e in events:
        names[e.name] = names.get(e.name, 0.0) + (e.time_range.end - e.time_range.start)
    kinds: dict[str, float] = {}
    for name, duration in names.items():
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, name)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + duration
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    largest = sorted(names.items(), key=lambda item: -item[1])[:10]
    return {
        "wall ms": whole / steps / 1e3,
        "no kernel": 1 - busy / whole,
        "kinds ms": {k: v / steps / 1e3 for k, v in sorted(kinds.items(), key=lambda item: -item[1])},
        "largest ms": [[name[:90], duration / steps / 1e3] for name, duration in largest],
    }


# several processes


@contextmanager
def multi_process_service(folder: str) -> Iterator[dict[str, str] | None]:
    """Environment of processes that share the GPU through a service of our own; None if it cannot be started."""
    program = shutil.which("nvidia-cuda-mps-control")
    environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    if program is None or subprocess.run([program, "-d"], env=environment, check=False).returncode:
        yield None
        return
    try:
        yield environment
    finally:
        with suppress(subprocess.TimeoutExpired):  # it ends with the machine, too
            subprocess.run([program], input="quit\n", text=True, env=environment, check=False, timeout=30)


def jobs_rate(count: int, seconds: float, environment: dict[str, str] | None, large: bool) -> float:
    """Sum of the rates of several processes that train at once; they start measuring at an agreed time."""
    at = perf_counter() + 25  # CLOCK_MONOTONIC, the same in all processes
    command = [sys.executable, "-m", "benchmarks.bench_engine", "--job-at", str(at), "--seconds", str(seconds)]
    command += ["--large"] if large else []
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return sum(float(job.communicate(timeout=120)[0].splitlines()[-1]) for job in running)


def team_rate(recipe: Recipe, device: torch.device, count: int, seconds: float) -> float:
    """Sum of the rates of several runs whose steps are recorded in one graph."""
    team = Team([make(replace(recipe, seed=i), device) for i in range(count)])
    return rate(device, team.advance, 2 * recipe.batch * count, seconds)


def job(recipe: Recipe, device: torch.device, at: float, seconds: float) -> float:
    trainer = make(recipe, device)
    call = run_call(trainer)
    for _ in range(WARM):
        call()
    sync(device)
    steps = 0
    while perf_counter() < at:
        call()
        sync(device)
    while perf_counter() < at + seconds:
        for _ in range(10):
            call()
        sync(device)
        steps += 10
    return 2 * recipe.batch * steps / (perf_counter() - at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a narrow network, to try the script")
    parser.add_argument("--seconds", type=float, default=3.0, help="per rate")
    parser.add_argument(
        "--only", nargs="+", choices=[*VARIANTS, "kernels", "ahead", "team", "jobs"], help="measure only these"
    )
    parser.add_argument("--large", action="store_true", help="ResNet-50 and 96 px instead of ResNet-18 and 32 px")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job-at", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "images.npy"
        np.save(stored, smooth_images(4096, 96 if options.large else 32))
        recipe = Recipe(
            **{"data": f"array:{stored}", "steps": 10**6},
            **(LARGE if options.large else SMALL),
            **{"loss": "simclr", "hidden": [512], "d": 128, "batch": 256, "lr": 1e-4, "records": 1},
        )
        if options.quick:
            recipe = replace(recipe, encoder_options=recipe.encoder_options | {"width": 4}, batch=32)
        if options.job_at:
            print(job(recipe, device, options.job_at, options.seconds))
            return
        found = everything(recipe, device, options)
    print(json.dumps(found))


def everything(recipe: Recipe, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements, added to those in the file.

    Those that may fail come last: a failed recording leaves the device unusable for a process.
    """
    wanted = options.only or [*VARIANTS, "ahead", "team", *(["kernels", "jobs"] if device.type == "cuda" else [])]
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"

    def attempt(name: str, work: Callable[[], Any]) -> None:
        try:
            found[name] = work()
        except Exception:
            print(f"{name} failed: {traceback.format_exc()[-800:]}", flush=True)
            return
        finally:
            free_memory(device)
        words = found[name] if isinstance(found[name], dict) else {"": found[name]}
        print(f"{name:<24}" + "  ".join(f"{k} {v:,.2f}" for k, v in words.items() if isinstance(v, float)), flush=True)
        if options.out:  # what was measured stays if the rest is killed
            options.out.write_text(json.dumps(found, indent=1) + "\n")

    def variants(compiled: bool) -> None:
        for name in (n for n in VARIANTS if n in wanted and n.startswith("compile") == compiled):
            changes = VARIANTS[name] | ({"batch": 64} if options.quick and "batch" in VARIANTS[name] else {})
            if "encoder" in changes:
                changes["encoder"] = changes["encoder"].format(encoder=recipe.encoder)
            attempt(name, lambda c=changes: measure(replace(recipe, **c), device, options.seconds))

    variants(compiled=False)
    if "ahead" in wanted:
        views = 2 * recipe.batch
        attempt("views in order", lambda: rate(device, run_call(make(recipe, device), False), views, options.seconds))
    if "kernels" in wanted:
        for name in ("base", "muon"):
            trained = replace(recipe, **VARIANTS[name])
            attempt(f"kernels of {name}", lambda r=trained: kernels(step_call(make(r, device))))
        attempt("kernels of views", lambda: kernels(views_call(make(recipe, device))))
    if "jobs" in wanted:
        attempt(f"{JOBS} jobs", lambda: jobs_rate(JOBS, options.seconds, None, options.large))
        with tempfile.TemporaryDirectory() as pipes, multi_process_service(pipes) as environment:
            if environment:
                attempt(f"{JOBS} jobs, service", lambda: jobs_rate(JOBS, options.seconds, environment, options.large))
    if "team" in wanted:
        for count in (3, 5):
            attempt(f"{count} runs in one graph", lambda n=count: team_rate(recipe, device, n, options.seconds))
    variants(compiled=True)
    if "kernels" in wanted and "compile" in found:
        trained = replace(recipe, **VARIANTS["compile"])
        attempt("kernels of compile", lambda: kernels(step_call(make(trained, device))))
    return found


if __name__ == "__main__":
    main()
