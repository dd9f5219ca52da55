"""Integration of stiff gradient flows to tight tolerances."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from stairwise.checks import InputError, number

Floats = NDArray[np.float64]

EVALUATIONS = 50_000, 1_000_000  # of the right-hand side, implicit and explicit; longer flows are refused
EARLY = 5_000  # evaluations after which flows that will not get there are refused
HOPELESS = 1e-9  # share of the way that an implicit solver has then come; its steps may still grow
TINY = 1e-300  # least absolute tolerance: LSODA divides by it
NEGLIGIBLE = 1e-12  # relative motion up to which one Euler step is exact to rounding
REMEDY = "ask for earlier times, scale the weights or the data, raise rtol, or use closed_form"
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
    shape, rtol = start.shape, number(rtol, "rtol", least=1e-13, most=1e-2)
    ordered, back = np.unique(times, return_inverse=True)
    if ordered.size == 0 or ordered[-1] == 0:
        return np.broadcast_to(start, (len(times), *shape)).copy()
    if _barely_moves(rhs(start), start, ordered[-1]):
        return start + np.multiply.outer(times, rhs(start))
    rows = _sizes(start.reshape(len(start), -1)) if start.ndim else np.abs(start)[None]
    smallest = rows[rows > 0].min(initial=size)
    tolerance = np.maximum(rtol * np.clip(rows, smallest, size), TINY)
    implicit = start.size <= IMPLICIT_LIMIT
    options = {"jac": lambda _, y: jacobian(y.reshape(shape))} if implicit and jacobian else {}
    solution = solve_ivp(
        _counted(lambda y: rhs(y.reshape(shape)).ravel(), ordered[-1], EVALUATIONS[0 if implicit else 1]),
        (0.0, ordered[-1]),
        start.ravel(),
        method="LSODA" if implicit else "DOP853",
        t_eval=ordered,
        rtol=rtol,
        atol=np.repeat(tolerance, start.size // max(1, len(tolerance))),
        **options,
    )
    if not solution.success:
        reached = f"could be integrated to t = {solution.t[-1] if len(solution.t) else 0:.6g}: {solution.message}"
        raise InputError("times", "must lie where the flow can be integrated", reached, REMEDY)
    return solution.y.T[back].reshape(len(times), *shape)


def _sizes(rows: Floats) -> Floats:
    """Root mean square of every row; the squares of small numbers themselves would be zero."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scaled = rows / np.where(largest > 0, largest, 1.0)[:, None]
    return np.asarray(largest * np.sqrt(np.mean(scaled**2, axis=1)))


def _barely_moves(speed: Floats, start: Floats, end: float) -> bool:
    """Whether every row moves by less than a rounding error of its own size up to `end`."""
    moved, size = (np.abs(x).reshape(len(x), -1).max(axis=1) if x.ndim else np.abs(x) for x in (speed, start))
    with np.errstate(over="ignore"):
        return bool((moved * end <= NEGLIGIBLE * size).all())


def _counted(rhs: Callable[[Floats], Floats], end: float, most: int) -> Callable[[float, Floats], Floats]:
    """The right-hand side as solvers call it; they are stopped when they call it too often, or leave the numbers."""
    calls = 0

    def counted(t: float, y: Floats) -> Floats:
        nonlocal calls
        calls += 1
        # explicit solvers advance evenly, so what is left can be estimated, and the better the later
        least = HOPELESS if most == EVALUATIONS[0] else (calls / most) ** 2
        if calls > most or (calls > EARLY and t < least * end):
            rule = f"must be reached within {most:,} evaluations of the gradient"
            raise InputError("times", rule, f"{end:.6g}; the flow came to t = {t:.6g}", REMEDY)
        with np.errstate(over="ignore", invalid="ignore"):
            value = rhs(y)
        if not np.isfinite(value).all():
            raise InputError("times", "must lie where the flow is finite", f"{end:.6g}; it ended at {t:.6g}", REMEDY)
        return value

    return counted
