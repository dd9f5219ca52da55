"""Do the first updates of SimCLR make its embeddings explode in the paper's network? ResNet-50 on STL-10, on a CPU.

    python -m benchmarks.first_updates [--runs paper plain …] [--updates 40] [--folder runs/first] [--out FILE.json]

`bench_overshoot` asks this of small networks, to the end of their training. Here is the beginning alone, after each of
the first updates: the loss of the next batch, and the largest variance of its embeddings as a multiple of that of the
untrained network. An update takes about 18 seconds on two cores; finished runs in FOLDER are not repeated, and FILE
keeps what it holds of other runs. The last line is JSON.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stairwise as sw
from benchmarks.initial_gaps import initial_embeddings
from benchmarks.rows import keep, show, stored_rows
from stairwise.training.recipe import load_recipe, recipe_of

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("SGD at 0.5, momentum 0.9", {}),
    "plain": ("SGD at 0.5, no momentum", {"momentum": 0.0}),
    "tenth": ("SGD at 0.05, momentum 0.9", {"lr": 0.05}),
    "fast": ("SGD at 5, no momentum", {"lr": 5.0, "momentum": 0.0}),
}
BRIEF: dict[str, Any] = {"keep": 0, "follow": 0, "probes": [], "held_out": 0, "precision": "float32", "window": 256}
SHOWN = (1, 2, 4, 8, 16, 32)  # updates


def measured(name: str, updates: int, folder: Path) -> dict[str, Any]:
    """Loss and rise after 0, 1, … updates of a variant: a record is made of the batch before its update."""
    changes = BRIEF | {"steps": updates, "records": updates} | VARIANTS[name][1]
    run = sw.train(load_recipe("stl10-simclr", changes), folder / f"{name}-{updates}")
    before = torch.cat(initial_embeddings(recipe_of(run), "stl10"))
    rise = run.series("covariance")[:, 0] / float(torch.linalg.eigvalsh(torch.cov(before.T))[-1])
    rounded = {"rise": [float(f"{x:.4g}") for x in rise], "loss": run.series("loss").round(4).tolist()}
    return {"run": name, "updates": [record.step - 1 for record in run.records], **rounded}


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rise, and the highest and the last loss."""
    found = []
    for row in rows:
        rise = dict(zip(row["updates"], row["rise"], strict=True))
        cells = [f"{rise[update]:,.4g}" if update in rise else "–" for update in SHOWN]
        found.append([VARIANTS[row["run"]][0], *cells, f"{np.max(row['loss']):.2f}", f"{row['loss'][-1]:.2f}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/first"))
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    rows = stored_rows(options.out)
    for name in options.runs:
        rows = keep(rows, measured(name, options.updates, options.folder), list(VARIANTS), options.out)
    header = ["run", *(f"rise after {update}" for update in SHOWN), "highest loss", "last loss"]
    show(header, table(rows), rows)


if __name__ == "__main__":
    main()
