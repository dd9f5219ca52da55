"""Records by hand: staircases, spectra that stay, shrink or collapse, and what is said of them."""

from dataclasses import replace

import numpy as np

from stairwise.staircase.advice import advise
from stairwise.staircase.signs import Signs

T = 60
SHRINKING = {"loss": np.geomspace(1, 0.5, T), "positive": 0.6, "negative": 0.1, "mean_square": 0}
WITHOUT_COVARIANCE = np.linspace(1.2, 0.7, T)  # VICReg of 32 coordinates of unit variance: 50 (1 − tr C/32)
VICREG = {"loss": np.r_[25.0, WITHOUT_COVARIANCE[1:]], "batch": 128, "positive": 0.98, "negative": 0.3}
VICREG |= {"mean_square": 0.0, "trace": 32 - 32 / 50 * WITHOUT_COVARIANCE}


def staircase(*gamma, until=1.5, records=100, start=1e-6):
    """Times and eigenvalues of C in the linear theory."""
    t = np.linspace(0, until, records)
    return t, 1 / (1 + np.exp(-8 * np.outer(t, gamma)) / start)


def steady(*spectrum, records=T):
    """Times and spectra that do not move, but for a little noise."""
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal((records, len(spectrum))))
    return np.arange(records) * 1.0, np.array(spectrum) * noise


def signs(lam, **known):
    """Signs of which some are known; a number stands for every record."""
    full = {name: np.broadcast_to(np.float64(value), len(lam)).copy() for name, value in known.items()}
    return replace(Signs.unknown(lam), **full)


def said(t, lam, level=1.0, clock=None, **known):
    return advise(t, lam, clock, level, signs(np.asarray(lam), **known) if known else None)


def fall(share):
    """From 1 to a share of it over the last ten records."""
    return np.r_[np.ones(T - 10), np.geomspace(1, share, 10)]


def falling(share):
    """A covariance whose variance falls to a share of its maximum."""
    t, lam = steady(1.0, 0.6, 0.3, 0.1)
    return t, lam * fall(share)[:, None]


def ruled_by_one():
    t, lam = steady(1.0, *[0.001] * 19)
    lam[:10, 1:] = 0.5
    return t, lam


def ruled_by_two(last=0.0):
    """Coordinates of unit variance, all copies of two dimensions; at the last record the others have a share `last`."""
    t, lam = steady(20.0, 12.0, *[1e-3] * 30)
    lam[:3] = 1.0
    lam *= 32 / lam.sum(axis=1, keepdims=True)
    lam[-1] += np.r_[[-16.0 * last] * 2, [32.0 * last / 30] * 30]
    return t, lam


def shrinking(share):
    """A covariance that shrinks slowly, to a share of its first value."""
    t, lam = steady(1.0, 0.6, 0.3, 0.1)
    return t, lam * np.geomspace(1, share, T)[:, None]
