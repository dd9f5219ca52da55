"""Which arguments of a loss are two views."""

import re

import pytest
import torch
from torch import nn

from stairwise.checks import InputError
from stairwise.monitor.views import (
    KEY,
    NOTHING,
    PAIR,
    SEVERAL,
    UNPAIRED,
    chosen,
    pooled,
    representation,
    views_of_loss,
    views_of_output,
)

Z = torch.randn(2, 8, 3, requires_grad=True)
A, B = Z
TOKENS = torch.randn(8, 5, 3, requires_grad=True)


class Loss(nn.Module):
    pass


@pytest.mark.parametrize(
    ("args", "kwargs", "case", "pair"),
    [
        ((A, B), {}, PAIR, (A, B)),
        ((A,), {"z_b": B}, PAIR, (A, B)),
        ((), {"z_a": A, "z_b": B, "temperature": 0.1}, PAIR, (A, B)),
        ((0.1, A, B), {}, PAIR, (A, B)),
        ((A, B, torch.arange(8)), {}, PAIR, (A, B)),
        ((A.detach(), B.detach()), {}, PAIR, (A, B)),
        ((A, B.detach()), {}, KEY, (A, B)),
        ((A.detach(), B), {}, KEY, (A, B)),
        (([A, B],), {}, SEVERAL, (A, B)),
        (((A, B), torch.arange(8)), {}, SEVERAL, (A, B)),
        (([B.detach(), A.detach()], [A, B, A[:4]]), {"epoch": 3}, SEVERAL, (A, B)),
        ((Z,), {}, SEVERAL, (A, B)),
        ((Z.transpose(0, 1), torch.arange(8)), {}, SEVERAL, (A, B)),
        ((TOKENS, 2 * TOKENS), {}, SEVERAL, (TOKENS.mean(dim=1), 2 * TOKENS.mean(dim=1))),
    ],
)
def test_views_are_found(args, kwargs, case, pair):
    seen = views_of_loss(Loss(), args, kwargs, None, False)
    assert seen.case == case
    for found, expected in zip(seen.pair, pair, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("loss", "args", "unusual"),
    [
        (nn.CrossEntropyLoss(), (A, torch.zeros(8).long()), "CrossEntropyLoss compares predictions with labels"),
        (nn.CrossEntropyLoss(), (A, B.detach()), "CrossEntropyLoss compares predictions with labels"),
        (nn.MSELoss(), (A, B.detach()), "MSELoss compares predictions with targets"),
        (nn.CosineSimilarity(), (A, B.detach()), "CosineSimilarity compares predictions with targets"),
        (Loss(), (TOKENS, TOKENS.detach()), "Loss compares predictions with targets"),
        (Loss(), (A,), "if both views are joined in it, set joined=True"),
        (Loss(), (TOKENS,), r"shape \(8, 5, 3\): set views="),
        (Loss(), (A, torch.zeros(8).long()), r"shapes \(8, 3\) and \(8,\), which are not two views"),
        (Loss(), (A[0], B[0]), "vectors"),
        (Loss(), ([A],), "a list of one tensor"),
        (Loss(), ([A, B[:4]],), "different shapes"),
        (Loss(), ({"z": A},), "without tensors"),
    ],
)
def test_what_is_not_two_views_is_explained(loss, args, unusual):
    seen = views_of_loss(loss, args, {}, None, False)
    assert (seen.pair, seen.case) == (None, NOTHING)
    assert re.search(unusual, seen.unusual)


def test_a_function_can_choose_from_embeddings_of_different_numbers():
    seen = views_of_loss(Loss(), (A, B[:4]), {}, None, False)
    assert (seen.pair, seen.case) == (None, UNPAIRED)


def test_views_that_are_tuples():
    """As in VICRegL: (z, z of positions) per view; grids, which come first here, have no gradient."""
    features = [(A, TOKENS), (B, TOKENS)]
    seen = views_of_loss(Loss(), ([A.detach(), B.detach()],), {"features": features}, None, False)
    assert seen.pair[0] is A
    assert seen.pair[1] is B
    assert seen.unusual == ""


def test_several_lists():
    seen = views_of_loss(Loss(), ([A, B], [2 * A, 2 * B]), {}, None, False)
    assert seen.pair[0] is A
    assert "several lists" in seen.unusual


def test_joined_views():
    joined = torch.cat([A, B, A, A])
    for args in ((joined,), (joined, torch.arange(32))):
        found = views_of_loss(Loss(), args, {}, 4, True).pair
        assert torch.equal(torch.stack(found), Z)
    found = views_of_loss(Loss(), (torch.cat([A, B]),), {}, None, True).pair
    assert torch.equal(torch.stack(found), Z)
    assert torch.equal(torch.stack(views_of_output(joined, 4, True)[:2]), Z)
    with pytest.raises(InputError, match=r"a number of rows that 3 divides \(got 32\)"):
        views_of_output(joined, 3, True)


def test_stacks_of_several_views():
    stack = torch.stack([A, B, A])
    assert views_of_loss(Loss(), (stack,), {}, None, False).pair is None
    assert torch.equal(torch.stack(views_of_loss(Loss(), (stack,), {}, 3, False).pair), Z)


def test_more_views_than_two_are_mentioned_unless_they_are_expected():
    assert "a list of 3 views" in views_of_loss(Loss(), ([A, B, A],), {}, None, False).unusual
    assert not views_of_loss(Loss(), ([A, B, A],), {}, 2, False).unusual


def test_functions_that_find_views():
    assert views_of_loss(Loss(), (A, B), {}, lambda args, kwargs: args[::-1], False).pair == (B, A)
    assert torch.equal(torch.stack(views_of_output(Z, tuple, False)), Z)
    assert views_of_output(Z, lambda _: None, False) == []
    for wrong in (A, (A,), (A, 3)):
        with pytest.raises(InputError, match=r"views must return \(z_a, z_b\) or None"):
            chosen(wrong)


def test_outputs_of_backbones():
    class Output(dict):
        last_hidden_state = TOKENS

    for output in (TOKENS, (TOKENS, A), [TOKENS], Output()):
        assert torch.equal(representation(output), TOKENS.mean(dim=1))
    for output in ({"x": A}, (), A[0, 0], None):
        assert representation(output) is None


def test_outputs_of_projectors():
    assert views_of_output(A, None, False)[0] is A
    assert torch.equal(views_of_output(TOKENS, None, False)[0], pooled(TOKENS))
    with pytest.raises(InputError, match=r"projector must return a tensor \(got dict\): .*views="):
        views_of_output({"z": A}, None, False)
