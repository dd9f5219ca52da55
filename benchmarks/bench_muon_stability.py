"""Which length must Muon's steps be relative to, so that training does not diverge?

    python benchmarks/bench_muon_stability.py [--steps 1500] [--losses vicreg barlow_twins]

A perceptron with batch norm on Gaussian data with 48 directions of falling variance, d = 32, batch 128, one seed, CPU.
Rows: steps relative to the length of the weights now ("current"), at the start ("relative", the default), and at the
start with the length restored after every step ("fixed"). Entries: mean loss of the last 100 steps, or the step after
which nothing was finite; in brackets the growth of the readout. The last line is JSON.
"""

import argparse
import json
import math

import torch
from torch import nn

import stairwise as sw

RULES = ("current", "relative", "fixed")
RATES = (0.01, 0.02, 0.05, 0.1)


def perceptron():
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in ((64, 128), (128, 128)):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 32, bias=False))


def trained(rule, lr, loss_name, schedule, steps):
    """Mean loss at the end or None, the first step that was skipped, and the growth of the readout."""
    network, loss_of = perceptron(), sw.losses.MODULES[loss_name]()
    optimizer = sw.Muon(network.parameters(), lr=lr, rest_lr=0.02, scaling="fixed" if rule == "fixed" else "relative")
    factor = (lambda i: 1.0) if schedule == "constant" else (lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    data = torch.Generator().manual_seed(0)
    basis = torch.randn(48, 64, generator=data) * torch.arange(1, 49)[:, None] ** -0.5
    readout, losses = network[-1].weight, []
    start = readout.detach().norm()
    for step in range(steps):
        x = torch.randn(128, 48, generator=data) @ basis
        x_a, x_b = (x + 0.5 * torch.randn(x.shape, generator=data) for _ in "ab")
        optimizer.zero_grad()
        loss = loss_of(network(x_a), network(x_b))
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(loss.item())
        if optimizer.skipped:
            return None, step, 0.0
        for p in network.parameters() if rule == "current" else ():
            if p.ndim > 1:
                optimizer.state[p]["length"].copy_(p.detach().norm())
    return sum(losses[-100:]) / len(losses[-100:]), 0, float(readout.detach().norm() / start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--losses", nargs="+", default=["vicreg", "barlow_twins"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for loss in options.losses:
        for schedule in ("constant", "cosine"):
            print(f"{loss}, {schedule}, {options.steps} steps" + "".join(f"{f'lr {lr:g}':>17}" for lr in RATES))
            for rule in RULES:
                row = [trained(rule, lr, loss, schedule, options.steps) for lr in RATES]
                words = [f"diverged at {at}" if end is None else f"{end:.3f} ({grew:.1f})" for end, at, grew in row]
                print(f"  {rule:<30}" + "".join(f"{word:>17}" for word in words), flush=True)
                found[f"{loss}, {schedule}, {rule}"] = [
                    round(end, 4) if end is not None else f"at {at}" for end, at, _ in row
                ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
