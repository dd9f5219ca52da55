r"""Hidden representations, measured by what is new: the share of h along each new mode of z.

On N fixed views let u_j be the direction, among the N views, in the span of z after step j that was not there before.
The share ‖u_jᵀH‖²/‖H‖² of the representations H (N, m) along it does not depend on their scale, which the batch norm of
the head makes free. If h learns the mode when z does, it rises at the step; if z only learns to read what h already
holds, it does not.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, vector
from stairwise.staircase.events import LOCAL, Events, places_of, share_events
from stairwise.staircase.steps import Steps

Floats = NDArray[np.float64]
APART = 3.0  # rise times from a step to the records before and after it


@dataclass(frozen=True, eq=False)
class Shares:
    """Shares of embeddings and of representations along the new mode of each of K steps.

    Attributes:
        t: of the records, (T,).
        times: of the steps, (K,).
        z, h: shares, (T, K).
    """

    t: Floats
    times: Floats
    z: Floats
    h: Floats

    @property
    def events(self) -> Events:
        """Whether the shares of h rise at the steps, against shifted times."""
        return share_events(self.t, self.h, self.times)

    @property
    def own(self) -> Events:
        """The same for z, which does rise at the steps. If this is low, the run cannot tell."""
        return share_events(self.t, self.z, self.times)

    @property
    def without_best(self) -> Events:
        """The same without the step on which the score leans most; of two steps or more."""
        every = range(len(self.times))
        fewer = [(np.delete(self.h, k, axis=1), np.delete(self.times, k)) for k in every]
        return min((share_events(self.t, h, times) for h, times in fewer), key=lambda events: events.z)

    @property
    def without_first(self) -> Events:
        """The same without the first step; of two steps or more."""
        return share_events(self.t, self.h[:, 1:], self.times[1:])

    @property
    def elsewhere(self) -> Events | None:
        """Whether the share of h along each new mode rises at the steps of other modes: a control. Steps within ten
        records are left out, because its own rise may reach so far; None if no others are left."""
        places = places_of(self.t, self.times)
        mine, others = np.nonzero(np.abs(places[:, None] - places) > LOCAL)
        return share_events(self.t, self.h[:, mine], self.times[others]) if len(mine) else None

    @property
    def correlation(self) -> float:
        """Of the changes of both shares from record to record; the median over steps."""
        return float(np.median([_correlation(x, y) for x, y in zip(self.z.T, self.h.T, strict=True)]))

    def around(self, reach: int = 12) -> tuple[Floats, Floats]:
        """Shares of z and of h at the `reach` records before and after each step, relative to their mean in the latter,
        (K, 2 reach + 1) each; nan where there is no record."""
        middle = np.round(places_of(self.t, self.times)).astype(int) + 1  # the first record after the step
        rows = middle[:, None] + np.arange(-reach, reach + 1)
        inside = (rows >= 0) & (rows < len(self.t))
        columns = np.arange(len(middle))[:, None]
        both = [np.where(inside, x[rows.clip(0, len(self.t) - 1), columns], np.nan) for x in (self.z, self.h)]
        later = [np.nanmean(x[:, reach:], axis=1, keepdims=True) for x in both]
        z, h = (np.asarray(x / np.maximum(mean, 1e-300)) for x, mean in zip(both, later, strict=True))
        return z, h


def shares_along(t: ArrayLike, z: ArrayLike, h: ArrayLike, steps: Steps) -> Shares:
    """Shares of z and of h along the new mode of each step, about the mean over views.

    Arguments:
        t: times of the records, (T,).
        z: embeddings of N fixed views, all dimensions or the leading principal components, (T, N, k).
        h: representations of the same views, whole or projected to fewer dimensions, (T, N, m).
        steps: of the covariance of z. Steps of modes beyond k, or that leave no record before or after, are left out.
    """
    moments = vector(t, "t")
    Z, H = (_centred(x, name, len(moments)) for x, name in ((z, "z"), (h, "h")))
    times, along_z, along_h = [], [], []
    for time, mode, rise in zip(steps.times, steps.modes, steps.rise_times, strict=True):
        before = int(np.searchsorted(moments, time - APART * rise)) - 1
        after = int(np.searchsorted(moments, time + APART * rise))
        if before < 0 or after >= len(moments) or mode >= Z.shape[2]:
            continue
        u = _new_direction(Z[before], Z[after], int(mode))
        times.append(time)
        along_z.append(_share(u, Z))
        along_h.append(_share(u, H))
    if not times:
        raise InputError("steps", "must include one with records before and after it", len(steps))
    return Shares(moments, np.array(times), np.array(along_z).T, np.array(along_h).T)


def between(steps: Steps) -> Steps:
    """Times without a step, halfway between successive ones, each with the mode that steps next: a control.

    Along directions that are chosen there in the same way, h should rise no more than at shifted times. Steps that are
    too near each other leave no such time."""
    rise = np.maximum(steps.rise_times[1:], steps.rise_times[:-1])
    far = np.flatnonzero(np.diff(steps.times) > 2 * (APART + 1) * rise)
    middle = (steps.times[far] + steps.times[far + 1]) / 2
    return replace(
        steps,
        **{name: getattr(steps, name)[far + 1] for name in ("modes", "rise_times", "levels", "events")},
        times=middle,
    )


def _centred(x: ArrayLike, name: str, count: int) -> Floats:
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 3 or len(values) != count or not np.isfinite(values).all():
        raise InputError(name, f"must be finite, ({count}, views, dimensions)", f"shape {values.shape}")
    return values - values.mean(axis=1, keepdims=True)


def _new_direction(before: Floats, after: Floats, mode: int) -> Floats:
    """The direction (N,) of the leading mode + 1 modes after a step that is farthest from the leading ones before."""
    old = np.linalg.svd(before, full_matrices=False)[0][:, :mode]
    new = np.linalg.svd(after, full_matrices=False)[0][:, : mode + 1]
    return np.asarray(np.linalg.svd(new - old @ (old.T @ new), full_matrices=False)[0][:, 0])


def _share(u: Floats, x: Floats) -> Floats:
    """‖uᵀx‖²/‖x‖² at every time, (T,)."""
    along = np.einsum("n,tnm->tm", u, x)
    return np.asarray((along**2).sum(axis=1) / np.maximum((x**2).sum(axis=(1, 2)), 1e-300))


def _correlation(x: Floats, y: Floats) -> float:
    dx, dy = (np.diff(curve) - np.diff(curve).mean() for curve in (x, y))
    size = np.linalg.norm(dx) * np.linalg.norm(dy)
    return float(dx @ dy / size) if size > 0 else 0.0
