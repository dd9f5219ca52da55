"""Are the small eigenvalues of a network that has overshot rounding errors? A small network, on a CPU.

    python -m benchmarks.bench_rounding [--folder runs/overshoot] [--out FILE.json]

SimCLR on STL-10 has eigenvalues of the covariance from 1 down to 6e-10 of the largest (docs/results/fig3.md). Its
encoder computes in bf16, its head in float32. Here is a network of `bench_overshoot` that has overshot in the same way
(SGD at 0.5 with momentum 0.9, seed 3): both views of 512 images by its final weights, with the encoder in float64,
float32 and bf16. How far are the eigenvalues apart? The run takes four minutes on one core and is not repeated. The
last line is JSON.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.bench_overshoot import trained
from stairwise.files import save_json
from stairwise.training.networks import fixed_views, load_network

IMAGES, SEED = 512, 3


def spectrum(network: nn.Module, x: Tensor, kind: str) -> NDArray[np.float64]:
    """Eigenvalues of the covariance, descending; the head computes in float64 or float32."""
    exact = torch.float64 if kind == "float64" else torch.float32
    network = network.to(exact)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
        h = network.get_submodule("backbone")(x.to(exact))
        with torch.autocast("cpu", enabled=False):
            z = network.get_submodule("projector")(h.to(exact)).double()
    return np.asarray(torch.linalg.eigvalsh(torch.cov(z.T)).flip(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/overshoot"))
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    options = parser.parse_args()
    run = trained("paper", SEED, options.folder)
    assert run is not None
    network, x = load_network(run), fixed_views(run, IMAGES, seed=0, device=torch.device("cpu"))
    lam = {kind: spectrum(network, x, kind) for kind in ("float64", "float32", "bf16")}
    facts = {"smallest over largest": float(f"{lam['float64'][-1] / lam['float64'][0]:.3g}")}
    for kind in ("float32", "bf16"):
        facts[f"largest relative error, {kind}"] = float(f"{np.abs(lam[kind] / lam['float64'] - 1).max():.3g}")
    if options.out:
        save_json(options.out, facts)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
