"""What pairs alone say about training, before any: behind `stairwise predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, number, positive_int
from stairwise.data.images import load
from stairwise.data.views import two_crops
from stairwise.figures.terminal import text_curve
from stairwise.files import atomic
from stairwise.report.page import Table
from stairwise.theory.correlation import Correlation
from stairwise.theory.ensemble import Staircase, predict_staircase
from stairwise.theory.laws import learning_rate_bound
from stairwise.theory.solutions import check_dimension

__all__ = ["Outlook", "outlook", "outlook_on_features", "outlook_on_images", "read_features"]

SPARE = 50  # modes beyond d that compete with the last ones


@dataclass(frozen=True, eq=False)
class Outlook:
    """Predicted staircase of one dataset."""

    name: str
    corr: Correlation
    gamma: NDArray
    d: int
    alpha: float
    lr: float | None
    staircase: Staircase

    @property
    def lr_bound(self) -> float:
        return learning_rate_bound(self.gamma)

    def table(self) -> Table:
        """Mode, γ, median step time and its 90 % interval."""
        low, middle, high = self.staircase.step_quantiles()
        header = ["mode", "γ", "step at t", "90 % of initializations"]
        rows = [
            [str(j + 1), f"{self.gamma[j]:.4g}", _time(middle[j]), _between(low[j], high[j])] for j in range(self.d)
        ]
        if self.lr is not None:
            header.append("step number")
            for j, row in enumerate(rows):
                row.append(f"{middle[j] / self.lr:,.0f}" if np.isfinite(middle[j]) else "never")
        return Table(
            f"{self.name}: {self.corr.pairs:,} pairs, {self.corr.features:,} features, α = {self.alpha:g}", header, rows
        )

    def text(self) -> str:
        """The learning-rate bound and the staircase of the loss."""
        stable = f"largest stable learning rate 1/(4γ₁) = {self.lr_bound:.3g}"
        curve = text_curve(self.staircase.times, self.staircase.loss_quantiles(0.5)[0])
        return f"{stable}\n\nloss ‖C − I‖² over time t = lr × step, median\n{curve}"

    def summary(self) -> dict[str, Any]:
        """Everything, for scripts."""
        low, middle, high = self.staircase.step_quantiles()
        return {
            "source": self.name,
            "pairs": self.corr.pairs,
            "features": self.corr.features,
            "d": self.d,
            "alpha": self.alpha,
            "lr": self.lr,
            "lr_bound": self.lr_bound,
            "gamma": self.gamma[: self.d],
            "step_times": {"q05": low, "median": middle, "q95": high},
            "loss": {"t": self.staircase.times, "median": self.staircase.loss_quantiles(0.5)[0]},
        }

    def draw(self, target: Path) -> None:
        """Loss and spectrum of the median draw with the band of the loss over draws."""
        from stairwise.figures.staircase import draw_outlook
        from stairwise.figures.style import style

        if target.suffix not in {".png", ".pdf", ".svg"}:
            raise InputError("--out", "must end in .png, .pdf or .svg", target)
        with style(), atomic(target) as part:
            spectra = np.median(self.staircase.spectra, axis=0)
            bands = self.staircase.loss_quantiles()
            draw_outlook(self.staircase.times, spectra, bands, self.staircase.step_quantiles()).savefig(part)


def outlook(name: str, corr: Correlation, d: int, alpha: float, lr: float | None, draws: int, seed: int) -> Outlook:
    """Leading modes of Γ, then the logistic law over random initializations."""
    d = positive_int(d, "d", corr.rank_bound, f"{corr.pairs} pairs of {corr.features} features allow no more modes")
    if lr is not None:
        number(lr, "lr", above=0)
    gamma, _ = corr.top(min(corr.rank_bound, d + SPARE))
    check_dimension(d, gamma)
    staircase = predict_staircase(gamma, d, alpha, lr=lr, draws=draws, seed=seed)
    return Outlook(name, corr, gamma, d, alpha, lr, staircase)


def outlook_on_images(
    source: str,
    d: int,
    alpha: float,
    lr: float | None,
    draws: int,
    seed: int,
    *,
    n: int,
    crop: int,
    pixels: str,
    size: int,
) -> Outlook:
    """From two crops of each of n images."""
    if source.endswith(".npy") and ":" not in source:
        raise InputError(
            "x_b.npy", "is needed beside the features of the first view", source, "or array:FILE for images"
        )
    images = load(source, size=positive_int(size, "size"))
    corr = Correlation.from_pairs(*two_crops(images, n, crop, pixels, seed))
    return outlook(images.name, corr, d, alpha, lr, draws, seed)


def outlook_on_features(
    path_a: Path, path_b: Path, d: int, alpha: float, lr: float | None, draws: int, seed: int
) -> Outlook:
    """From two files of features, row i of each a view of sample i; memory-mapped and read in pieces."""
    corr = Correlation.from_pairs(read_features(path_a), read_features(path_b))
    return outlook(f"{path_a.name}, {path_b.name}", corr, d, alpha, lr, draws, seed)


def read_features(path: Path) -> NDArray:
    """Features (n, m) from a .npy file, memory-mapped."""
    try:
        x = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(str(path), "must exist", None, "give two .npy files of features") from None
    except (ValueError, EOFError, OSError) as error:
        raise InputError(str(path), "must be a whole .npy file without objects", error) from error
    if not isinstance(x, np.ndarray) or x.ndim != 2:
        shape = f"shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(str(path), "must be a 2-D .npy array, rows are samples", shape)
    return x


def _time(t: float) -> str:
    return f"{t:.4g}" if np.isfinite(t) else "never"


def _between(low: float, high: float) -> str:
    return f"{_time(low)} – {_time(high)}"
