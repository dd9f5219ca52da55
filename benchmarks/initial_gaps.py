"""How far below the typical variance modes start, before training: what the linear theory predicts gaps from.

    python benchmarks/initial_gaps.py [--data cifar10] [--seeds 3]          two minutes on one core

The networks of `stairwise reproduce sharpness` at initialization, on two views of 512 images. The theory's gap of mode
j is (1 − γ_{j+1}/γ_j) log₁₀ 1/(2 x_j), x_j = λ_j / (Σλ²/Σλ): printed is its second factor, for modes 3, 5, 10 and 20.
Ends in one JSON line.
"""

import argparse
import json

import numpy as np
import torch

from stairwise.data.images import load
from stairwise.data.pairs import view_pairs
from stairwise.staircase.separation import relative_variance
from stairwise.training.networks import network_of
from stairwise.training.recipe import Recipe, load_recipe

MODES = (3, 5, 10, 20)
IMAGES = 512


def initial_embeddings(recipe: Recipe, data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both views of 512 images by the untrained network, at α = 1."""
    images = load(data)
    pairs = view_pairs(images, recipe.views, recipe.size, recipe.seed, "cpu", training=IMAGES)
    network = network_of(recipe, (3, pairs.size, pairs.size)).train()
    with torch.no_grad():
        both = [[network(x)[1] for x in views] for views in pairs.fixed_batches(torch.arange(IMAGES))]
    z_a, z_b = (torch.cat(z).double() for z in zip(*both, strict=True))
    return z_a, z_b


def initial_spectrum(recipe: Recipe, data: str) -> np.ndarray:
    """Eigenvalues of C after batch norm for Barlow Twins, of the centred covariance for the others."""
    z_a, z_b = initial_embeddings(recipe, data)
    if recipe.loss == "barlow_twins":
        a, b = ((z - z.mean(0)) / z.std(0) for z in (z_a, z_b))
        c = a.T @ b / len(a)
        return np.linalg.eigvalsh((c + c.T).numpy() / 2)[::-1]
    return np.linalg.eigvalsh(torch.cov(torch.cat([z_a, z_b]).T).numpy())[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    for method in ("bt", "simclr", "vicreg"):
        rows = []
        for seed in range(given.seeds):
            recipe = load_recipe(f"cifar10-{method}-standard", {"seed": seed})
            x = relative_variance(np.tile(initial_spectrum(recipe, given.data), (3, 1)))[0]
            rows.append([-np.log10(2 * x[j - 1]) for j in MODES])
        found[method] = np.mean(rows, axis=0).round(2).tolist()
        print(method, found[method], flush=True)
    print(json.dumps({"modes": MODES, "log10 1/2x": found}))


if __name__ == "__main__":
    main()
