"""S7 of the appendix: the largest learning rate that the plain loss bears, predicted from the initial network.

    python -m benchmarks.race.largest_rate [--data cifar10] [--seeds 3]     six minutes on one core
    python -m benchmarks.race.page                                          writes the table

At λ = 1 the plain loss of the leading mode has curvature 8γ₁, so descent with momentum m is stable up to
(1 + m) / 4γ₁, and the paper's 1/4γ₁ without momentum. γ₁ is taken from the tangent kernel of the initial network (mean
output, two views of each image, batch norm with the statistics of these views). The race's runs begin with the same
network of seed 0.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.race.appendix import bound
from benchmarks.race.entrants import RaceRun
from benchmarks.race.images import named_images, read_images
from benchmarks.race.single import device_for_runs, recipe_of
from benchmarks.race.span import STARTS, fixed_views, with_statistics_of
from stairwise.files import save_json
from stairwise.kernel.operators import DensePairs
from stairwise.kernel.solvers import solve
from stairwise.ntk.empirical import empirical_ntk
from stairwise.training.loop import Trainer

STORED = Path("docs/results/largest_rate.json")


def leading_gamma(network: nn.Module, views: Tensor) -> float:
    """γ₁ of a network's tangent kernel; views: first views first, (2n, …)."""
    K = empirical_ntk(with_statistics_of(network, views), views, precision="float64")
    return float(solve(DensePairs(K.cpu().numpy()), 1).eigenvalues[0])


def at_the_start(run: RaceRun, images: int, device: torch.device) -> float:
    """γ₁ of the network with which a run begins."""
    trainer = Trainer(recipe_of(run, {}), Path("unused"), device)
    try:
        return leading_gamma(trainer.network, fixed_views(trainer, images))
    finally:
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images")
    parser.add_argument("--images", type=int, default=64, help="two views of each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=STORED)
    options = parser.parse_args()
    images = read_images(options.data_file, options.data) if options.data_file else named_images(options.data)
    images.offer()
    device = device_for_runs(options.device)
    plain = RaceRun("tune", options.data, "plain", "sgd", 0.01, 600, 0)
    found = {}
    for start in STARTS:
        runs = [replace(plain, seed=seed, start=start) for seed in range(options.seeds)]
        gammas = [at_the_start(run, options.images, device) for run in runs]
        momentum = recipe_of(plain, {}).momentum
        found[start] = {"gamma": [float(f"{g:.6g}") for g in gammas], "momentum": momentum}
        rate = bound(gammas[0], momentum)
        print(f"{start}: γ₁ = {gammas[0]:.4g} (seed 0), largest rate {rate:.3g}; all seeds: {gammas}", flush=True)
    save_json(options.out, {"data": options.data, "images": options.images, **found})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
