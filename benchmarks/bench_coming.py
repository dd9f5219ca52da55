"""Which kernels of a half-trained network hold the modes that it learns next? Small networks, on a CPU.

    python -m benchmarks.bench_coming [--losses bt simclr vicreg] [--seeds 1 2 3] [--folder runs/coming] [--out FILE]

`stairwise reproduce coming` asks this of the paper's networks. Here are networks that need no GPU, with several seeds:
ResNet-18 of width 8 at 16 px, d = 64, CIFAR-10, small initialization. Tangent kernels (five of them) are compared with
two kernels that need no derivatives: of the inputs of the last layer, and of the embeddings themselves. Each number is
the share of the next modes in the span of 50 predicted modes, beyond those that had grown: a mean over the moments of a
run and three draws of 300 pairs, then mean ± standard deviation over seeds. A run takes about ten minutes on one core;
finished runs in FOLDER are not repeated. The last line is JSON.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import stairwise as sw
from benchmarks.rows import show
from stairwise.files import save_json
from stairwise.ntk.coming import KERNELS, TARGETS, WAYS
from stairwise.paper.coming import means
from stairwise.paper.trained import METHODS, spread
from stairwise.progress import silent
from stairwise.runs.reader import Run
from stairwise.training.recipe import load_recipe
from stairwise.training.studies import stored_coming

SMALL: dict[str, Any] = {
    "encoder_options": {"stem": "small", "width": 8},
    "size": 16,
    "d": 64,
    "batch": 128,
    "pretrain": 10_000,
    "steps": 4000,
    "keep": 16,
    "probes": [],
    "precision": "float32",
}
RATES = {"simclr": {"lr": 3e-4}}  # it stays collapsed at the recipe's 0.003 and at 0.03 (tried with seeds 0 and 9)
PAIRS, DRAWS = 300, 3
HEADER = ["loss", "kernel", *WAYS, "chance for both"]


def trained(method: str, seed: int, folder: Path) -> Run:
    recipe = load_recipe(f"cifar10-{method}-small", SMALL | RATES.get(method, {}) | {"seed": seed})
    return sw.train(recipe, folder / f"{method}-{seed}")


def measured(method: str, seed: int, folder: Path) -> dict[str, Any]:
    """Shares, chance, moments and numbers of grown modes of one run."""
    run = trained(method, seed, folder)
    found = stored_coming(run, PAIRS, range(DRAWS), "cpu", "float32", silent, views=run.recipe["views"])
    assert found is not None
    arrays = {f"run.{name}": array for name, array in found.items()}
    shares, chance = means(arrays, "run")
    moments = found["until"] >= 0
    if not moments.any():
        raise SystemExit(f"{method}, seed {seed}: no mode grew on the way, as in a collapse")
    return {
        "loss": method,
        "seed": seed,
        "moments": int(moments.sum()),
        "grown": [int(found["grown"][:-1][moments].min()), int(found["grown"].max())],
        "shares": shares.mean(axis=0).round(4).tolist(),
        "chance": chance.mean(axis=0).round(4).tolist(),
    }


def rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """One row per loss and kernel: theory, kernel PCA, and chance for both, over seeds."""
    found = []
    for method in dict.fromkeys(run["loss"] for run in runs):
        mine = [run for run in runs if run["loss"] == method]
        shares, chance = np.array([run["shares"] for run in mine]), np.array([run["chance"] for run in mine])
        for k, kernel in enumerate(KERNELS):
            cells = [spread(shares[:, k, way]) for way in range(len(WAYS))]
            both = " and ".join(f"{chance[:, k, way].mean():.3f}" for way in range(len(WAYS)))
            found.append([METHODS[method], kernel, *cells, both])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("runs/coming"))
    parser.add_argument("--out", type=Path, help="also write the results of all runs to this JSON file")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        for method in options.losses:
            runs.append(measured(method, seed, options.folder))
            if options.out:
                save_json(options.out, {"target": TARGETS[0], "kernels": KERNELS, "ways": WAYS, "runs": runs})
    show(HEADER, rows(runs), runs)


if __name__ == "__main__":
    main()
