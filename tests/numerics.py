"""Numerical oracles shared by tests."""

import numpy as np

STENCIL = np.array([1 / 280, -4 / 105, 1 / 5, -4 / 5, 0, 4 / 5, -1 / 5, 4 / 105, -1 / 280])


def derivative(f, t, scale):
    """f'(t) by an eighth-order central difference, for an f that changes over times of about `scale`."""
    h = 0.02 * scale
    values = np.stack([f(t + k * h) for k in range(-4, 5)])
    return np.tensordot(STENCIL, values, 1) / h
