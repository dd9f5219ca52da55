"""Does the tangent kernel at initialization predict the steps of a ResNet? Small networks, on a CPU.

    python -m benchmarks.bench_initial_kernel [--seeds 1 2 3] [--folder runs/coming] [--out FILE.json]

The paper says that it does so poorly, and shows no numbers. ResNet-18 of width 8 at 16 px, d = 64, Barlow Twins on
CIFAR-10 from small initialization (the runs of `bench_coming`), SGD with momentum μ. Measured: when eigenvalues of C
pass ½, as t = Σ lr/(1 − μ). Predicted: the same by the kernel theory, from kernel and outputs of 300 pairs at
initialization. Batch norms in evaluation mode use running averages, which know nothing of the data before training. So
the kernel is computed twice: as it is, and after `torch.optim.swa_utils.update_bn`, when the outputs are those that
training begins with; the kernel still holds mean and variance fixed. Also the share of the trained span (50 directions)
that either kernel predicts. A run takes seven minutes on one core; finished runs in FOLDER are not repeated. The last
line is JSON.
"""

import argparse
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import stairwise as sw
from benchmarks.bench_coming import PAIRS, trained
from benchmarks.rows import keep, show, stored_rows
from stairwise.ntk.predict import predict_embeddings
from stairwise.ntk.study import Outputs, embed
from stairwise.theory.trajectory import Trajectory
from stairwise.training.networks import fixed_views, initial_network, load_network

KINDS = {"as it is": "norms that know no data", "updated": "norms that know the data"}
MODES, SHOWN, SPAN = 64, 10, 50  # of the theory; whose steps are compared; of the trained span
VIEWS, BATCH = 1024, 128  # that the norms are shown
HEADER = ["seed", "kernel", "first steps: measured", "predicted", "measured over predicted, steps 3 to 10", "share"]


def measured(seed: int, folder: Path) -> dict[str, Any]:
    run = trained("bt", seed, folder)
    cpu = torch.device("cpu")
    x, more = fixed_views(run, PAIRS, seed=0, device=cpu), fixed_views(run, VIEWS, seed=1, device=cpu)
    plain = initial_network(run)
    updated = deepcopy(plain)
    update_bn(list(more[torch.randperm(len(more), generator=torch.Generator().manual_seed(0))].split(BATCH)), updated)
    t = run.times / (1 - float(run.recipe["momentum"]))
    steps = Trajectory(t, run.series("eigenvalues"), "trained").step_times()[:SHOWN]
    z = embed(Outputs(load_network(run)), x)
    facts: dict[str, Any] = {"run": "bt", "seed": seed, "measured": steps.round(2).tolist()}
    for kind, network in zip(KINDS, (plain, updated), strict=True):
        predicted, share = _predicted(Outputs(network.eval()), x, z, t[-1])
        facts[kind] = {"steps": [float(f"{time:.4g}") for time in predicted], "share": round(share, 4)}
    return facts


def _predicted(network: nn.Module, x: Tensor, z: NDArray, last: float) -> tuple[NDArray, float]:
    """Step times by the kernel theory, and the share of the trained span."""
    K = sw.empirical_ntk(network, x, precision="float64").numpy()
    theory = sw.KernelSSL(MODES, kernel="precomputed").fit(K)
    ahead = np.geomspace(last * 1e-6, last * 1e6, 6000)
    spectra = theory.spectrum_at(ahead, init=embed(network, x))
    axes, sizes, _ = np.linalg.svd(z, full_matrices=False)
    share = sw.subspace_alignment(axes[:, :SPAN] * sizes[:SPAN], predict_embeddings(K, SPAN))
    return Trajectory(ahead, spectra, "kernel").step_times()[:SHOWN], float(share)


def ratios(row: dict[str, Any], kind: str) -> NDArray[np.float64]:
    """Measured over predicted times of the third to the tenth step: above 1, the prediction is too early."""
    return np.array(row["measured"][2:]) / np.array(row[kind]["steps"][2:])


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            str(row["seed"]),
            words,
            ", ".join(f"{time:.3g}" for time in row["measured"][:4]),
            ", ".join(f"{time:.3g}" for time in row[kind]["steps"][:4]),
            f"{ratios(row, kind).min():.2g} to {ratios(row, kind).max():.2g}",
            f"{row[kind]['share']:.3f}",
        ]
        for row in rows
        for kind, words in KINDS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("runs/coming"))
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file, which keeps other seeds")
    options = parser.parse_args()
    rows = stored_rows(options.out)
    for seed in options.seeds:
        rows = keep(rows, measured(seed, options.folder), ["bt"], options.out)
    show(HEADER, table(rows), rows)


if __name__ == "__main__":
    main()
