"""Does the paper's α give the initial eigenvalues that its rule asks for? Untrained networks of the STL-10 recipes.

    python benchmarks/initial_scale.py [--seeds 3] [--out FILE.json]          half an hour on one core

The paper (App. D) chooses α so that the largest eigenvalue at initialization is 1e-3 (Barlow Twins, VICReg) or 1e-6
(SimCLR). Printed are that eigenvalue at the paper's α, for every seed, and the α that the rule gives (seed 0).
Networks, views and matrix are those of `alpha = "auto"` in a recipe: C for Barlow Twins, else the centred covariance,
on two views of 512 images, or of 2048 where d = 512. The last line is JSON.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stairwise.checks import InputError
from stairwise.files import save_json
from stairwise.nets.initial import find_alpha, scale_parameters
from stairwise.training.measure import top_eigenvalue
from stairwise.training.networks import network_of
from stairwise.training.recipe import load_recipe
from stairwise.training.setup import prepare

RECIPES = ("simclr-small", "vicreg-small", "bt-small")


def measured(name: str, seed: int, rule: bool) -> dict[str, Any]:
    """The largest eigenvalue at the α of a recipe and, if asked for, the α by rule; None if there is none."""
    recipe = replace(load_recipe(f"stl10-{name}", {"seed": seed}), probes=[], held_out=0)
    material = prepare(recipe, torch.device("cpu"))
    network = network_of(recipe, material.view_shape)
    facts: dict[str, Any] = {"recipe": name, "seed": seed, "alpha": recipe.alpha, "asked": recipe.start}
    if rule:
        try:
            found = find_alpha(network, lambda: top_eigenvalue(network, recipe, material), recipe.start)
            facts["by_rule"] = float(f"{found:.3g}")
        except InputError:
            facts["by_rule"] = None
    scale_parameters(network, float(recipe.alpha))
    return facts | {"largest": float(f"{top_eigenvalue(network, recipe, material):.3g}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    given = parser.parse_args()
    rows = []
    for name in given.recipes:
        for seed in range(given.seeds):
            rows.append(measured(name, seed, rule=seed == 0))
            print(json.dumps(rows[-1]), flush=True)
            if given.out:
                save_json(given.out, {"networks": rows})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
