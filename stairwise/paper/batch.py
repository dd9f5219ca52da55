"""Beyond the paper: how many dimensions a batch can carry, predicted and measured.

    stairwise reproduce batch        36 minutes on one busy CPU core; --set updates=0 leaves out the networks

Barlow Twins (‖C − I‖²), VICReg and SimCLR at batches of 32 to 1024, two systems each. Linear: d = 48 outputs of 96
Gaussian features whose views have known correlations ρ_j, which fall geometrically or evenly. Network: two hidden
layers on scikit-learn's digits, turned, shifted and with noise, d = 32; ρ_j is measured by the monitor in the run
itself ("own"), or once, in another run at batch 128 ("elsewhere"). Counted are modes of variance above 0.1 and
eigenvalues of C above ½ (SimCLR: of z of length √d). No constant is fitted. Expected: both counts within 15 %, or
within one mode. Networks with a batch below 128 see as many pairs as with 128: modes near the threshold grow slowly.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.data.images import load
from stairwise.figures.batch import draw_carried
from stairwise.losses import MODULES
from stairwise.monitor.decompose import Spectrum
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.nets.perceptron import MLP
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel
from stairwise.staircase.noise import carried_by, excess_noise
from stairwise.table import Table
from stairwise.theory.batch_noise import VISIBLE, carried

Floats = NDArray[np.float64]
Draw = Callable[[int], tuple[Tensor, Tensor]]  # number of pairs → two views of them

LOSSES: dict[str, dict[str, Any]] = {
    "barlow_twins": {"lambda_": 1.0, "batch_norm": False, "symmetric": True},
    "vicreg": {},
    "simclr": {"temperature": 0.2},
}
NAMES = {"barlow_twins": "Barlow Twins", "vicreg": "VICReg", "simclr": "SimCLR"}
SPECTRA: dict[str, Floats] = {
    "geometric": np.geomspace(0.95, 0.95 * 0.96**95, 96),
    "even": np.linspace(0.95, 0.05, 96),
}
KNOWN = 128  # the batch at which ρ is measured to predict the others
MEASURED_PAIRS = 20_000
WITHIN, MODES = 0.15, 1  # a count is right within 15 %, or within one mode

SMOKE = {"batches": "32,128", "linear_updates": 700, "updates": 0}
ALT = "Number of modes that grow, predicted and measured, over the batch size for three losses."


@dataclass(frozen=True)
class Config:
    """Sizes are our choice; seed: of the linear models; networks have seeds `seed` and `seed` + 1.

    updates: of networks at batches of 128 and more; smaller batches get more, for the same number of pairs.
    """

    batches: str = "32,64,128,256,512,1024"
    d: int = 48
    linear_updates: int = 3000
    network_batches: str = "32,128,512"
    network_d: int = 32
    updates: int = 10_000
    width: int = 128
    noise: float = 0.7
    seed: int = 0


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Counts (batches, 2) by name: NAME.predicted and NAME.measured; networks also NAME.elsewhere and NAME.rho."""
    linear, networks = (_sizes(text) for text in (config.batches, config.network_batches))
    out: dict[str, Any] = {"sizes": linear, "network_sizes": networks, "d": config.d}
    jobs = [(loss, name) for loss in LOSSES for name in SPECTRA]
    jobs += [(loss, f"network {seed}") for loss in LOSSES for seed in (0, 1) if config.updates]
    for i, (loss, name) in enumerate(jobs):
        progress(i / len(jobs), 1, f"{NAMES[loss]}, {name}")
        if name in SPECTRA:
            found = [_linear(config, loss, SPECTRA[name], int(size)) for size in linear]
        else:
            found = [_network(config, loss, int(name[-1]) + config.seed, int(size)) for size in networks]
        out |= {f"{loss}, {name}.{key}": np.array([one[key] for one in found]) for key in found[0]}
    if config.updates:
        out |= _elsewhere(out, networks, config.network_d)
    return out


def _sizes(text: str) -> NDArray[np.int64]:
    return np.array([int(size) for size in text.split(",")])


def _elsewhere(out: dict[str, Any], sizes: NDArray, d: int) -> dict[str, Any]:
    """Counts of the second networks, predicted from the correlations of the first network at one batch size."""
    at = int(np.argmin(np.abs(sizes - KNOWN)))
    predicted = {}
    for loss, options in LOSSES.items():
        rho, excess = (out[f"{loss}, network 0.{name}"][at] for name in ("rho", "excess"))
        modes = [carried(rho, int(size), loss, d, float(excess), **options) for size in sizes]
        predicted[f"{loss}, network 1.elsewhere"] = np.array([[m.above_tenth, m.above_half] for m in modes])
    return predicted


def _linear(config: Config, loss: str, rho: Floats, batch: int) -> dict[str, Any]:
    """z = W x for Gaussian features x of correlations rho between the views."""
    generator = torch.Generator().manual_seed(config.seed)
    shared, own = torch.tensor(np.sqrt(rho)).float(), torch.tensor(np.sqrt(1 - rho)).float()

    def draw(n: int) -> tuple[Tensor, Tensor]:
        base = shared * torch.randn(n, len(rho), generator=generator)
        first, second = (base + own * torch.randn(n, len(rho), generator=generator) for _ in "ab")
        return first, second

    model = nn.Linear(len(rho), config.d, bias=False)
    with torch.no_grad():
        model.weight.normal_(0, 0.5 / len(rho) ** 0.5, generator=generator)
    updates = config.linear_updates if loss != "simclr" else config.linear_updates // 2
    fitted = trained(model, draw, loss, batch, updates, lr=5e-3 if loss != "simclr" else 1e-2)
    theory = carried(rho, batch, loss, config.d, **LOSSES[loss])
    return {"predicted": [theory.above_tenth, theory.above_half], "measured": counts(fitted, loss)}


def _network(config: Config, loss: str, seed: int, batch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = MLP(64, [config.width, config.width])
        model = nn.Sequential(encoder, nn.Linear(config.width, config.network_d))
    updates = config.updates * max(1, KNOWN // batch)
    fitted = trained(model, digits(generator, config.noise), loss, batch, updates, lr=3e-3)
    theory = carried_by(fitted, loss, LOSSES[loss], batch)
    if theory is None:
        raise RuntimeError("the embedding has collapsed")
    return {
        "predicted": [theory.above_tenth, theory.above_half],
        "measured": counts(fitted, loss),
        "rho": theory.rho.astype(np.float32),
        "excess": excess_noise(fitted, loss),
        "spectra": np.stack([fitted.covariance, fitted.eigenvalues]).astype(np.float32),
    }


def trained(model: nn.Module, draw: Draw, loss: str, batch: int, updates: int, lr: float) -> Spectrum:
    """Train with Adam and a cosine schedule, then measure on fresh pairs; SimCLR's z is given the length √d."""
    objective = MODULES[loss](**LOSSES[loss])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for _ in range(updates):
        optimizer.zero_grad()
        objective(*model(torch.cat(draw(batch))).chunk(2)).backward()
        optimizer.step()
        schedule.step()
    monitor = SpectrumMonitor()
    with torch.no_grad():
        for _ in range(MEASURED_PAIRS // 1000):
            z = model(torch.cat(draw(1000)))
            if loss == "simclr":
                z = nn.functional.normalize(z, dim=1) * z.shape[1] ** 0.5
            monitor.update(*z.chunk(2))
    return monitor.compute()


def counts(fitted: Spectrum, loss: str) -> list[int]:
    """Number of modes of variance above 0.1, and of eigenvalues of C above ½.

    Barlow Twins can learn the constant, a mode like any other; the covariance does not contain it.
    """
    constant = loss == "barlow_twins" and fitted.mean_square > VISIBLE
    return [int((fitted.covariance > VISIBLE).sum()) + constant, int((fitted.eigenvalues > 0.5).sum())]


def digits(generator: torch.Generator, noise: float, variants: int = 32) -> Draw:
    """Pairs of scikit-learn's digits: each view is one of 32 turned, scaled and shifted copies, plus noise."""
    pixels = torch.tensor(load("digits").pixels[..., 0] / 255.0).float()[:, None]
    images = (pixels - pixels.mean()) / pixels.std()
    n = len(images)
    pool = []
    for _ in range(variants):
        scale, angle = 0.8 + 0.4 * torch.rand(n, generator=generator), 0.6 * (torch.rand(n, generator=generator) - 0.5)
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(n, 2, 2)
        shift = 0.5 * (torch.rand(n, 2, 1, generator=generator) - 0.5)
        grid = nn.functional.affine_grid(
            torch.cat([scale[:, None, None] * turn, shift], dim=2), list(images.shape), align_corners=False
        )
        pool.append(nn.functional.grid_sample(images, grid, align_corners=False).flatten(1))
    views = torch.stack(pool, dim=1)

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(n, (batch,), generator=generator)
        first, second = (views[rows, torch.randint(variants, (batch,), generator=generator)] for _ in "ab")
        extra = (noise * torch.randn(first.shape, generator=generator) for _ in "ab")
        return first + next(extra), second + next(extra)

    return draw


def cases(arrays: Arrays) -> Iterator[tuple[str, str, NDArray, NDArray]]:
    """(loss, case, predicted, measured), counts of shape (batches, 2), for everything that was computed."""
    for key in arrays:
        stem, _, kind = key.rpartition(".")
        if kind in ("predicted", "elsewhere"):
            loss, name = stem.split(", ")
            name = name if name in SPECTRA else f"{name}, {'own ρ' if kind == 'predicted' else 'ρ elsewhere'}"
            yield loss, name, arrays[key].astype(float), arrays[f"{stem}.measured"].astype(float)


def misses(predicted: NDArray, measured: NDArray) -> tuple[float, bool]:
    """The largest relative error of a count, and whether all are within 15 %, or within one mode (they are whole)."""
    off = np.abs(predicted - measured)
    relative = off / np.maximum(measured, 1.0)
    return float(relative.max()), bool(((relative <= WITHIN) | (off <= MODES)).all())


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for loss, name, predicted, measured in cases(arrays):
        largest, holds = misses(predicted, measured)
        text = f"{NAMES[loss]}, {name}: largest error of a count"
        judged = "elsewhere" not in name
        claims.append(
            Claim(text, largest, f"≤ {WITHIN:g}, or one mode", holds) if judged else Claim.note(text, largest)
        )
    return claims


def ahead(arrays: Arrays) -> Iterator[tuple[str, str, int, NDArray, NDArray]]:
    """(loss, case, batch, predicted, measured) of each network, from the run at the batch size before."""
    sizes = arrays["network_sizes"]
    for loss, options in LOSSES.items():
        for name in (f"network {seed}" for seed in (0, 1) if f"{loss}, network {seed}.rho" in arrays):
            of = {key: arrays[f"{loss}, {name}.{key}"] for key in ("rho", "excess", "measured")}
            for i in range(len(sizes) - 1):
                rho = of["rho"][i]
                modes = carried(rho, int(sizes[i + 1]), loss, len(rho), float(of["excess"][i]), **options)
                predicted = np.array([modes.above_tenth, modes.above_half])
                yield loss, name, int(sizes[i + 1]), predicted, of["measured"][i + 1]


def draw(arrays: Arrays) -> Figure:
    batches = [arrays["sizes"], arrays["network_sizes"]]
    d = [int(arrays["d"]), max([len(v[0]) for k, v in arrays.items() if k.endswith(".rho")], default=0)]
    return draw_carried(batches, list(NAMES.items()), list(cases(arrays)), d)


def table(arrays: Arrays, networks: bool = False) -> Table:
    rows = [
        [NAMES[loss], name]
        + [f"{p[0]:.0f} ({m[0]:.0f}), {p[1]:.0f} ({m[1]:.0f})" for p, m in zip(predicted, measured, strict=True)]
        for loss, name, predicted, measured in cases(arrays)
        if (name not in SPECTRA) == networks
    ]
    sizes = arrays["network_sizes" if networks else "sizes"]
    title = (
        f"{'Networks' if networks else 'Linear models'}: predicted (measured) modes of variance above 0.1, then λ > ½"
    )
    return Table(title, ["loss", "case", *(f"batch {size}" for size in sizes)], rows)


def ahead_table(arrays: Arrays) -> Table:
    rows = [
        [NAMES[loss], name, str(size), f"{p[0]:.0f} ({m[0]:.0f})", f"{p[1]:.0f} ({m[1]:.0f})"]
        for loss, name, size, p, m in ahead(arrays)
    ]
    title = "Networks, from the run at a quarter of the batch: predicted (measured)"
    return Table(title, ["loss", "case", "batch", "variance above 0.1", "λ above ½"], rows)


def page(arrays: Arrays) -> Page:
    panels = []
    for loss, name, predicted, measured in cases(arrays):
        lines, x = [], np.log2(arrays["sizes" if name in SPECTRA else "network_sizes"].astype(float))
        for i, what in enumerate(("variance above 0.1", "λ above ½")):
            lines.append(Line(f"{what}, predicted", x, predicted[:, i], (i, 2), dashed=True))
            lines.append(Line(f"{what}, measured", x, measured[:, i], (i, 2)))
        panels.append(Panel(f"{NAMES[loss]}, {name}", "log₂ batch", "modes", lines))
    return Page(
        "How many dimensions a batch can carry",
        "Sampling noise keeps weakly shared modes from growing; the number that grows is predicted from the batch size "
        "and the correlation of each mode between two views.",
        panels,
        [table(arrays), table(arrays, networks=True), ahead_table(arrays)],
    )
