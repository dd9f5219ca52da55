"""How much time does monitoring cost? Steps with and without a monitor alternate in one run.

    python benchmarks/bench_monitor.py [--device cuda] [--steps 150] [--rounds 6] [--size 224] [--only hooks]

On a GPU: ResNet-50, 96 px (or 224), batch 256, d = 512 and h = 2048, bf16 autocast. On a CPU: ResNet-18 of half
the width, 32 px, batch 64, d = 128 and h = 256. The monitor is updated in each step and decomposes every 50 steps.

  hooks    a user's training loop: eager steps, `SpectrumMonitor.attach(loss=…, backbone=…)`
  graph    stairwise's training loop: the step as one CUDA graph, measured in each step (GPU only)

Both alternate every ten steps. The last line is JSON with the cost relative to the step time.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import stairwise as sw
from stairwise.nets.encoder import build_encoder, build_network
from stairwise.runs.record import Record
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer
from stairwise.training.recipe import Recipe

EVERY, TURN = 50, 10


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_step(step, steps, device):
    sync(device)
    started = perf_counter()
    for _ in range(steps):
        step()
    sync(device)
    return (perf_counter() - started) / steps


def in_turns(plain, watched, steps, rounds, device):
    """Seconds per step without and with the monitor, and its relative cost. Turns are short, because speed drifts."""
    for step in (plain, watched):
        seconds_per_step(step, min(steps, EVERY), device)
    turns = [[seconds_per_step(step, TURN, device) for step in (plain, watched)] for _ in range(rounds * steps // TURN)]
    alone, with_it = np.mean(turns, axis=0)
    return alone, with_it, with_it / alone - 1


class Loop:
    """A user's training loop; `watched` attaches the monitor."""

    def __init__(self, device, watched, folder, size):
        torch.manual_seed(0)
        large = device.type == "cuda"
        name, batch, d = ("resnet50", 256, 512) if large else ("resnet18", 64, 128)
        encoder = build_encoder(name, {} if large else {"stem": "small", "width": 32})
        network = build_network(encoder, torch.zeros(2, 3, size, size), [2048 if large else 512], d)
        self.network = network.to(device, memory_format=torch.channels_last).train()
        self.x = torch.rand(2, batch, 3, size, size, device=device)
        self.criterion, self.device = sw.losses.BarlowTwins(), device
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-4, momentum=0.9)
        if watched:
            self.watch = sw.SpectrumMonitor().attach(
                loss=self.criterion, backbone=self.network.backbone, optimizer=self.optimizer, log=folder, every=EVERY
            )

    def step(self):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            z_a, z_b = (self.network(x.contiguous(memory_format=torch.channels_last))[1] for x in self.x)
            loss = self.criterion(z_a, z_b)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def recorded(device, folder, measure, size):
    """The step of `Trainer` as a CUDA graph; with `measure`, updated in each step and decomposed every 50 steps."""
    pixels = Path(folder) / "images.npy"
    np.save(pixels, np.random.default_rng(0).integers(0, 255, (512, size, size, 3), dtype=np.uint8))
    recipe = Recipe(
        data=f"array:{pixels}", views="barlow", encoder="resnet50", hidden=[2048], d=512, batch=256, lr=1e-4
    )
    trainer = Trainer(recipe, Path(folder), device)
    trainer.resume()
    trainer.objective.train()
    trainer.optimizer.lr.fill_(1e-4)
    x_a, x_b = trainer.material.pairs.fixed(torch.arange(256))
    take, done = Recorded(trainer.step), [0]

    def step():
        take(x_a, x_b, measure=measure)
        done[0] += 1
        if measure and done[0] % EVERY == 0:
            trainer.recorder.write(Record(step=done[0], t=0.0), spectrum=True)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size", type=int, help="pixels; default 96, on a CPU 32")
    parser.add_argument("--only", choices=("hooks", "graph"))
    options = parser.parse_args()
    device = torch.device(options.device)
    summary, size = {}, options.size or (96 if device.type == "cuda" else 32)
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b, ExitStack() as done:
        pairs = {}
        if options.only != "graph":
            loops = [Loop(device, watched, a, size) for watched in (False, True)]
            done.callback(loops[1].watch.close)
            pairs["hooks"] = [loop.step for loop in loops]
        if device.type == "cuda" and options.only != "hooks":
            pairs["graph"] = [recorded(device, folder, measure, size) for folder, measure in ((a, False), (b, True))]
        for name, (plain, watched) in pairs.items():
            alone, with_it, cost = in_turns(plain, watched, options.steps, options.rounds, device)
            print(
                f"{name:<8} {1e3 * alone:8.2f} ms per step, watched {1e3 * with_it:8.2f} ms: {100 * cost:+.2f} %",
                flush=True,
            )
            summary[f"{name}_cost"] = round(cost, 5)
        summary["pixels"] = size
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
