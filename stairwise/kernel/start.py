"""Where training starts, in the basis of the modes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, as_numpy, scale
from stairwise.checks import seed as check_seed
from stairwise.kernel.arrays import checked, stack
from stairwise.kernel.models import AbstractModel, Given, Stream
from stairwise.kernel.solution import Solution


def initial_weights(
    model: AbstractModel, modes: Solution, d: int, alpha: float | None, init: Any, seed: int
) -> NDArray[np.float64]:
    """u (d, modes): Gaussian of scale α, or u_j = Σ_i f₀(x_i) a_ij of the values f₀ of an initial function."""
    if alpha is not None:
        rng = np.random.default_rng(check_seed(seed, "random_state"))
        u = scale(alpha) * rng.standard_normal((d, len(modes.eigenvalues)))
    else:
        u = _values(model, init, (len(modes.coefficients), d)).T @ as_numpy(modes.coefficients)
    start = float(np.linalg.eigvalsh((u * modes.eigenvalues) @ u.T)[-1])
    if not start < 1:
        name = "alpha" if init is None else "init"
        raise InputError(name, "must start with all eigenvalues of C below 1", f"{start:.3g}", "scale it down")
    return u


def _values(model: AbstractModel, init: Any, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Values of the initial function on the fitted points."""
    if isinstance(model, Stream):
        raise InputError("init", "needs the exact method, which keeps its points", None, "give alpha instead")
    if callable(init):
        if isinstance(model, Given):
            raise InputError("init", 'must be values for kernel="precomputed"', None, "the points are unknown")
        init = stack([init(points) for points in model.blocks.parts])  # type: ignore[attr-defined]
    values = as_numpy(checked(init, "float64", "init"))
    if values.shape != shape:
        raise InputError("init", f"must have shape {shape}: values on the fitted points", values.shape)
    return values
