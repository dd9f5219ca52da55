"""Does batch norm lower the sampling noise of a batch? Small networks with and without it, on a CPU.

    python -m benchmarks.bench_batch_norm [--seeds 10 11 12] [--updates 5000] [--folder runs/norm] [--out FILE.json]

`sw.carried` predicts how many modes a batch carries, if its pairs are independent. Batch norm inside the network makes
them dependent in training: it holds means and variances of hidden units fixed in every batch. Then C varies less from
batch to batch than independent pairs would make it. Barlow Twins (λ = 1, without a batch norm of its own):

    plain, norm     two hidden layers of 128 on scikit-learn's digits (those of `stairwise reproduce batch`), d = 32,
                    Adam, without and with batch norm after each; batches of 32 and 64
    resnet18        ResNet-18 of width 8 on 5000 images of CIFAR-10 at 16 px, d = 50, LARS, 6000 updates; batch of 64

UPDATES are those at batch 128; smaller batches get more, for the same number of pairs. One row per run, everything in
training mode. Noise between batches, N Σ Var C_ij, as a share of what independent pairs would give (their scatter): in
all, and for the diagonal entries of the leading modes of C. Eigenvalues of C above ½, and the loss: measured, and by
four laws. All take the correlations of the modes from the network, and their noise

    independent     from the scatter of pairs, one factor for all modes: what `sw.carried` says
    scatter         from the scatter of pairs, for every two modes by themselves
    between         from batches: as `independent`, times the share of all noise
    each            from batches, for every two modes by themselves

The last is the loss of these very batches as a function of the variances of the modes, so its minimum says how far the
scales of the modes are from their optimum.

`eval` is the loss of batches of the same size in evaluation mode, when their pairs are independent. A run takes one to
ten minutes on one core. FILE keeps what it holds of other runs. The last line is JSON.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

import stairwise as sw
from benchmarks.bench_batch import recipe_for
from benchmarks.rows import keep, show, stored_rows
from stairwise.losses import MODULES
from stairwise.paper.batch import LOSSES, counts, digits
from stairwise.staircase.noise import carried_by, excess_noise
from stairwise.theory.batch_noise import VISIBLE, carried
from stairwise.training.networks import fixed_views, load_network

LOSS = "barlow_twins"
NAMES = {f"{name} {batch}": (name, batch) for batch in (32, 64) for name in ("plain", "norm")}
NAMES |= {"resnet18 64": ("resnet18", 64)}
WORDS = {"plain": "perceptron", "norm": "perceptron, batch norm", "resnet18": "ResNet-18"}
KNOWN = 128  # the batch that UPDATES are for
BATCHES = 640  # that are measured
RESNET = 6000  # updates
LEAST = 1e-6  # variance of a mode that counts
SHOWN = 12  # modes whose noise is stored
SMALL: dict[str, Any] = {
    "encoder_options": {"stem": "small", "width": 8},
    "size": 16,
    "pretrain": 5000,
    "precision": "float32",
    "keep": 0,
    "probes": [],
}
LAWS = ("independent", "scatter", "between", "each")
HEADER = ["network", "batch", "seed", "noise between batches, as a share", "λ above ½: measured", *LAWS]
HEADER += ["loss: measured", *LAWS, "eval"]

Floats = NDArray[np.float64]
Embed = Callable[[], tuple[Tensor, Tensor]]  # embeddings of both views of a new batch


def perceptron(norm: bool, d: int = 32, width: int = 128, pixels: int = 64) -> nn.Module:
    hidden: list[nn.Module] = []
    for m in (pixels, width):
        hidden += [nn.Linear(m, width), *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, d))


def on_digits(norm: bool, batch: int, seed: int, updates: int) -> tuple[nn.Module, Embed]:
    """A trained perceptron."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = perceptron(norm)
    draw, loss = digits(torch.Generator().manual_seed(seed), noise=0.7), MODULES[LOSS](**LOSSES[LOSS])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    updates *= max(1, KNOWN // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for _ in range(updates):
        optimizer.zero_grad()
        loss(*(model(x) for x in draw(batch))).backward()
        optimizer.step()
        schedule.step()
    return model, lambda: tuple(model(x) for x in draw(batch))


def on_images(batch: int, seed: int, folder: Path) -> tuple[nn.Module, Embed]:
    """A trained ResNet-18, and batches of pairs that it was trained on, in new views."""
    recipe = sw.Recipe(**(recipe_for("cifar10", LOSS, batch, RESNET).__dict__ | SMALL | {"seed": seed}))
    run = sw.train(recipe, folder / f"resnet18-{batch}-{seed}")
    model, generator = load_network(run).train(), torch.Generator().manual_seed(seed)
    first, second = fixed_views(run, int(SMALL["pretrain"]), seed + 1, torch.device("cpu")).chunk(2)

    def embed() -> tuple[Tensor, Tensor]:
        rows = torch.randperm(len(first), generator=generator)[:batch]
        return model(first[rows])[1], model(second[rows])[1]

    return model, embed


@torch.no_grad()
def measured(model: nn.Module, embed: Embed, batch: int) -> dict[str, Any]:
    """Numbers of batches in training mode, and the loss of batches in evaluation mode."""
    model.train()
    a, b = several(embed)
    facts = {"loss": round(mean_loss(a, b), 3)} | facts_of(a, b, batch)
    model.eval()
    return facts | {"eval": round(mean_loss(*several(embed)), 3)}


def several(embed: Embed) -> tuple[Tensor, Tensor]:
    """Embeddings of both views of many batches, (batches, N, d) each."""
    first, second = zip(*(embed() for _ in range(BATCHES)), strict=True)
    return torch.stack(first).double(), torch.stack(second).double()


def mean_loss(a: Tensor, b: Tensor) -> float:
    objective = MODULES[LOSS](**LOSSES[LOSS])
    return float(np.mean([float(objective(*pair)) for pair in zip(a, b, strict=True)]))


@dataclass(frozen=True)
class Modes:
    """Modes of the mean of C over batches, in descending order of λ.

    Attributes:
        lam, variance: λ_i and s_i, (d,); the constant is a mode like any other.
        between, independent: N Var C_ij over batches, and what independent pairs would give, (d, d).
        constant: how much of the square of the leading mode is that of its mean.
    """

    lam: Floats
    variance: Floats
    between: Floats
    independent: Floats
    constant: float

    @property
    def rho(self) -> Floats:
        """Correlations between two views, (d,)."""
        return self.lam / np.maximum(self.variance, LEAST)


def modes_of(a: Tensor, b: Tensor) -> Modes:
    """From embeddings of both views of many batches, (batches, N, d) each."""
    C = a.transpose(1, 2) @ b / a.shape[1]
    axes = torch.linalg.eigh((C + C.transpose(1, 2)).mean(dim=0))[1].flip(1)
    a, b = a @ axes, b @ axes
    C = a.transpose(1, 2) @ b / a.shape[1]
    C = (C + C.transpose(1, 2)) / 2
    x, y = a.flatten(0, 1), b.flatten(0, 1)
    # the square of (x_i y_j + x_j y_i)/2, summed over pairs
    square = ((x**2).T @ y**2 + (y**2).T @ x**2 + 2 * (x * y).T @ (x * y)) / (4 * len(x))
    mean, noise = C.mean(dim=0), a.shape[1] * C.var(dim=0)
    variance = (x**2 + y**2).mean(dim=0) / 2
    lam, s, between, independent = (np.asarray(v) for v in (mean.diagonal(), variance, noise, square - mean**2))
    return Modes(lam, s, between, independent, float((x + y)[:, 0].mean() ** 2 / 4 / s[0]))


def settled(modes: Modes, noise: Floats, batch: int) -> tuple[Floats, float]:
    """Variances s (d,) and loss where d − 2 Σ ρ_i s_i + Σ (ρ_i s_i)² + Σ w_ij s_i s_j / N is least over s ≥ 0.

    The noise of C_ij, (d, d), is kept in proportion to the product of both variances."""
    some = modes.variance > LEAST
    s, d = modes.variance[some], len(modes.lam)
    rho, w = modes.rho[some], noise[np.ix_(some, some)] / np.outer(s, s)

    def loss(s: Floats) -> tuple[float, Floats]:
        value = d - 2 * rho @ s + (rho * s) @ (rho * s) + s @ w @ s / batch
        return float(value), -2 * rho + 2 * rho**2 * s + 2 * w @ s / batch

    found = minimize(loss, s, jac=True, bounds=[(0, None)] * len(s), method="L-BFGS-B", options={"maxiter": 5000})
    variance = np.zeros(d)
    variance[some] = found.x
    return variance, float(found.fun)


def facts_of(a: Tensor, b: Tensor, batch: int) -> dict[str, Any]:
    """Measured numbers, and those of the four laws."""
    monitor = sw.SpectrumMonitor()
    for pair in zip(a, b, strict=True):
        monitor.update(*pair)
    seen, modes = monitor.compute(), modes_of(a, b)
    independent = carried_by(seen, LOSS, LOSSES[LOSS], batch)
    assert seen.correlations is not None
    assert independent is not None
    share = float(modes.between.sum() / modes.independent.sum())
    constant = [1.0] if (seen.mean_square or 0.0) > VISIBLE else []
    rho, d = np.append(constant, seen.correlations), len(seen.correlations)
    between = carried(rho, batch, LOSS, d, share * excess_noise(seen, LOSS), **LOSSES[LOSS])
    facts: dict[str, Any] = {"share": round(share, 4)}
    shares = np.diagonal(modes.between) / np.diagonal(modes.independent)
    facts["by_mode"] = shares[:SHOWN].round(3).tolist()
    facts["constant"] = round(modes.constant, 3)
    facts["measured"], facts["eigenvalues"] = counts(seen, LOSS), modes.lam[:SHOWN].round(3).tolist()
    for name, law in (("independent", independent), ("between", between)):
        facts |= _of(name, law.variance, law.eigenvalues, law.loss)
    for name, noise in (("scatter", modes.independent), ("each", modes.between)):
        variance, least = settled(modes, noise, batch)
        facts |= _of(name, variance, modes.rho * variance, least)
    return facts


def _of(name: str, variance: Floats, lam: Floats, loss: float) -> dict[str, Any]:
    """What a law says: modes of variance above 0.1 and eigenvalues above ½, the largest eigenvalues, the loss."""
    pair = [int((variance > VISIBLE).sum()), int((lam > 0.5).sum())]
    return {
        name: pair,
        f"{name} eigenvalues": np.sort(lam)[::-1][:SHOWN].round(3).tolist(),
        f"{name} loss": round(loss, 3),
    }


def row(name: str, seed: int, updates: int, folder: Path) -> dict[str, Any]:
    kind, batch = NAMES[name]
    trained = on_images(batch, seed, folder) if kind == "resnet18" else on_digits(kind == "norm", batch, seed, updates)
    return {"run": name, "seed": seed, "updates": RESNET if kind == "resnet18" else updates} | measured(*trained, batch)


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    found = []
    for one in rows:
        kind, batch = NAMES[one["run"]]
        above = [str(one[key][1]) for key in ("measured", *LAWS)]
        losses = [f"{one[key]:.2f}" for key in ("loss", *(f"{law} loss" for law in LAWS), "eval")]
        found.append([WORDS[kind], str(batch), str(one["seed"]), f"{one['share']:.2f}", *above, *losses])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(NAMES), choices=list(NAMES), metavar="RUN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--folder", type=Path, default=Path("runs/norm"))
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    rows = stored_rows(options.out)
    for name in options.runs:
        for seed in options.seeds:
            rows = keep(rows, row(name, seed, options.updates, options.folder), list(NAMES), options.out)
    show(HEADER, table(rows), rows)


if __name__ == "__main__":
    main()
