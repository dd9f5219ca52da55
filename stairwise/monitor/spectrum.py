r"""The spectra of an embedding, from moments that are accumulated batch by batch.

Sums are kept in float64 on the device of the embeddings; `update` neither synchronizes nor decomposes anything.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stairwise.checks import InputError, number, positive_int
from stairwise.losses.ranks import total

if TYPE_CHECKING:
    from stairwise.monitor.attach import Attachment

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
    """Accumulates moments of (z_a, z_b), and of (h_a, h_b) where given.

    Arguments:
        window: number of recent pairs to average over, at least; up to twice as many are. None: all since `reset`.
        half_life: number of pairs after which a pair counts half, instead of a window.
        normalized: also decompose C after standardizing.

    >>> monitor = SpectrumMonitor()
    >>> z = 2 * torch.eye(4)
    >>> monitor.update(z, z)
    >>> monitor.compute().eigenvalues
    array([1., 1., 1., 1.])
    """

    def __init__(self, window: int | None = None, half_life: float | None = None, *, normalized: bool = False) -> None:
        if window is not None and half_life is not None:
            raise InputError("window and half_life", "must not both be given", (window, half_life))
        self.window = None if window is None else positive_int(window, "window")
        self.half_life = None if half_life is None else number(half_life, "half_life", above=0)
        self.normalized = normalized
        self.sums: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}  # the window's older half
        self.seen = 0

    def update(self, z_a: Tensor, z_b: Tensor, h_a: Tensor | None = None, h_b: Tensor | None = None) -> None:
        """Add a batch, (N, d) each."""
        if z_a.ndim != 2 or z_a.shape != z_b.shape:
            raise InputError("z_a and z_b", "must be 2-D of one shape", f"{tuple(z_a.shape)}, {tuple(z_b.shape)}")
        d = next((s["a"].shape[0] for s in (self.sums, self.before) if s), z_a.shape[1])
        if d != z_a.shape[1]:
            raise InputError("z_a", f"must keep its {d} dimensions", z_a.shape[1], "reset() the monitor first")
        if (h_a is None) != (h_b is None):
            raise InputError("h_a and h_b", "must be given together")
        with torch.no_grad():
            if self.half_life is not None:
                for value in self.sums.values():
                    value.mul_(0.5 ** (len(z_a) / self.half_life))
            a, b = z_a.double(), z_b.double()
            self._add("ab", a.T @ b)
            self._add("aa", a.T @ a)
            self._add("bb", b.T @ b)
            self._add("a", a.sum(dim=0))
            self._add("b", b.sum(dim=0))
            self._add("n", torch.full((), float(len(a)), dtype=torch.float64, device=a.device))
            if h_a is not None and h_b is not None:
                h = torch.cat([h_a, h_b]).double()
                self._add("m", torch.full((), float(len(h)), dtype=torch.float64, device=h.device))
                self._add("hh", h.T @ h)
                self._add("h", h.sum(dim=0))
        self.seen += len(z_a)
        if self.window is not None and self.seen >= self.window:
            self.before, self.sums, self.seen = self.sums, {}, 0

    def attach(
        self,
        *,
        loss: nn.Module | None = None,
        projector: nn.Module | None = None,
        backbone: nn.Module | None = None,
        optimizer: Any = None,
        log: Any = None,
        every: int = 50,
        joined: bool = False,
    ) -> "Attachment":
        """Watch somebody's training loop from now on, by hooks on its modules.

        Arguments:
            loss: module that is called with (z_a, z_b, …); or
            projector: module whose output is z, called once a view, or once with both views stacked (`joined`).
            backbone: module whose output is h, called like the projector.
            optimizer: the learning rates of its first group add up to the time t; without it t counts steps.
            log: folder for metrics.jsonl, or any object with `.log(dict)`.
            every: steps between records. A monitor without window begins anew after each.
            joined: both views go through projector and backbone as one batch, the first view first.
        """
        from stairwise.monitor.attach import Attachment

        return Attachment(
            self,
            loss=loss,
            projector=projector,
            backbone=backbone,
            optimizer=optimizer,
            log=log,
            every=every,
            joined=joined,
        )

    def merge(self, other: "SpectrumMonitor") -> None:
        """Add what another monitor has accumulated, of other pairs."""
        for name, value in other._total().items():
            self._add(name, value.to(self.sums[name].device if name in self.sums else value.device).clone())

    def reduce(self) -> None:
        """Sum over the processes of a process group, in place; reset afterwards, or pairs count again and again."""
        for value in self.sums.values():
            value.copy_(total(value))

    def reset(self) -> None:
        """Forget everything, in place: buffers stay where a captured graph expects them."""
        for value in self.sums.values():
            value.zero_()
        self.before, self.seen = {}, 0

    def compute(self) -> Spectrum:
        """Decompose what has been accumulated (waits for the device)."""
        return decompose(self.snapshot(), self.normalized)

    def snapshot(self) -> dict[str, Floats]:
        """Copies of the sums on the host (waits for the device), for `decompose` at leisure, in another thread say."""
        copies = {}
        for name, value in self._total().items():
            # page-locked memory: many times faster than an ordinary copy, and all are under way together
            copies[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            copies[name].copy_(value, non_blocking=True)
        if any(value.is_cuda for value in self._total().values()):
            torch.cuda.current_stream().synchronize()
        return {name: value.numpy() for name, value in copies.items()}

    def state(self) -> dict[str, Tensor]:
        """Tensors from which `load` continues."""
        return dict(self.sums) | {f"before.{name}": value for name, value in self.before.items()}

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Continue from `state`."""
        placed = {name: value.to(device) for name, value in state.items()}
        self.sums = {name: value for name, value in placed.items() if not name.startswith("before.")}
        self.before = {name.removeprefix("before."): v for name, v in placed.items() if name.startswith("before.")}
        self.seen = int(self.sums["n"]) if self.sums else 0

    def _total(self) -> dict[str, Tensor]:
        """Sums over the window."""
        if not self.before:
            return self.sums
        return {name: value + self.sums[name] if name in self.sums else value for name, value in self.before.items()}

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
        _descending(_covariance(sums["hh"], sums["h"], float(sums["m"]))) if "hh" in sums else None,
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
