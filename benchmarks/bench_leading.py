"""How close are the leading eigenvalues of large embeddings to the exact ones, and what do they cost?

    python benchmarks/bench_leading.py [--d 2048] [--data photos] [--loss vicreg] [--steps 120] [--window 20]

Trains a ResNet-18 with d dimensions. The embeddings of every step go to three monitors: the default one (dense sums),
one with a tracked basis, as above 8192 dimensions, and one that computes all eigenvalues in float64. Every `window`
steps it prints the largest relative error of the leading 16, 64 and 128 eigenvalues of the covariance and of C; the
first window has no basis to start from. At the end it prints the median time of an update and of a record, relative to
the exact monitor. The last line is JSON. One GPU: `--d 8192 --data cifar10 --batch 256 --window 50`.
"""

import argparse
import json
import tempfile
from types import SimpleNamespace

import numpy as np
import torch

import stairwise as sw
from benchmarks.clock import timed
from stairwise.monitor import moments
from stairwise.training.recipe import Recipe
from stairwise.training.recorder import Recorder

COUNTS = (16, 64, 128)
LAYOUTS = {"dense": {}, "tracked": {}, "exact": {"exact": True}}


def errors(found, exact):
    """Largest relative errors of the leading eigenvalues, and of the totals."""
    out = {}
    for name in ("covariance", "eigenvalues"):
        off = np.abs(getattr(found, name)[:128] / getattr(exact, name)[:128] - 1)
        out |= {f"{name} {count}": float(off[:count].max()) for count in COUNTS}
    return out | {"totals": max(abs(getattr(found, n) / getattr(exact, n) - 1) for n in ("trace", "variance"))}


def all_values(monitor):
    """All eigenvalues by definition, from float64 sums, decomposed on their device."""
    monitor.flush()
    monitor.aside.wait()
    U, V = (monitor.sums[name][: -moments.ONES, : -moments.ONES] for name in ("uu", "vv"))
    n, mean = float(moments.count(monitor.sums["uu"])), monitor.sums["uu"][-1, : len(U)]
    mean = mean / (2 * n)
    matrices = {"eigenvalues": (U - V) / (4 * n), "covariance": (U + V) / (4 * n) - torch.outer(mean, mean)}
    matrices["covariance"] *= 2 * n / (2 * n - 1)
    values = {name: torch.linalg.eigvalsh(m).flip(0).cpu().numpy() for name, m in matrices.items()}
    traces = {"trace": float(matrices["eigenvalues"].trace()), "variance": float(matrices["covariance"].trace())}
    return SimpleNamespace(**values, **traces)


class Comparison:
    """Feeds embeddings to all monitors, and compares them once per window."""

    def __init__(self, window):
        self.window, self.steps = window, 0
        self.monitors = {name: sw.SpectrumMonitor(**options) for name, options in LAYOUTS.items()}
        self.updates = {name: [] for name in LAYOUTS}
        self.records = {name: [] for name in LAYOUTS}
        self.errors = {name: [] for name in LAYOUTS if name != "exact"}

    def in_their_layouts(self):
        """The monitors by name; while one is used, `moments.DENSE` is such that it gets its layout."""
        for name, monitor in self.monitors.items():
            moments.DENSE = moments.ALL if name == "tracked" else 8192
            yield name, monitor

    def step(self, z_a, z_b):
        self.steps += 1
        for name, monitor in self.in_their_layouts():
            self.updates[name].append(timed(lambda m=monitor: m.collect(z_a, z_b), z_a.device)[0])
        if self.steps % self.window == 0:
            self.compare(z_a.device)

    def compare(self, device):
        found = {}
        for name, monitor in self.in_their_layouts():
            compute = monitor.compute if name != "exact" else lambda m=monitor: all_values(m)
            seconds, found[name] = timed(compute, device)
            self.records[name].append(seconds)
            monitor.reset()
        for name, rows in self.errors.items():
            rows.append(errors(found[name], found["exact"]))
            row = "  ".join(f"{key} {value:.1e}" for key, value in rows[-1].items())
            print(f"step {self.steps:5} {name:<8} {row}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=2048)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--loss", default="vicreg")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--window", type=int, default=20)
    parser.add_argument("--width", type=int, default=32, help="of the ResNet-18")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    comparison = Comparison(options.window)
    Recorder.keep = lambda self, out: comparison.step(out.z_a.detach(), out.z_b.detach())
    Recorder.observed = lambda self: None
    recipe = Recipe(
        data=options.data,
        size=32,
        encoder_options={"stem": "small", "width": options.width},
        hidden=[2048],
        d=options.d,
        loss=options.loss,
        batch=options.batch,
        optimizer="lars",
        lr=1.0,
        steps=options.steps,
        records=1,
        window=options.steps * options.batch,
        graph=False,
        probes=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        sw.train(recipe, folder, device=options.device)
    summary = {"d": options.d, "loss": options.loss, "data": options.data, "batch": options.batch}
    for name, rows in comparison.errors.items():
        later = rows[1:] or rows
        summary[name] = {key: float(f"{max(row[key] for row in later):.2g}") for key in later[0]}
        for kind in ("updates", "records"):
            mine, exact = (np.median(getattr(comparison, kind)[n]) for n in (name, "exact"))
            summary[name][f"{kind}, relative to exact"] = round(float(mine / exact), 3)
    for name in comparison.errors:
        print(f"{name:<8} largest errors after the first window: {summary[name]}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
