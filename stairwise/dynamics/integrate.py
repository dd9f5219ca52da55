"""Integration of stiff gradient flows to tight tolerances."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

Floats = NDArray[np.float64]

IMPLICIT_LIMIT = 1000  # unknowns; beyond this, the Jacobian costs more than the extra steps of an explicit method


def integrate(
    rhs: Callable[[Floats], Floats],
    start: Floats,
    times: Floats,
    rtol: float,
    size: float = 1.0,
    jacobian: Callable[[Floats], Floats] | None = None,
) -> Floats:
    """y(t) of y' = rhs(y), y(0) = start, at nonnegative finite times in any order; shape (T, *start.shape).

    Uses LSODA (implicit if stiff) for up to 1000 unknowns and DOP853 beyond. The absolute tolerance of each row (each
    entry, if `start` is a vector) is `rtol` × its size at the start, at most `rtol` × `size`: small rows grow
    exponentially, so their relative error must be small from the start.
    """
    shape = start.shape
    ordered, back = np.unique(times, return_inverse=True)
    if ordered.size == 0 or ordered[-1] == 0:
        return np.broadcast_to(start, (len(times), *shape)).copy()
    rows = np.sqrt(np.mean(np.square(start).reshape(len(start), -1), axis=1)) if start.ndim else np.abs(start)[None]
    smallest = rows[rows > 0].min(initial=size)
    tolerance = rtol * np.clip(rows, smallest, size)
    implicit = start.size <= IMPLICIT_LIMIT
    options = {"jac": lambda _, y: jacobian(y.reshape(shape))} if implicit and jacobian else {}
    solution = solve_ivp(
        lambda _, y: rhs(y.reshape(shape)).ravel(),
        (0.0, ordered[-1]),
        start.ravel(),
        method="LSODA" if implicit else "DOP853",
        t_eval=ordered,
        rtol=rtol,
        atol=np.repeat(tolerance, start.size // max(1, len(tolerance))),
        **options,
    )
    if not solution.success:
        raise RuntimeError(f"the flow could not be integrated beyond t = {solution.t[-1]:.6g}: {solution.message}")
    return solution.y.T[back].reshape(len(times), *shape)
