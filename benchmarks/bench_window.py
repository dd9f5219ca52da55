"""How many pairs does an honest count of modes need? Exactly Gaussian embeddings, counted as a run counts them.

    python -m benchmarks.bench_window          twenty seconds on one core

Variances are those that the batch can carry (`sw.carried`) for correlations ρ that fall evenly; modes that it cannot
carry have a thousandth of the largest variance. So the exact counts are known. Each row gives the number of eigenvalues
of C above ½, exactly and in the mean over ten draws of 512, 2048 and 9216 pairs; in brackets, what the theory says from
the ρ of the same pairs. Last: grown modes of the centred covariance, exactly and from these numbers of pairs. Prints a
table in Markdown and ends in one JSON line.
"""

import json
from typing import Any

import numpy as np
import torch

import stairwise as sw
from stairwise.staircase.noise import carried_by
from stairwise.theory.spectra import grown

PAIRS, DRAWS, WAITING = (512, 2048, 9216), 10, 1e-3
PLAIN: dict[str, Any] = {"lambda_": 1.0, "batch_norm": False, "symmetric": True}
OPTIONS: dict[str, dict[str, Any]] = {"barlow_twins": PLAIN, "simclr": {"temperature": 0.2}, "vicreg": {}}
NAMES = {"barlow_twins": "Barlow Twins", "simclr": "SimCLR", "vicreg": "VICReg"}
CASES = [
    *(("barlow_twins", batch, 50, ends) for batch in (256, 64) for ends in ((0.89, 0.42), (0.9, 0.2))),
    *((loss, 256, d, (0.9, 0.2)) for loss in ("simclr", "vicreg") for d in (50, 128)),
]


def model(loss: str, batch: int, d: int, ends: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Correlations and variances of d modes."""
    rho = np.linspace(*ends, d)
    variance = np.asarray(sw.carried(rho, batch, loss, d, **OPTIONS[loss]).variance)
    return rho, np.maximum(variance, WAITING * variance.max())


def exact(rho: np.ndarray, variance: np.ndarray, loss: str, batch: int) -> list[float]:
    """The three counts of infinitely many pairs."""
    theory = sw.carried(rho, batch, loss, len(rho), **OPTIONS[loss])
    return [int((rho * variance > 0.5).sum()), theory.above_half, grown(variance)[0]]


def counted(rho: np.ndarray, variance: np.ndarray, loss: str, batch: int, pairs: int, seed: int) -> list[float]:
    """The three counts of a monitor that has seen `pairs` pairs."""
    rng = np.random.default_rng(seed)
    monitor = sw.SpectrumMonitor()
    for _ in range(pairs // batch):
        shared, *own = rng.standard_normal((3, batch, len(rho))) * np.sqrt(variance)
        monitor.update(*(torch.tensor(np.sqrt(rho) * shared + np.sqrt(1 - rho) * x) for x in own))
    seen = monitor.compute()
    theory = carried_by(seen, loss, OPTIONS[loss])
    assert theory is not None
    return [int((seen.eigenvalues > 0.5).sum()), theory.above_half, grown(seen.covariance)[0]]


def row(loss: str, batch: int, d: int, ends: tuple[float, float]) -> list[str]:
    """A case; eigenvalues above ½, with those by theory in brackets, exactly and by number of pairs; grown modes."""
    rho, variance = model(loss, batch, d, ends)
    columns = [exact(rho, variance, loss, batch)]
    for pairs in PAIRS:
        draws = [counted(rho, variance, loss, batch, pairs, seed) for seed in range(DRAWS)]
        columns.append(np.mean(draws, axis=0).tolist())
    case = [NAMES[loss], str(batch), str(d), f"{ends[0]:g} to {ends[1]:g}"]
    above = [f"{measured:.1f} ({theory:.1f})" for measured, theory, _ in columns[1:]]
    return [*case, f"{columns[0][0]:.0f}", *above, ", ".join(f"{count:g}" for *_, count in columns)]


def main() -> None:
    header = ["loss", "batch", "d", "ρ", "exact", *(f"{pairs} pairs" for pairs in PAIRS), "grown"]
    found = [row(*case) for case in CASES]
    for line in (header, ["---"] * len(header), *found):
        print("| " + " | ".join(line) + " |")
    print(json.dumps({"header": header, "rows": found}, ensure_ascii=False))


if __name__ == "__main__":
    main()
