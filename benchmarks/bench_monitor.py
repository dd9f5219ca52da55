"""How much time does monitoring cost? Steps with and without a monitor alternate in one run.

    python benchmarks/bench_monitor.py [--device cuda] [--d 512 2048 8192] [--steps 150] [--rounds 6] [--size 224]

On a GPU: ResNet-50, 96 px (or 224), batch 256, d = 512 and h = 2048, bf16 autocast. On a CPU: ResNet-18 of half
the width (`--width`), 32 px, batch 64, d = 128 and h = 256. The monitor is updated in each step and makes a record
every 50 steps.

  hooks    a user's training loop: eager steps, `SpectrumMonitor.attach(loss=…, backbone=…)`
  graph    stairwise's training loop: the step as one CUDA graph, measured in each step (GPU only); Barlow Twins, so
           records have a third spectrum of z, that of standardized embeddings

Both alternate every ten steps, on a GPU every fifty. Memory is the most that a monitor alone takes while it sums
embeddings in float32 and makes two records: sums, bases, embeddings that wait, and all that is needed for a moment, on
any stream. (The difference of the peaks of both loops would leave out what is taken between two steps.) Then come the
seconds from the last step to the last record. The last line is JSON with the cost relative to the step time. ± is the
standard error over turns.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch

import stairwise as sw
from stairwise.nets.encoder import build_encoder, build_network
from stairwise.runs.record import Record
from stairwise.training.loop import Trainer
from stairwise.training.objective import Embedded
from stairwise.training.recipe import Recipe
from stairwise.training.recorder import Recorder

EVERY = 50
TURN = {
    "cuda": 50,
    "cpu": 10,
}  # steps per turn; on a GPU a turn has one record, in its middle, since turns end by waiting


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_step(step, steps, device):
    """Time per step; on a CPU processor time, which includes the monitor's thread and leaves other programs out."""
    clock = perf_counter if device.type == "cuda" else process_time
    sync(device)
    started = clock()
    for _ in range(steps):
        step()
    sync(device)
    return (clock() - started) / steps


def in_turns(plain, watched, steps, rounds, device):
    """Seconds per step without and with the monitor, its relative cost, and the standard error of that.

    Turns are short, because speed drifts. The error of a single turn is NaN.
    """
    warm, turn = 3 * EVERY // 2 if device.type == "cuda" else min(steps, EVERY), TURN[device.type]
    for step, steps in ((plain, 10), (watched, warm)):
        seconds_per_step(step, steps, device)
    turns = [[seconds_per_step(step, turn, device) for step in (plain, watched)] for _ in range(rounds * steps // turn)]
    alone, with_it = np.mean(turns, axis=0)
    error = np.std([after / before for before, after in turns], ddof=1) / len(turns) ** 0.5 if turns[1:] else np.nan
    return alone, with_it, with_it / alone - 1, error


class Loop:
    """A user's training loop; `watched` attaches the monitor."""

    def __init__(self, device, watched, folder, size, d, width, batch):
        torch.manual_seed(0)
        large = device.type == "cuda"
        encoder = build_encoder("resnet50") if large else build_encoder("resnet18", {"stem": "small", "width": width})
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


def recorded(device, folder, size, d, batch):
    """The step of one `Trainer` as a CUDA graph, without and with the monitor, which makes a record every 50 steps."""
    pixels = Path(folder) / "images.npy"
    np.save(pixels, np.random.default_rng(0).integers(0, 255, (512, size, size, 3), dtype=np.uint8))
    recipe = Recipe(
        data=f"array:{pixels}", views="barlow", encoder="resnet50", hidden=[2048], d=d, batch=batch, lr=1e-4
    )
    trainer = Trainer(recipe, Path(folder), device)
    trainer.resume()
    trainer.objective.train()
    trainer.optimizer.lr.fill_(1e-4)
    x_a, x_b = trainer.material.pairs.fixed(torch.arange(batch))
    done = [0]

    def watched():
        trainer.take_step(x_a, x_b, measure=True)
        done[0] += 1
        if done[0] % EVERY == 0:
            trainer.recorder.write(Record(step=done[0], t=0.0), spectrum=True)

    return partial(trainer.take_step, x_a, x_b, measure=False), watched


def peak_memory(d, batch, normalized, features=2048):
    """Bytes that a monitor takes at most, on a GPU, beyond the embeddings it is given."""
    recorder = Recorder(torch.device("cuda"), normalized=normalized, hidden=True)
    z, h = (torch.randn(2, batch, size, device="cuda") for size in (d, features))
    out = Embedded(loss=z.new_zeros(()), z_a=z[0], z_b=z[1], h_a=h[0], h_b=h[1])
    sync(z.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in range(1, 2 * EVERY + 10):
        recorder.keep(out)
        recorder.observed()
        if step % EVERY == 0:
            recorder.flush()
            recorder.monitor.copies(spent=True)
            recorder.monitor.reset()
    sync(z.device)
    return torch.cuda.max_memory_allocated() - before


def measured(device, d, options):
    """Print and return the costs at one d."""
    summary, size = {}, options.size or (96 if device.type == "cuda" else 32)
    batch = options.batch or (256 if device.type == "cuda" else 64)
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        pairs, loops = {}, None
        if options.only != "graph":
            loops = [Loop(device, watched, a, size, d, options.width, batch) for watched in (False, True)]
            pairs["hooks"] = [loop.step for loop in loops]
        if device.type == "cuda" and options.only != "hooks":
            pairs["graph"] = recorded(device, b, size, d, batch)
        for name, (plain, watched) in pairs.items():
            alone, with_it, cost, error = in_turns(plain, watched, options.steps, options.rounds, device)
            print(
                f"{name:<8} d = {d:<6} {1e3 * alone:8.2f} ms per step, watched {1e3 * with_it:8.2f} ms: "
                f"{100 * cost:+.2f}{'' if np.isnan(error) else f' ± {100 * error:.2f}'} %",
                flush=True,
            )
            summary[f"{name}_cost"] = round(cost, 5)
        if loops is not None:
            sync(device)
            started = perf_counter()
            loops[1].watch.close()
            summary["seconds_to_last_record"] = round(perf_counter() - started, 2)
            print(f"the last record came {summary['seconds_to_last_record']} s after the last step")
    if device.type == "cuda":
        for name, normalized in (("megabytes", False), ("megabytes_normalized", True)):
            summary[name] = round(peak_memory(d, batch, normalized) / 1e6)
            print(f"memory   d = {d:<6} {summary[name]} MB at most{', with `normalized`' if normalized else ''}")
    return summary


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--d", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size", type=int, help="pixels; default 96, on a CPU 32")
    parser.add_argument("--batch", type=int, help="default 256, on a CPU 64")
    parser.add_argument("--width", type=int, default=32, help="of the ResNet-18 on a CPU; 64 is the usual one")
    parser.add_argument("--only", choices=("hooks", "graph"))
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = options.d or [512 if device.type == "cuda" else 128]
    print(json.dumps({str(d): measured(device, d, options) for d in sizes}))


if __name__ == "__main__":
    main()
