"""Polar factors by Newton–Schulz, compared with those of the singular value decomposition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stairwise.checks import InputError
from stairwise.training.newton_schulz import (
    SCALINGS,
    descend,
    newton_schulz,
    operations,
    pages_like,
    plan,
    stacked,
    start_lengths,
)

RESNET18 = ((64, 27), *((64, 576),) * 4, (128, 576), *((128, 1152),) * 3, (128, 64), (256, 1152), *((256, 2304),) * 3)
SHAPES = ((5, 9), (9, 5), (4, 9), (7, 7), (1, 6), (6, 1), (5, 9), (1, 1))


def random(shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def matrices(seed=0):
    return [random(shape, seed + i) for i, shape in enumerate(SHAPES)]


def polar(x):
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return (u @ v).float()


def factors(xs, padding=0.0, dtype=torch.float32, steps=5):
    """The result of the iteration for every matrix of a list."""
    found = [torch.empty(0)] * len(xs)
    for stack in plan(tuple(tuple(x.shape) for x in xs), padding):
        pages = pages_like(newton_schulz(stacked(xs, stack, dtype), steps), xs, stack)
        for i, page in zip(stack.members, pages, strict=True):
            found[i] = page.float()
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_singular_values_are_near_one_and_singular_vectors_are_kept(dtype, tolerance):
    for x, found in zip(matrices(), factors(matrices(), dtype=dtype), strict=True):
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        inner = u.mT @ found @ v.mT
        ratios = inner.diagonal()
        assert (inner - torch.diag(ratios)).abs().max() < tolerance
        well = s > 0.01 * s.max()
        assert ratios[well].min() > 0.65
        assert ratios.max() < 1.25


def test_singular_values_follow_the_polynomial():
    """The singular values are those of the scalar iteration s ← a s + b s³ + c s⁵, computed apart."""
    x = random((6, 11))
    s = torch.linalg.svdvals(x.double()) / x.double().norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    found = torch.linalg.svdvals(newton_schulz(x[None])[0].double())
    assert torch.allclose(found, s.sort(descending=True).values, atol=1e-5)


def test_more_steps_follow_the_direction_of_the_polar_factor():
    for x, found in zip(matrices(), factors(matrices(), steps=8), strict=True):
        assert torch.nn.functional.cosine_similarity(found.flatten(), polar(x).flatten(), dim=0) > 0.97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_and_stacking_change_nothing(dtype):
    alone = [factors([x], dtype=dtype)[0] for x in matrices()]
    for padding in (0.0, 1e4, 1e12):
        for x, y in zip(alone, factors(matrices(), padding, dtype), strict=True):
            assert torch.allclose(x, y, atol=1e-5 if dtype == torch.float32 else 0.02)


def test_rank_deficient_and_zero_matrices():
    low = random((6, 2)) @ random((2, 8), 1)
    zero, tiny = torch.zeros(6, 8), 1e-30 * random((6, 8), 2)
    found = newton_schulz(torch.stack([low, zero, tiny]))
    assert torch.isfinite(found).all()
    assert torch.linalg.svdvals(found[0])[2] < 1e-3  # no direction is invented
    assert found[1].abs().max() == 0
    assert found[2].abs().max() < 1e-6


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 10**6), log_scale=st.floats(-12.0, 12.0))
def test_rotation_permutation_and_scale(rows, columns, seed, log_scale):
    """polar(Q G R) = Q polar(G) R for rotations, polar(c G) = polar(G) for c > 0, polar(Gᵀ) = polar(G)ᵀ."""
    x = random((rows, columns), seed)
    q, r = (torch.linalg.qr(random((n, n), seed + 1)).Q for n in (rows, columns))
    reference = factors([x])[0]
    assert torch.allclose(factors([q @ x @ r])[0], q @ reference @ r, atol=2e-3)
    assert torch.allclose(factors([10.0**log_scale * x])[0], reference, atol=2e-3)
    assert torch.allclose(factors([x.mT])[0], reference.mT, atol=1e-4)
    order = torch.randperm(columns)
    assert torch.allclose(factors([x[:, order]])[0], reference[:, order], atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    padding=st.sampled_from([0.0, 1e4, 1e6]),
)
def test_every_matrix_is_in_one_stack_that_holds_it(shapes, padding):
    stacks = plan(tuple(shapes), padding)
    assert sorted(i for stack in stacks for i in stack.members) == list(range(len(shapes)))
    for stack in stacks:
        for i in stack.members:
            rows, columns = sorted(shapes[i])
            assert rows <= stack.shape[0]
            assert columns <= stack.shape[1]
            assert operations(*stack.shape) - operations(rows, columns) <= padding


def test_padding_needs_few_stacks():
    assert len(plan(RESNET18)) == 7
    assert len(plan(RESNET18, 1e9)) == 3


def expected_step(w, u, lr, scaling, length):
    o = factors([u])[0]
    rows, columns = w.shape
    if scaling == "keller":
        return w - lr * math.sqrt(max(1, rows / columns)) * o
    if scaling == "moonshot":
        return w - lr * 0.2 * math.sqrt(max(rows, columns)) * o
    moved = w - lr * length * o / o.norm()
    return moved * length / moved.norm() if scaling == "fixed" else moved


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("padding", [0.0, 1e12])
def test_steps_of_every_scaling(scaling, padding):
    weights, updates = matrices(), matrices(100)
    lengths = start_lengths(weights)
    expected = [expected_step(w, u, 0.1, scaling, float(n)) for w, u, n in zip(weights, updates, lengths, strict=True)]
    descend(weights, updates, torch.tensor(0.1), scaling, lengths, padding=padding)
    for w, e in zip(weights, expected, strict=True):
        assert torch.allclose(w, e, atol=1e-5)


def test_lengths_of_zeros_and_of_weights_that_are_not_finite():
    found = start_lengths([torch.zeros(4, 9), torch.full((2, 2), 3.0)])
    assert [float(n) for n in found] == [2.0, 6.0]
    with pytest.raises(InputError, match=r"weights of shape \(2, 2\) must be finite at the start"):
        start_lengths([torch.full((2, 2), math.nan)])


def test_a_zero_update_moves_nothing():
    for scaling in ("relative", "keller", "moonshot"):
        w = random((3, 4))
        descend([w], [torch.zeros(3, 4)], torch.tensor(0.1), scaling, start_lengths([w]))
        assert torch.equal(w, random((3, 4)))
