r"""The spectra of an embedding, from moments that are accumulated batch by batch.

Sums are kept in float64 on the device of the embeddings; `update` neither synchronizes nor decomposes anything.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stairwise.checks import InputError

__all__ = ["Spectrum", "SpectrumMonitor", "decompose"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues, descending.

    Attributes:
        samples: pairs behind them.
        eigenvalues: of C = Σ (z_a z_bᵀ + z_b z_aᵀ)/2N (Eq. 3), (d,); can be negative.
        covariance: of the centred covariance of both views together, unbiased, (d,).
        normalized: of C after each dimension of each view is standardized (Barlow Twins' batch norm), (d,), if asked.
        hidden: the same of the representations, (features,), where they were given.
    """

    samples: int
    eigenvalues: Floats
    covariance: Floats
    normalized: Floats | None = None
    hidden: Floats | None = None


class SpectrumMonitor:
    """Accumulates moments of (z_a, z_b), and of (h_a, h_b) where given, since the last reset.

    Arguments:
        normalized: also decompose C after standardizing.

    >>> monitor = SpectrumMonitor()
    >>> z = 2 * torch.eye(4)
    >>> monitor.update(z, z)
    >>> monitor.compute().eigenvalues
    array([1., 1., 1., 1.])
    """

    def __init__(self, normalized: bool = False) -> None:
        self.normalized = normalized
        self.sums: dict[str, Tensor] = {}

    def update(self, z_a: Tensor, z_b: Tensor, h_a: Tensor | None = None, h_b: Tensor | None = None) -> None:
        """Add a batch, (N, d) each."""
        if z_a.ndim != 2 or z_a.shape != z_b.shape:
            raise InputError("z_a and z_b", "must be 2-D of one shape", f"{tuple(z_a.shape)}, {tuple(z_b.shape)}")
        d = self.sums["a"].shape[0] if self.sums else z_a.shape[1]
        if d != z_a.shape[1]:
            raise InputError("z_a", f"must keep its {d} dimensions", z_a.shape[1], "reset() the monitor first")
        with torch.no_grad():
            a, b = z_a.double(), z_b.double()
            self._add("ab", a.T @ b)
            self._add("aa", a.T @ a)
            self._add("bb", b.T @ b)
            self._add("a", a.sum(dim=0))
            self._add("b", b.sum(dim=0))
            self._add("n", torch.full((), float(len(a)), dtype=torch.float64, device=a.device))
            if h_a is not None and h_b is not None:
                h = torch.cat([h_a, h_b]).double()
                self._add("hh", h.T @ h)
                self._add("h", h.sum(dim=0))

    def reset(self) -> None:
        """Forget everything, in place: buffers stay where a captured graph expects them."""
        for value in self.sums.values():
            value.zero_()

    def compute(self) -> Spectrum:
        """Decompose what has been accumulated (waits for the device)."""
        return decompose(self.snapshot(), self.normalized)

    def snapshot(self) -> dict[str, Floats]:
        """Copies of the sums on the host (waits for the device), for `decompose` at leisure, in another thread say."""
        return {name: value.cpu().numpy().copy() for name, value in self.sums.items()}

    def state(self) -> dict[str, Tensor]:
        """Tensors from which `load` continues."""
        return dict(self.sums)

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Continue from `state`."""
        self.sums = {name: value.to(device) for name, value in state.items()}

    def _add(self, name: str, value: Tensor) -> None:
        if name in self.sums:
            self.sums[name] += value
        else:
            self.sums[name] = value


def decompose(sums: dict[str, Floats], normalized: bool = False) -> Spectrum:
    """Spectra of accumulated sums."""
    n = float(sums["n"]) if sums else 0.0
    if n < 2:
        raise InputError("monitor", "must have seen at least two pairs", int(n), "update() it first")
    return Spectrum(
        int(n),
        _descending(sums["ab"] / n),
        _descending(_covariance(sums["aa"] + sums["bb"], sums["a"] + sums["b"], 2 * n)),
        _descending(_standardized(sums, n)) if normalized else None,
        _descending(_covariance(sums["hh"], sums["h"], 2 * n)) if "hh" in sums else None,
    )


def _standardized(sums: dict[str, Floats], n: float) -> Floats:
    """The correlation of standardized views; 0 for dimensions without variance."""
    mean_a, mean_b = sums["a"] / n, sums["b"] / n
    var_a, var_b = np.diag(sums["aa"]) / n - mean_a**2, np.diag(sums["bb"]) / n - mean_b**2
    with np.errstate(divide="ignore", invalid="ignore"):
        normed = (sums["ab"] / n - np.outer(mean_a, mean_b)) / np.sqrt(np.outer(var_a, var_b))
    return np.nan_to_num(normed, posinf=0, neginf=0)


def _covariance(second: Floats, first: Floats, n: float) -> Floats:
    out: Floats = (second - np.outer(first, first) / n) / (n - 1)
    return out


def _descending(matrix: Floats) -> Floats:
    """Eigenvalues of the symmetric part."""
    return np.asarray(np.linalg.eigvalsh((matrix + matrix.T) / 2)[::-1], dtype=np.float64)
