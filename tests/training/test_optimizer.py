"""Optimizers and schedules, compared with independent implementations of their rules."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from stairwise.checks import InputError
from stairwise.training.optimizer import FlatOptimizer
from stairwise.training.schedule import Schedule


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 2, bias=False)
    )


def descend(network, take, steps=6):
    data = torch.Generator().manual_seed(1)
    for i in range(steps):
        loss = network(torch.randn(8, 3, 4, 4, generator=data)).square().mean() + network[0].bias.sum()
        take(loss, 0.1 / (i + 1))
    return {k: v.detach().clone() for k, v in network.named_parameters()}


def with_ours(network, kind, lr_bias=1.0, **options):
    optimizer = FlatOptimizer(network, kind, **options)

    def take(loss, lr):
        optimizer.zero_grad()
        loss.backward()
        optimizer.lr[0].fill_(lr)
        optimizer.lr[1].fill_(lr * lr_bias)
        optimizer.step()

    return take


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_sgd_is_torchs(channels_last, clip):
    ours, theirs = net(), net()
    if channels_last:
        ours = ours.to(memory_format=torch.channels_last)
    reference = torch.optim.SGD(theirs.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)

    def take(loss, lr):
        reference.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.param_groups[0]["lr"] = lr
        reference.step()

    expected = descend(theirs, take)
    found = descend(ours, with_ours(ours, "sgd", momentum=0.9, weight_decay=0.01, clip=clip))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_lars_is_metas():
    """Parameters with one axis are excluded from adaptation and decay."""
    ours, theirs = net(), net()
    velocity = {name: torch.zeros_like(p) for name, p in theirs.named_parameters()}

    def take(loss, lr):
        theirs.zero_grad()
        loss.backward()
        for name, p in theirs.named_parameters():
            g = p.grad
            if p.ndim != 1:
                g = g + 0.01 * p.data
                weight, update = p.data.norm().item(), g.norm().item()
                g = g * (1e-3 * weight / update if weight > 0 and update > 0 else 1.0)
            velocity[name] = 0.9 * velocity[name] + g
            p.data -= (lr if p.ndim != 1 else 0.1 * lr) * velocity[name]

    expected = descend(theirs, take)
    found = descend(ours, with_ours(ours, "lars", lr_bias=0.1, momentum=0.9, weight_decay=0.01))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-7), name


@pytest.mark.parametrize("channels_last", [False, True])
def test_adamw_is_torchs_and_continues(channels_last):
    """Weights decay, parameters with one axis do not."""
    ours, theirs = net(), net()
    if channels_last:
        ours = ours.to(memory_format=torch.channels_last)
    weights, others = ([p for p in theirs.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups)

    def take(loss, lr):
        reference.zero_grad()
        loss.backward()
        for group, factor in zip(reference.param_groups, (1.0, 0.5), strict=True):
            group["lr"] = lr * factor
        reference.step()

    expected = descend(theirs, take)
    first = FlatOptimizer(ours, "adamw", weight_decay=0.1)
    state = []

    def continued(loss, lr):
        """A new optimizer in every step, which continues from the state of the one before."""
        optimizer = FlatOptimizer(ours, "adamw", weight_decay=0.1) if state else first
        if state:
            optimizer.load(state[-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.lr.copy_(torch.tensor([lr, 0.5 * lr]))
        optimizer.step()
        state.append(optimizer.state())

    found = descend(ours, continued)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_lars_with_zero_weights_moves():
    network = net()
    with torch.no_grad():
        network[4].weight.zero_()
    take = with_ours(network, "lars", weight_decay=0.01)
    take((network(torch.randn(8, 3, 4, 4)) - 1).square().mean(), 0.1)
    assert network[4].weight.abs().max() > 0


def test_shared_and_frozen_parameters():
    shared = nn.Linear(3, 3)
    network = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(3, 1))
    network[3].requires_grad_(False)
    optimizer = FlatOptimizer(network)
    assert optimizer.values.numel() == 12
    frozen = network[3].weight.clone()
    network(torch.randn(4, 3)).sum().backward()
    optimizer.lr.fill_(0.1)
    optimizer.step()
    assert torch.equal(network[3].weight, frozen)


def test_step_returns_the_length_of_the_gradient_and_state_is_flat():
    network = net()
    optimizer = FlatOptimizer(network, clip=1e-3)
    network(torch.randn(8, 3, 4, 4)).square().sum().backward()
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters()))
    assert float(optimizer.step()) == pytest.approx(expected, rel=1e-5)
    assert float(optimizer.gradient.norm()) == pytest.approx(1e-3, rel=1e-2)
    assert optimizer.values.shape == optimizer.momentum_buffer.shape


def test_bad_options():
    for options in ({"kind": "adam"}, {"momentum": -1}, {"momentum": 1.0}, {"weight_decay": float("nan")}):
        with pytest.raises(InputError):
            FlatOptimizer(net(), **options)
    with pytest.raises(InputError, match="trainable"):
        FlatOptimizer(nn.ReLU())


@pytest.mark.parametrize("warmup", [0, 7])
def test_cosine_is_metas(warmup):
    schedule, total = Schedule("cosine", 100, warmup, 0.001), 100
    for step in range(total):
        if step < warmup:
            expected = step / warmup
        else:
            q = 0.5 * (1 + np.cos(np.pi * (step - warmup) / (total - warmup)))
            expected = q + 0.001 * (1 - q)
        assert schedule.factor(step) == pytest.approx(expected, rel=1e-12)


def test_constant_and_unknown():
    schedule = Schedule("constant", 10, 2)
    assert [schedule.factor(i) for i in range(5)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    with pytest.raises(InputError, match="did you mean 'cosine'"):
        Schedule("cosin", 10)
