"""Predict the staircase from pairs, before training: `sw.predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import one_of, positive_int, rate, scale
from stairwise.figures.terminal import text_curve
from stairwise.files import atomic, check_target
from stairwise.table import Table
from stairwise.theory.correlation import Correlation
from stairwise.theory.ensemble import Staircase, predict_staircase
from stairwise.theory.laws import learning_rate_bound
from stairwise.theory.solutions import check_dimension, positive_modes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
FORMATS = (".png", ".pdf", ".svg")
DIMENSION = 10  # unless the data have fewer modes
SPARE = {"sgd": 50, "muon": 200}  # number of modes beyond d, which compete with the last ones


def predict(
    x_a: ArrayLike,
    x_b: ArrayLike,
    d: int | None = 10,
    alpha: float = 1e-7,
    lr: float | None = None,
    optimizer: str = "sgd",
    *,
    draws: int = 100,
    seed: int = 0,
    name: str = "pairs",
) -> "Outlook":
    """Predict when a linear model learns each dimension, from pairs of views (Eq. 13 over random initializations).

    Arguments:
        x_a, x_b: rows i are views of sample i, (n, features); memory-mapped arrays are read in blocks.
        d: dimension of the embedding; None: 10, or the number of positive γ if there are fewer.
        alpha: scale of the Gaussian initial weights.
        lr: learning rate of descent; None: flow.
        optimizer: "sgd", W ← W − lr ∇L, or "muon", W ← W + lr polar(−∇L).
        draws, seed: number and seed of the random initializations for the intervals.
        name: name of the data, for titles.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal((200, 5)) * [4, 3, 2, 1, 0.5]
        >>> outlook = predict(x, x, d=3)
        >>> outlook.step_times.round(2), bool((outlook.low <= outlook.high).all())
        (array([0.27, 0.46, 1.13]), True)
        >>> predict(x, x, d=3, optimizer="muon").step_times.round(2)
        array([0.19, 0.25, 0.38])
    """
    corr = Correlation.from_pairs(x_a, x_b)
    remedy = f"{corr.pairs} pairs of {corr.features} features allow no more modes"
    wanted = DIMENSION if d is None else positive_int(d, "d", corr.rank_bound, remedy)
    lr, alpha = None if lr is None else rate(lr), scale(alpha)
    spare = SPARE[one_of(optimizer, "optimizer", SPARE)]
    gamma, _ = corr.top(min(corr.rank_bound, wanted + spare))
    d = check_dimension(wanted if d is not None else max(1, min(wanted, positive_modes(gamma))), gamma)
    staircase = predict_staircase(gamma, d, alpha, lr=lr, draws=draws, seed=seed, optimizer=optimizer)
    low, middle, high = staircase.step_quantiles()
    return Outlook(name, corr.pairs, corr.features, gamma[:d], alpha, lr, middle, low, high, staircase, optimizer)


@dataclass(frozen=True, eq=False)
class Outlook:
    """The predicted staircase.

    Attributes:
        name, pairs, features: name and size of the data.
        gamma: the leading eigenvalues of Γ, (d,).
        alpha, lr: scale of the initial weights, learning rate.
        step_times: median time t = lr × step of each step over initializations, (d,); infinite if never.
        low, high: ends of the interval that contains 90 % of initializations, (d,).
        staircase: loss and eigenvalues over time, for every initialization.
        optimizer: "sgd" or "muon".
    """

    name: str
    pairs: int
    features: int
    gamma: Floats
    alpha: float
    lr: float | None
    step_times: Floats
    low: Floats
    high: Floats
    staircase: Staircase
    optimizer: str = "sgd"

    @property
    def lr_bound(self) -> float:
        """The largest stable learning rate: 1/(4γ₁) for SGD, infinite for Muon."""
        return learning_rate_bound(self.gamma) if self.optimizer == "sgd" else np.inf

    def table(self) -> Table:
        """Mode, γ, median step time, its 90 % interval, and the first update after it if a learning rate is given."""
        header = ["mode", "γ", "step at t", "90 % of initializations"]
        columns = zip(self.gamma, self.step_times, self.low, self.high, strict=True)
        rows = [
            [str(j), f"{gamma:.4g}", _time(middle), f"{_time(low)} – {_time(high)}"]
            for j, (gamma, middle, low, high) in enumerate(columns, 1)
        ]
        if self.lr is not None:
            header.append("step number")
            for t, row in zip(self.step_times, rows, strict=True):
                row.append(f"{np.ceil(t / self.lr * (1 - 1e-12)):,.0f}" if np.isfinite(t) else "never")
        title = f"{self.name}: {self.pairs:,} pairs, {self.features:,} features, linear model, α = {self.alpha:g}"
        if self.optimizer == "muon":
            title += ", Muon"
        return Table(title, header, rows)

    def text(self) -> str:
        """What is predicted, the learning-rate bound and the staircase of the loss."""
        model = "for a linear model, f(x) = W x; a deep network takes its steps at other times"
        if self.optimizer == "sgd":
            stable = f"largest stable learning rate 1/(4γ₁) = {self.lr_bound:.3g}"
        else:
            a = (self.lr or 0.0) * np.sqrt(self.gamma[0])
            within = f"2a + a²{f' = {2 * a + a * a:.2g}' if a else ''} of 1, a = lr √γ₁"
            stable = f"Muon, W ← W + lr polar(−∇L), does not diverge; eigenvalues end within {within}"
            stable += ", and the prediction needs a < 1"
        curve = text_curve(self.staircase.times, self.staircase.loss_quantiles(0.5)[0])
        return f"{model}\n{stable}\n\nloss ‖C − I‖² of the linear model over time t = lr × step, median\n{curve}"

    def __str__(self) -> str:
        return f"{self.table()}\n{self.text()}"

    def summary(self) -> dict[str, Any]:
        """All results, for scripts."""
        return {
            "source": self.name,
            "model": "linear",
            "pairs": self.pairs,
            "features": self.features,
            "d": len(self.gamma),
            "alpha": self.alpha,
            "lr": self.lr,
            "lr_bound": self.lr_bound,
            "optimizer": self.optimizer,
            "gamma": self.gamma,
            "step_times": {"q05": self.low, "median": self.step_times, "q95": self.high},
            "loss": {"t": self.staircase.times, "median": self.staircase.loss_quantiles(0.5)[0]},
        }

    def draw(self, path: str | Path | None = None) -> "Figure":
        """Draw the median loss and spectrum, and the band of the loss over initializations; also write to `path`."""
        from stairwise.figures.staircase import draw_outlook
        from stairwise.figures.style import style

        if path is not None:
            check_target(path, "path", FORMATS)
        with style():
            spectra = np.median(self.staircase.spectra, axis=0)
            bands = self.staircase.loss_quantiles()
            steps = np.stack([self.low, self.step_times, self.high])
            figure = draw_outlook(self.staircase.times, spectra, bands, steps)
            if path is not None:
                with atomic(path) as part:
                    figure.savefig(part)
        return figure


def _time(t: float) -> str:
    return f"{t:.4g}" if np.isfinite(t) else "never"
