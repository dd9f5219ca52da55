"""How many milliseconds does an entry of a convolutional tangent kernel take, compared with the naive way?

    python benchmarks/bench_conv_kernel.py [--device cpu] [--images 2] [--side 32] [--depth 21] [--rounds 3]

A network of 21 convolutions (3×3, ReLU) with global average pooling, on standardized Gaussian noise of 32×32 pixels and
three channels (time does not depend on the pixels), float32. Σ and Θ between two different sets of images:

    naive      one pair of images after the other, all pairs of pixels as a tensor (height, width, height, width), a
               convolution as nine shifted sums, each operation on its own
    tiled      `conv_covariances` without compiling
    compiled   each layer fused into one kernel by torch.compile; compiling is not counted (with all layers fused, two
               kernels: for the first layer, where Θ = Σ, and for the others)
    symmetric  compiled, a set of images with itself, only the upper triangle
    flatten    the same network without pooling, for ten times as many images

All run alternately; medians are compared, in ms per entry. Error: largest relative difference of Θ from float64. The
last line is JSON. For a GPU: --device cuda --images 48 (tiles of ten by ten images, for which all is compiled once).
--memory sets the size of the tiles.
"""

import argparse
import json
from functools import partial
from itertools import product
from math import pi
from pathlib import Path

import numpy as np
import torch
from torch._inductor import metrics
from torch.nn.functional import pad

from benchmarks.clock import timed
from stairwise.kernel.conv import conv_covariances
from stairwise.kernel.convnet import ConvNet


def shifted_mean(values):
    """Mean over the nine δ of values[p + δ, q + δ], or of values[p + δ]; zeros outside."""
    padded = pad(values, (1,) * (2 * values.ndim))
    height, width = values.shape[:2]
    total = torch.zeros_like(values)
    for a in range(3):
        for b in range(3):
            window = (slice(a, a + height), slice(b, b + width)) * (values.ndim // 2)
            total += padded[window]
    return total / 9


def naive(net, X, Y):
    """Θ entry by entry, following the formulas literally."""
    w, b = net.weight_variance, net.bias_variance

    def variances(x):
        below, out = (x**2).mean(-1), []
        for _ in range(net.depth):
            out.append(w * shifted_mean(below) + b)
            below = out[-1] / 2
        return out

    def entry(x, y, x_variances, y_variances):
        sigma = torch.einsum("abc,dec->abde", x, y) / x.shape[-1]
        theta = torch.zeros_like(sigma)
        for xx, yy in zip(x_variances, y_variances, strict=True):
            sigma = w * shifted_mean(sigma) + b
            theta = sigma + w * shifted_mean(theta)
            norm = (xx[:, :, None, None] * yy).sqrt()
            cosine = (sigma / norm).clamp(-1, 1)
            angle = cosine.acos()
            sigma = norm * ((1 - cosine**2).sqrt() + (pi - angle) * cosine) / (2 * pi)
            theta = theta * (pi - angle) / (2 * pi)
        return w * sigma.mean() + b + w * theta.mean()

    of_x, of_y = ([variances(z) for z in Z] for Z in (X, Y))
    entries = [entry(x, y, *both) for (x, y), both in zip(product(X, Y), product(of_x, of_y), strict=True)]
    return torch.stack(entries).reshape(len(X), len(Y))


def ways(net, X, Y, many, memory):
    """Name → (number of entries, call that returns Θ)."""
    few = X[: max(1, min(len(X), 4))]  # the naive way is slow
    theta = partial(conv_covariances, net, memory=memory)
    flat = ConvNet(net.depth)
    return {
        "naive": (len(few) ** 2, lambda: naive(net, few, Y[: len(few)])),
        "tiled": (len(X) * len(Y), lambda: theta(X, Y, compiled=False).theta),
        "compiled": (len(X) * len(Y), lambda: theta(X, Y, compiled=True).theta),
        "symmetric": (len(X) ** 2, lambda: theta(X, X, compiled=True).theta),
        "flatten": (len(many) ** 2, lambda: conv_covariances(flat, many, many.clone()).theta),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--depth", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, help="MiB per tile, instead of the default of the device")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    draws = torch.randn(12 * options.images, options.side, options.side, 3, generator=torch.Generator().manual_seed(0))
    X, Y, many = draws.to(options.device).split([options.images, options.images, 10 * options.images])
    net = ConvNet(options.depth, head="gap")
    few = min(2, len(X))
    exact = conv_covariances(net, X[:few].double(), Y[:few].double()).theta
    memory = None if options.memory is None else options.memory << 20
    calls, times, errors = ways(net, X, Y, many, memory), {}, {}
    for name, (_, call) in calls.items():
        metrics.reset()
        first = call()[:few, :few]  # compiles, warms up
        if name == "compiled":
            kernels = metrics.generated_kernel_count
        if name in ("naive", "tiled", "compiled"):
            errors[name] = float((first.double() / exact - 1).abs().max())
    for _ in range(options.rounds):
        for name, (entries, call) in calls.items():
            times.setdefault(name, []).append(1e3 * timed(call, options.device)[0] / entries)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    print(f"{'':<12}{'ms per entry':>13}{'naive/':>9}{'error':>10}")
    for name, value in medians.items():
        ratio = f"{medians['naive'] / value:>8.1f}x" if name != "flatten" else f"{'':>9}"
        print(f"{name:<12}{value:>13.4g}{ratio}" + (f"{errors[name]:>10.1e}" if name in errors else ""))
    # a layer reads and writes Σ and Θ of all pairs of pixels once, if it is one kernel
    moved = 4 * 4 * options.side**4 * options.depth
    rate = moved / (1e9 * medians["compiled"])
    print(f"{kernels} compiled kernels; {moved / 2**20:.0f} MiB per entry at least, so {rate:.2f} TB/s")
    where = torch.cuda.get_device_name() if X.is_cuda else options.device
    facts = {"device": where, "side": options.side, "depth": options.depth, "kernels": kernels}
    facts |= {f"{name}_error": float(f"{value:.2g}") for name, value in errors.items()}
    line = json.dumps(facts | {f"{name}_ms": float(f"{value:.4g}") for name, value in medians.items()})
    print(line)
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
