"""Recipes with `optimizer = "muon"`: they learn, resume bit for bit, agree over two processes, and never hold NaN."""

import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch

import stairwise as sw
from stairwise.checks import InputError
from stairwise.runs.reader import Run
from stairwise.training import checkpoint
from stairwise.training.loop import Diverged, Stopped, Trainer
from stairwise.training.optimizer import FlatOptimizer
from stairwise.training.process import StopRequest
from stairwise.training.recipe import Recipe
from tests.two_processes import run_two

CPU = torch.device("cpu")
TINY = Recipe(
    data="digits",
    views="none",
    encoder="mlp",
    encoder_options={"inputs": 64, "widths": [32]},
    hidden=[16],
    head_norm=False,
    d=4,
    batch=64,
    steps=12,
    optimizer="muon",
    lr=0.05,
    momentum=0.95,
    window=64,
    records=12,
    precision="float32",
)


@pytest.mark.parametrize("scaling", ["relative", "fixed", "keller", "moonshot"])
def test_it_learns(scaling, tmp_path):
    recipe = replace(TINY, scaling=scaling, steps=40, loss="vicreg")
    losses = sw.train(recipe, tmp_path).series("loss")
    assert losses[-1] < 0.8 * losses[0]


def interrupt(step, *_):
    if step == 10:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_resuming_is_exact_to_the_bit(alpha, tmp_path):
    """Also with small initialization, which a resumed run does not repeat: the first lengths come from the file."""
    recipe = replace(TINY, alpha=alpha, weight_decay=0.1)
    sw.train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        sw.train(recipe, tmp_path / "parts", progress=interrupt)
    sw.train(recipe, tmp_path / "parts")
    ends = [checkpoint.newest(tmp_path / f / "checkpoints") for f in ("whole", "parts")]
    assert ends[0].tensors["lengths"].shape == (3,)
    for name, value in ends[0].tensors.items():
        assert torch.equal(value, ends[1].tensors[name]), name


def test_checkpoints_of_other_optimizers_are_as_before(tmp_path):
    sw.train(replace(TINY, optimizer="lars", steps=2), tmp_path)
    assert "lengths" not in checkpoint.newest(tmp_path / "checkpoints").tensors


def test_two_processes_train_like_one(tmp_path):
    one = sw.train(TINY, tmp_path / "one")
    (tmp_path / "recipe.json").write_text(json.dumps(TINY.plain()))
    code = (
        "import json, sys, stairwise as sw; "
        "sw.train(sw.Recipe().with_settings(json.load(open(sys.argv[1]))), sys.argv[2], device='cpu')"
    )
    assert run_two("-c", code, tmp_path / "recipe.json", tmp_path / "two") == [0, 0]
    two = Run(tmp_path / "two")
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-4)
    ends = [checkpoint.newest(tmp_path / f / "checkpoints").part("objective") for f in ("one", "two")]
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=1e-5), name


def test_a_gradient_that_is_not_finite_changes_nothing():
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = FlatOptimizer(network, "muon", weight_decay=0.1)
    optimizer.lr.fill_(0.1)
    optimizer.gradient.normal_()
    optimizer.step()
    before = optimizer.values.clone(), optimizer.momentum_buffer.clone()
    for bad in (math.nan, math.inf, 1e30):
        optimizer.gradient.normal_()
        optimizer.gradient[3] = bad
        optimizer.step()
        assert torch.equal(optimizer.values, before[0])
        assert torch.equal(optimizer.momentum_buffer, before[1])
    optimizer.gradient.normal_()
    optimizer.step()
    assert not torch.equal(optimizer.values, before[0])
    assert torch.isfinite(optimizer.values).all()


def test_divergence_is_named_and_leaves_finite_weights(tmp_path):
    trainer = Trainer(replace(TINY, loss="vicreg"), tmp_path, CPU)
    trainer.resume()
    original = trainer.schedule.factor
    object.__setattr__(trainer.schedule, "factor", lambda step: 1e25 if step == 5 else original(step))
    try:
        with pytest.raises(Diverged, match=r"not finite at step 7 .*weights are finite.*lower lr"):
            trainer.run(StopRequest(), 1e9, lambda *_: None)
    finally:
        trainer.close()
    assert torch.isfinite(trainer.optimizer.values).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 1.5}, "lr must be at most 1, the length of the weights .got 1.5.: begin with 0.02"),
        ({"lr": 1e7, "scaling": "keller"}, "lr must be at most 1e"),
        ({"lr_bias": 1e7}, "lr_bias must be at most 1e"),
        ({"scaling": "kellerr"}, "did you mean 'keller'"),
    ],
)
def test_bad_recipes(changes, says):
    with pytest.raises(InputError, match=says):
        replace(TINY, **changes)


def test_networks_with_one_kind_of_parameter():
    for network in (torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False)):
        optimizer = FlatOptimizer(network, "muon")
        optimizer.lr.fill_(0.1)
        network(torch.randn(8, 3)).square().sum().backward()
        before = optimizer.values.clone()
        optimizer.step()
        assert not torch.equal(optimizer.values, before)
