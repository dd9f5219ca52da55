"""Embeddings that are too large for their precision: losses say so, and change nothing for all others."""

import inspect
import math
import warnings

import pytest
import torch

from stairwise import losses
from stairwise.checks import RunWarning

FUNCTIONS = [f for name in losses.__all__ if inspect.isfunction(f := getattr(losses, name)) and name != "precondition"]
losses_of_views = pytest.mark.parametrize("loss", FUNCTIONS, ids=lambda f: f.__name__)


def views(scale=1.0):
    torch.manual_seed(0)
    z = torch.randn(16, 4)
    return z * scale, (z + 0.1) * scale


@losses_of_views
def test_finite_embeddings_that_overflow_are_told(loss):
    with pytest.warns(RunWarning, match=f"{loss.__name__}: .* must be small enough for float32.*normalize"):
        loss(*views(1e30))


@losses_of_views
@pytest.mark.parametrize("scale", [1.0, 1e-30, math.nan, math.inf])
def test_others_are_not_told(loss, scale):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = loss(*views(scale))
    assert math.isfinite(scale) == bool(value.isfinite())


@losses_of_views
def test_float64_holds_what_float32_cannot(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss(*(z.double() for z in views(1e15))).isfinite()


def test_values_need_not_be_read():
    """Inside vmap they cannot be."""
    stacked = [torch.stack([z, z]) for z in views(1e30)]
    assert torch.vmap(losses.vicreg)(*stacked).shape == (2,)
