"""Sampling noise from moments, against the losses of batches, and the sentences about it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.runs.record import FIELDS, Record
from stairwise.staircase.noise import carried_by, excess_noise, noise_of, noise_sentence

PAPER = {"lambda_": 1.0, "batch_norm": False, "symmetric": True}
BATCH, BATCHES, D = 32, 3000, 6


@pytest.fixture(scope="module")
def pairs():
    """Batches of embeddings that are neither Gaussian nor of equal variance, with a mean in a direction of its own."""
    rng = np.random.default_rng(0)
    n = BATCH * BATCHES
    base = rng.standard_normal((n, D)) * np.linspace(1.2, 0.5, D)
    size = np.exp(0.3 * rng.standard_normal((n, 1)))
    turn = np.linalg.qr(rng.standard_normal((D, D)))[0]
    a, b = (size * (base + 0.5 * rng.standard_normal((n, D))) @ turn + 0.3 for _ in "ab")
    return torch.tensor(a), torch.tensor(b)


@pytest.fixture(scope="module")
def measured(pairs):
    monitor = sw.SpectrumMonitor()
    for a, b in zip(*(z.split(BATCH) for z in pairs), strict=True):
        monitor.collect(a, b)
    return monitor.compute()


@pytest.mark.parametrize(
    ("loss", "options", "within"),
    [
        ("barlow_twins", PAPER, 0.02),
        ("barlow_twins", {"lambda_": 1.0, "batch_norm": False}, 0.02),
        ("barlow_twins", {"lambda_": 0.1, "batch_norm": False}, 0.02),
        ("barlow_twins", {"lambda_": 1.0}, 0.25),  # correlations of Gaussians
        ("vicreg", {"variance": 0.0}, 0.05),
        ("vicreg", {}, 0.3),  # standard deviations of Gaussians, and of the mean variance
    ],
)
def test_noise_is_the_loss_of_batches_minus_that_of_all_pairs(pairs, measured, loss, options, within):
    function = getattr(sw.losses, loss)
    batches = [float(function(a, b, **options)) for a, b in zip(*(z.split(BATCH) for z in pairs), strict=True)]
    difference = np.mean(batches) - float(function(*pairs, **options))
    error = np.std(batches) / np.sqrt(BATCHES)
    assert noise_of(measured, loss, options) == pytest.approx(difference, rel=within, abs=4 * error)


def test_far_out_pairs_are_more_noise(measured):
    assert excess_noise(measured, "barlow_twins") > 1.2
    assert excess_noise(measured, "vicreg") > 1.2
    assert excess_noise(measured, "simclr") == 1


def gaussian_record(rho, batch, loss, options):
    """The record of a run that has settled where theory says."""
    settled = sw.carried(rho, batch, loss, **options)
    rng = np.random.default_rng(0)
    scale = np.sqrt(settled.variance)
    monitor = sw.SpectrumMonitor()
    for _ in range(300):
        base = np.sqrt(settled.rho) * rng.standard_normal((batch, len(rho)))
        views = (base + np.sqrt(1 - settled.rho) * rng.standard_normal(base.shape) for _ in "ab")
        monitor.collect(*(torch.tensor(view * scale) for view in views))
    found = monitor.compute()
    record = Record(step=1, t=1.0, loss=settled.loss, **vars(found))
    return Record.from_json(record.as_json()), settled


def test_a_run_that_has_settled_is_told_so():
    """Correlations of the modes that grew say what is carried, and what four times the batch would."""
    rho = np.linspace(0.9, 0.45, 40)
    record, settled = gaussian_record(rho, 64, "barlow_twins", PAPER)
    assert noise_of(record, "barlow_twins", PAPER) == pytest.approx(settled.noise, rel=0.03)
    assert excess_noise(record, "barlow_twins") == pytest.approx(1, abs=0.03)
    assert carried_by(record, "barlow_twins", PAPER).above_half == pytest.approx(settled.above_half, abs=2)
    text = noise_sentence(record, "barlow_twins", PAPER, record.loss)
    now, then = (carried_by(record, "barlow_twins", PAPER, batch).above_half for batch in (64, 256))
    assert 0.45 < settled.noise / settled.loss < 0.55
    assert text == (
        f"Taking pairs as independent, half of your loss at batch 64 is sampling noise, and {now} of 40 dimensions can "
        f"pass ½; at 256 about {then} or more. With batch norm inside the network there may be less noise."
    )
    assert then == pytest.approx(sw.carried(rho, 256, **PAPER).above_half, abs=2)
    assert "at 128 about" in noise_sentence(record, "barlow_twins", PAPER, record.loss, batch=128)


def test_shares_other_than_half_are_numbers():
    record, settled = gaussian_record(np.linspace(0.9, 0.45, 40), 64, "barlow_twins", PAPER)
    text = noise_sentence(record, "barlow_twins", PAPER, 4 * settled.noise)
    assert text.startswith("Taking pairs as independent, 25 % of your loss at batch 64 is sampling noise, and ")


def test_a_larger_batch_that_adds_nothing():
    """Batch norm fixes the variance, so noise raises the loss and removes no mode."""
    record, settled = gaussian_record(np.linspace(0.9, 0.45, 40), 64, "barlow_twins", {"lambda_": 1.0})
    text = noise_sentence(record, "barlow_twins", {"lambda_": 1.0}, settled.loss)
    assert text.endswith(
        "of your loss at batch 64 is sampling noise; a larger batch lowers the loss, but adds few dimensions or none."
    )


def test_silence():
    record, settled = gaussian_record(np.linspace(0.9, 0.45, 40), 64, "barlow_twins", PAPER)
    assert noise_sentence(record, "barlow_twins", PAPER, 11 * settled.noise) == ""  # little noise
    assert noise_sentence(record, "byol", {}, 1.0) == ""  # a loss we know nothing of
    assert noise_sentence(record, "simclr", {}, 1.0) == ""
    for value in (None, 0.0, -1.0, float("nan")):
        assert noise_sentence(record, "barlow_twins", PAPER, value) == ""
    old = Record.from_json({"step": 1, "t": 0.1, "eigenvalues": [1.0], "covariance": [1.0], "loss": 2.0})
    assert noise_sentence(old, "barlow_twins", PAPER, 2.0) == ""
    assert noise_sentence(old, "vicreg", {}, 2.0) == ""


def test_the_constant_is_a_mode_of_barlow_twins():
    fields = {"correlations": np.array([0.8, 0.5]), "batch": 64, "covariance": None, "eigenvalues": None}
    with_mean, without = (SimpleNamespace(**fields, mean_square=m) for m in (0.9, 0.0))
    assert carried_by(with_mean, "barlow_twins", PAPER).rho == pytest.approx([1.0, 0.8])
    assert carried_by(without, "barlow_twins", PAPER).rho == pytest.approx([0.8, 0.5])
    assert carried_by(with_mean, "vicreg").rho == pytest.approx([0.8, 0.5])


@pytest.mark.parametrize("term", ["invariance", "variance", "covariance"])
def test_a_loss_without_one_of_its_terms_is_not_judged(term, measured):
    assert carried_by(measured, "vicreg", {term: 0}) is None
    assert noise_sentence(measured, "vicreg", {term: 0}, 20.0) == ""


@pytest.mark.parametrize(("loss", "options"), [("barlow_twins", PAPER), ("barlow_twins", {}), ("vicreg", {})])
def test_noise_from_leading_eigenvalues_and_totals(measured, loss, options):
    """Exact where totals are all that is needed; nothing is said of dimensions whose correlations are not known."""
    fields = {name: value for name, value in vars(measured).items() if name in FIELDS and name != "leading"}
    totals = {"trace": measured.eigenvalues.sum(), "variance": measured.covariance.sum(), "dimensions": D}
    whole = Record(step=1, t=1.0, **fields | totals)
    cut = {name: fields[name][: D - 2] for name in ("eigenvalues", "covariance", "correlations")}
    part = replace(whole, **cut)
    assert noise_of(part, loss, options) == pytest.approx(noise_of(whole, loss, options), rel=1e-12)
    assert excess_noise(part, loss) == pytest.approx(excess_noise(whole, loss), rel=0.02)
    assert carried_by(whole, loss, options) is not None
    assert carried_by(part, loss, options) is None
