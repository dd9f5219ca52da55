"""What does Muon cost, as a share of a step of training?

    python benchmarks/bench_muon.py [--device cuda] [--only resnet18] [--quick] [--steps 100] [--rounds 5]

Barlow Twins, bf16 autocast, channels-last, the whole step as one CUDA graph, random images: ResNet-18 at 32 px and
ResNet-50 at 96 px, both with batch 256. Every row is timed in turn, in each of several rounds; medians.

  none     passes, loss and backward, without an update
  sgd, lars, muon
  fixed    muon with scaling = "fixed"
  serial   muon with its stacks one after the other, on one stream
  equal    muon that stacks equal shapes only, without padding
  naive    muon with one Newton–Schulz iteration after the other, as usually written
  sw.Muon  the optimizer for anybody's loop, recorded with the rest of the step; gradients lie one after the other
  apart    the same with every gradient in memory of its own, as in most loops

`cost` is 1 − time of none / time of the row; `alone` is the update alone, recorded too. `sw.Muon` is also timed alone
in an ordinary loop, without recording. The last line is JSON; --out also writes it to a file.
"""

import argparse
import json
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest.mock import patch

import numpy as np
import torch

import stairwise as sw
from stairwise.files import save_json
from stairwise.training import newton_schulz, optimizer
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer
from stairwise.training.recipe import Recipe

ROWS = ("none", "sgd", "lars", "muon", "fixed", "serial", "equal", "naive", "sw.Muon", "apart")
BASE = Recipe(
    data="photos", views="barlow", hidden=[512], d=128, batch=256, optimizer="lars", lr=1e-3, lr_bias=1e-3, steps=10
)


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def polar_of_one(x):
    """The iteration for one matrix, as in torch.optim.Muon."""
    a, b, c = newton_schulz.QUINTIC
    x = x.to(newton_schulz.default_dtype(x.device))
    x = x.mT if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(newton_schulz.STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def descend_one_by_one(weights, updates, rate, scaling, lengths):
    for w, u, length in zip(weights, updates, lengths, strict=True):
        o = polar_of_one(u)
        o = o.mT if u.shape[0] > u.shape[1] else o
        w.sub_(rate * length * o / o.norm())


def in_order(calls):
    for call in calls:
        call()


def variant(row):
    """Settings of the recipe, and a patch that makes the row what its name says."""
    patches = {
        "serial": lambda: patch.object(newton_schulz, "in_parallel", in_order),
        "equal": lambda: patch.object(newton_schulz, "PADDING", 0.0),
        "naive": lambda: patch.object(optimizer, "descend", descend_one_by_one),
    }
    kind = {"sgd": "sgd", "lars": "lars", "sw.Muon": "sgd", "apart": "sgd"}.get(row, "muon")
    scaling = "fixed" if row == "fixed" else "relative"
    return {"optimizer": kind, "scaling": scaling}, patches.get(row, nullcontext)


def recorded(work, device):
    return Recorded(work) if device.type == "cuda" else work


def prepared(recipe, row, device, folder):
    """Two calls: a whole step of training, and the update alone."""
    settings, patched = variant(row)
    trainer = Trainer(replace(recipe, **settings), folder, device)
    trainer.objective.train()
    trainer.optimizer.lr.fill_(1e-4)
    x_a, x_b = trainer.material.pairs.fixed(torch.arange(recipe.batch))
    if row == "none":
        trainer.optimizer.step = trainer.optimizer.gradient.norm
    gradients = [trainer.optimizer.gradient]
    if row == "apart":  # the trainer zeroes only its own vector: these add up over steps, at no cost in time
        for p in trainer.network.parameters():
            p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in trainer.network.parameters()]
    if row in ("sw.Muon", "apart"):
        ours = sw.Muon(trainer.network.parameters(), lr=torch.full((), 1e-4, device=device))

        def step():
            ours.step()
            return trainer.optimizer.gradient.norm()  # as the recipe's optimizers do

        trainer.optimizer.step = step
    take, update = recorded(trainer.step, device), recorded(trainer.optimizer.step, device)
    with patched():  # recordings keep what was patched
        for _ in range(5 if device.type == "cuda" else 1):
            take(x_a, x_b, measure=False)
        for _ in range(5 if device.type == "cuda" else 1):
            for gradient in gradients:
                gradient.normal_()
            update()
    calls = partial(take, x_a, x_b, measure=False), update
    return [(call, patched) for call in calls], trainer


def seconds(call, patched, device, steps):
    """Seconds per call; on a CPU, where nothing was recorded, the patch holds now."""
    with patched() if device.type != "cuda" else nullcontext():
        sync(device)
        started = perf_counter()
        for _ in range(steps):
            call()
        sync(device)
        return (perf_counter() - started) / steps


def eager_seconds(network, device, steps, **options):
    """Seconds per step of `sw.Muon` in an ordinary loop, the update alone."""
    ours = sw.Muon(network.parameters(), lr=1e-4, **options)
    for p in network.parameters():
        p.grad = torch.randn_like(p)
    return min(seconds(ours.step, nullcontext, device, max(1, steps // 5)) for _ in range(4))


def angle(network_shapes, device):
    """Cosine between our polar factors and exact ones, for matrices of these shapes; the least."""
    cosines = []
    for shape in sorted(set(network_shapes)):
        u, w = torch.randn(shape, device=device), torch.zeros(shape, device=device)
        newton_schulz.descend([w], [u], torch.ones((), device=device), "keller")
        left, _, right = torch.linalg.svd(u, full_matrices=False)
        cosines.append(float(torch.nn.functional.cosine_similarity(-w.flatten(), (left @ right).flatten(), dim=0)))
    return min(cosines)


def measure(name, recipe, device, steps, rounds):
    with tempfile.TemporaryDirectory() as folder:
        ready = {row: prepared(recipe, row, device, Path(folder) / row) for row in ROWS}
        times = {row: ([], []) for row in ROWS}
        for _ in range(rounds):
            for row, (calls, _) in ready.items():
                for taken, (call, patched) in zip(times[row], calls, strict=True):
                    taken.append(seconds(call, patched, device, steps))
        trainer = ready["muon"][1]
        shapes = [tuple(w.shape) for w in trainer.optimizer.matrices]
        stacks = newton_schulz.plan(tuple(shapes), newton_schulz.padding_on(device))
        work = sum(newton_schulz.operations(*s.shape) * len(s.members) for s in stacks)
        found = {
            "matrices": len(shapes),
            "stacks": len(stacks),
            "gigaflop": work / 1e9,
            "cosine": angle(shapes, device),
        }
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
        without = median(times["none"][0])
        for row, (whole, alone) in times.items():
            step, update = median(whole), median(alone)
            spread = (max(whole) - min(whole)) / step
            found[row] = {"step_ms": 1e3 * step, "cost": 1 - without / step, "alone_ms": 1e3 * update}
            print(
                f"  {row:<8} {1e3 * step:>9.3f} ms a step (spread {spread:.1%}), cost {1 - without / step:>6.1%}, "
                f"alone {1e3 * update:>8.3f} ms, {2 * recipe.batch / step:>9,.0f} views/s",
                flush=True,
            )
        for row, options in (("together", {}), ("one by one", {"foreach": False})):
            took = eager_seconds(trainer.network, device, steps, **options)
            found[f"sw.Muon {row}"] = {"alone_ms": 1e3 * took}
            print(f"  sw.Muon, not recorded, {row:<10} {1e3 * took:>9.3f} ms an update", flush=True)
        for _, closing in ready.values():
            closing.close()
    return found


def rounded(value):
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else round(value, 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="narrow networks and a small batch, to try the script")
    parser.add_argument("--only", choices=("resnet18", "resnet50"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = device.type == "cuda"  # as in training
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for encoder, size, settings in (
            ("resnet18", 32, {"encoder_options": {"stem": "small"}}),
            ("resnet50", 96, {"hidden": [2048], "d": 512}),
        ):
            if options.only not in (None, encoder):
                continue
            size = 32 if options.quick else size
            stored = Path(folder) / f"{size}.npy"
            np.save(stored, np.random.default_rng(0).integers(0, 256, (512, size, size, 3), dtype=np.uint8))
            recipe = replace(BASE, data=f"array:{stored}", encoder=encoder, **settings)
            if options.quick:
                narrow = {**recipe.encoder_options, "width": 8}
                recipe = replace(recipe, encoder_options=narrow, hidden=[32], d=16, batch=16)
            name = f"{encoder}, {size} px, batch {recipe.batch}"
            found[encoder] = measure(name, recipe, device, options.steps, options.rounds)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if device.type == "cuda" else options.device
    result = {"device": name, **rounded(found)}
    if options.out:
        save_json(options.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
