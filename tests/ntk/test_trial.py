"""Models that are random, or mix samples, are refused; comparisons of passes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stairwise.checks import InputError
from stairwise.ntk.empirical import empirical_ntk
from stairwise.ntk.factors import Direct
from stairwise.ntk.trial import agree, right_rules
from tests.ntk.zoo import apply, scale


@pytest.mark.parametrize("layer", [lambda: nn.Linear(6, 20), lambda: scale(6)])  # with rules and without
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda z: z - z.mean(0), "one by one"),
        (lambda z: z + 0.01 * z.mean(0), "one by one"),
        (lambda z: z.softmax(0), "one by one"),
        (lambda z: z / z.norm(), "one by one"),
        (lambda z: F.batch_norm(z, None, None, training=True), "one by one"),
        (lambda z: z @ z.detach().T, "one by one"),
        (lambda z: z / (len(z) - 2), "one by one"),  # not finite for the two samples of the trial
        (lambda z: F.dropout(z, 0.5, True), "same outputs twice"),
        (lambda z: z + torch.randn_like(z), "same outputs twice"),
    ],
)
def test_models_that_have_no_gradient_per_sample(layer, function, says):
    torch.manual_seed(0)
    with pytest.raises(InputError, match=says):
        empirical_ntk(nn.Sequential(layer(), apply(function)), torch.randn(30, 6))


@pytest.mark.parametrize("integers", [False, True])
def test_statistics_of_the_batch_that_are_detached(integers):
    torch.manual_seed(0)
    x = torch.randint(0, 9, (60, 6)) if integers else torch.randn(60, 6)
    with pytest.raises(InputError, match="one by one"):
        empirical_ntk(nn.Sequential(apply(lambda x: x.float() - x.float().mean(0).detach()), nn.Linear(6, 3)), x)


@pytest.mark.parametrize(
    ("gradient", "right"),
    [
        ([[1.0, 2.0], [0.0, 3.0]], True),
        ([[1.0, 2.0], [0.1, 3.0]], False),
        ([[np.nan, 2.0], [0.0, 3.0]], False),
        ([[0.0, 3.0], [1.0, 2.0]], False),
    ],
)
def test_rules_must_agree_with_autograd(gradient, right):
    exact, outputs = torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.ones(2, 3)
    by_rule = {"a": Direct(torch.tensor(gradient)), "unused": Direct(torch.zeros(2, 2))}
    names = right_rules(by_rule, {"a": exact, "unused": torch.zeros(2, 2)}, outputs, outputs, [])
    assert names == ({"a"} if right else set())


def test_a_unit_that_rounding_turns_on_does_not_look_wrong():
    """Gradients of one of two samples may jump; if those of both do, it is not rounding."""
    torch.manual_seed(0)
    calls, b = [("a", torch.randn(2, 5))], [torch.randn(2, 3), None]

    def changed(rows, factor):
        other = b[0].clone()
        other[rows] *= factor
        return [other, None]

    assert agree(calls, b, calls, b)
    assert agree(calls, changed(slice(1), 1.2), calls, b)
    assert not agree(calls, changed(slice(2), 1.2), calls, b)
    assert not agree(calls, changed(slice(1), 3), calls, b)
    assert not agree([("a", calls[0][1] * 1.1)], b, calls, b)
    assert not agree([("b", calls[0][1])], b, calls, b)
    assert not agree(calls, [None, None], calls, b)
