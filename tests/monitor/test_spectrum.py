"""Spectra from accumulated moments, compared with dense computations on all data."""

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.checks import InputError
from stairwise.monitor import digest


def embeddings(n, d, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.logspace(0, -3, d)
    base = rng.standard_normal((n, d)) * scale
    return tuple(base + 0.3 * scale * rng.standard_normal((n, d)) + 2 * scale for _ in "ab")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d"), [(300, 8), (12, 20)])
def test_spectra_equal_dense_ones(dtype, n, d):
    z_a, z_b = (torch.tensor(z).to(dtype) for z in embeddings(n, d))
    h_a, h_b = (torch.tensor(z).to(dtype) for z in embeddings(n, 2 * d, seed=1))
    monitor = sw.SpectrumMonitor(normalized=True)
    for part in np.array_split(np.arange(n), 5):
        monitor.update(z_a[part], z_b[part], h_a[part], h_b[part])
    found = monitor.compute()
    a, b, h = (z.double().numpy() for z in (z_a, z_b, torch.cat([h_a, h_b])))
    C = (a.T @ b + b.T @ a) / (2 * n)
    std_a, std_b = ((z - z.mean(0)) / z.std(0) for z in (a, b))
    N = (std_a.T @ std_b + std_b.T @ std_a) / (2 * n)
    expected = {
        "eigenvalues": np.linalg.eigvalsh(C)[::-1],
        "covariance": np.linalg.eigvalsh(np.cov(np.concatenate([a, b]).T))[::-1],
        "hidden": np.linalg.eigvalsh(np.cov(h.T))[::-1],
    }
    for name, values in expected.items():
        assert getattr(found, name) == pytest.approx(values, rel=1e-6, abs=1e-9 * values[0]), name
    # float32 inputs far from zero leave their variance uncertain, so the scale here is the largest eigenvalue
    assert found.normalized == pytest.approx(np.linalg.eigvalsh(N)[::-1], abs=1e-6 * np.abs(N).max() * d)
    assert found.samples == n


def test_negative_eigenvalues_are_kept():
    z = torch.randn(50, 3, dtype=torch.float64)
    monitor = sw.SpectrumMonitor()
    monitor.update(z, -z)
    assert monitor.compute().eigenvalues.max() < 0


def test_reset_and_state():
    z_a, z_b = (torch.tensor(z) for z in embeddings(40, 5))
    one, two = sw.SpectrumMonitor(), sw.SpectrumMonitor()
    one.update(torch.ones_like(z_a), torch.ones_like(z_b))
    one.reset()
    one.update(z_a[:10], z_b[:10])
    two.load({k: v.clone() for k, v in one.state().items()}, torch.device("cpu"))
    for monitor in (one, two):
        monitor.update(z_a[10:], z_b[10:])
    fresh = sw.SpectrumMonitor()
    fresh.update(z_a, z_b)
    for monitor in (one, two):
        assert monitor.compute().eigenvalues == pytest.approx(fresh.compute().eigenvalues, rel=1e-10)


def spectrum_of(a, b):
    C = (a.T @ b + b.T @ a) / (2 * len(a))
    return np.linalg.eigvalsh(C)[::-1]


def test_a_window_forgets():
    """A spectrum covers between one and two windows of the most recent pairs."""
    a, b = (np.concatenate(parts) for parts in zip(*(embeddings(50, 4, s) for s in range(9)), strict=True))
    monitor = sw.SpectrumMonitor(window=100)
    for i in range(9):
        monitor.update(*(torch.tensor(z[50 * i : 50 * i + 50]) for z in (a, b)))
        found = monitor.compute()
        first = max(0, 50 * (2 * ((i + 1) // 2) - 2))
        assert found.samples == 50 * (i + 1) - first
        assert found.eigenvalues == pytest.approx(spectrum_of(a[first : 50 * i + 50], b[first : 50 * i + 50]))
    again = sw.SpectrumMonitor(window=100)
    again.load(monitor.state(), torch.device("cpu"))
    assert again.compute().eigenvalues == pytest.approx(monitor.compute().eigenvalues, rel=1e-12)


def test_half_life_weighs():
    a, b = embeddings(60, 4)
    monitor = sw.SpectrumMonitor(half_life=20)
    for part in np.array_split(np.arange(60), 3):
        monitor.update(torch.tensor(a[part]), torch.tensor(b[part]))
    weights = np.repeat([0.25, 0.5, 1.0], 20)
    C = (a.T * weights) @ b / weights.sum()
    assert monitor.compute().eigenvalues == pytest.approx(np.linalg.eigvalsh((C + C.T) / 2)[::-1])


def test_merging_equals_one_monitor():
    a, b = (torch.tensor(z) for z in embeddings(90, 5))
    parts = [sw.SpectrumMonitor() for _ in range(3)]
    for i, monitor in enumerate(parts):
        monitor.update(a[30 * i : 30 * i + 30], b[30 * i : 30 * i + 30])
    empty = sw.SpectrumMonitor()
    for monitor in parts:
        empty.merge(monitor)
    whole = sw.SpectrumMonitor()
    whole.update(a, b)
    assert empty.compute().eigenvalues == pytest.approx(whole.compute().eigenvalues, rel=1e-12)
    assert empty.compute().samples == 90
    parts[0].update(a, b)  # what was merged is a copy
    assert empty.compute().samples == 90


def test_representations_given_now_and_then():
    z, h = torch.randn(20, 2, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    monitor = sw.SpectrumMonitor()
    monitor.update(z, z, h, h)
    alone = monitor.compute().hidden
    monitor.update(z, z)
    assert monitor.compute().hidden == pytest.approx(alone)
    with pytest.raises(InputError, match="together"):
        monitor.update(z, z, h)


def test_bad_windows():
    for options in ({"window": 0}, {"half_life": -1}, {"window": 5, "half_life": 3}):
        with pytest.raises(InputError):
            sw.SpectrumMonitor(**options)


def test_constant_dimensions_have_no_normalized_correlation():
    z = torch.randn(30, 3, dtype=torch.float64)
    z[:, 1] = 2.0
    monitor = sw.SpectrumMonitor(normalized=True)
    monitor.update(z, z)
    assert np.isfinite(monitor.compute().normalized).all()


def test_bad_input():
    monitor = sw.SpectrumMonitor()
    with pytest.raises(InputError, match="two pairs"):
        monitor.compute()
    with pytest.raises(InputError, match="same shape"):
        monitor.update(torch.zeros(3, 2), torch.zeros(3, 3))
    monitor.update(torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(InputError, match="2 dimensions"):
        monitor.update(torch.zeros(3, 4), torch.zeros(3, 4))


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"half_life": 30.0}])
def test_collecting_equals_updating(options):
    """Batches of two sizes, with and without representations, some not finite."""
    at_once, later = (sw.SpectrumMonitor(**options) for _ in range(2))
    for i in range(29):
        n = 7 if i % 11 == 10 else 10
        a, b = (torch.tensor(z) for z in embeddings(n, 4, seed=i))
        views = (a, b) if i in {3, 4} else (a, b, a.repeat(1, 2), b.repeat(1, 2))
        if i in {12, 20}:
            views[1][0, 0] = torch.nan
        at_once.update(*views)
        later.collect(*views)
    for name, values in at_once.state().items():
        assert later.state()[name] == pytest.approx(values, rel=1e-10, abs=1e-12), name
    found, expected = later.compute(), at_once.compute()
    assert (found.samples, found.skipped, found.first_skipped) == (expected.samples, 2, 13)
    assert found.hidden == pytest.approx(expected.hidden)
    with pytest.raises(InputError, match="4 dimensions"):
        later.collect(torch.ones(3, 5), torch.ones(3, 5))


SCATTER = ("batch", "scatter_diagonal", "scatter_symmetric", "scatter_plain", "scatter_covariance")


def scatter(batches, weights=None):
    """By definition: variance of one pair's contribution to C and to the covariance, summed over entries.

    The means that are subtracted are those of both views in both orders.
    """
    a, b = (np.concatenate([views[i] for views in batches]) for i in range(2))
    weights = np.concatenate(
        [np.full(len(x), 1.0 if weights is None else weights[i]) for i, (x, _) in enumerate(batches)]
    )
    weights /= weights.sum()
    plain = np.einsum("ni,nj->nij", a, b)
    n = len(batches[0][0])
    centred = [np.concatenate([views[i] - views[i].mean(0) for views in batches]) for i in range(2)]
    cov = np.cov(np.concatenate([a, b]).T, aweights=np.tile(weights, 2), ddof=0)
    off = 0.0
    for c in centred:
        products = np.einsum("ni,nj->nij", c, c)
        square = np.tensordot(weights, products**2, 1) * (n / (n - 1)) ** 2 - cov**2
        off += (square.sum() - np.trace(square)) / 2
    symmetric = (plain + plain.transpose(0, 2, 1)) / 2
    C = np.tensordot(weights, symmetric, 1)

    def spread(x):
        return np.tensordot(weights, x**2, 1) - C**2

    one, both = spread(plain), spread(symmetric)
    diagonal = np.trace(one)
    return [n, diagonal, both.sum() - diagonal, one.sum() - diagonal, off]


def batches_of(n, count, d=4):
    return [embeddings(n, d, seed) for seed in range(count)]


def filled(batches, **options):
    monitor = sw.SpectrumMonitor(**options)
    for a, b in batches:
        monitor.update(torch.tensor(a), torch.tensor(b))
    return monitor


def scatter_of(monitor):
    found = monitor.compute()
    return [getattr(found, name) for name in SCATTER]


def test_scatter_of_pairs():
    batches = batches_of(25, 6)
    assert scatter_of(filled(batches)) == pytest.approx(scatter(batches), rel=1e-9)
    assert scatter_of(filled(batches[:5], window=75)) == pytest.approx(scatter(batches[:5]), rel=1e-9)
    assert scatter_of(filled(batches[:5], window=50)) == pytest.approx(scatter(batches[2:5]), rel=1e-9)


def test_scatter_of_batches_that_processes_share(monkeypatch):
    """Each process centres its own part of a batch; 16 rows of 32 do not make the scatter any smaller."""
    batches = np.random.default_rng(0).standard_normal((400, 2, 32, 3))
    alone = scatter_of(filled([(z[0], z[1]) for z in batches]))
    monkeypatch.setattr(digest, "world", lambda: 2)
    shared = scatter_of(filled([(z[0, part], z[1, part]) for z in batches for part in (slice(16), slice(16, 32))]))
    assert shared[0] == alone[0] == 32
    assert shared == pytest.approx(alone, rel=0.01)


def test_scatter_with_half_life_merged_and_continued():
    batches = batches_of(20, 3)
    assert scatter_of(filled(batches, half_life=20)) == pytest.approx(scatter(batches, [0.25, 0.5, 1.0]), rel=1e-9)
    merged, part = filled(batches[:1]), filled(batches[1:])
    merged.merge(part)
    assert scatter_of(merged) == pytest.approx(scatter(batches), rel=1e-9)
    continued = sw.SpectrumMonitor()
    continued.load(filled(batches[:2]).state())
    continued.update(*(torch.tensor(z) for z in batches[2]))
    assert scatter_of(continued) == pytest.approx(scatter(batches), rel=1e-9)


def test_sums_of_an_older_version_have_no_scatter_of_pairs_they_did_not_count():
    batches = batches_of(30, 2)
    state = filled(batches[:1]).state()
    state.pop("pairs")
    monitor = sw.SpectrumMonitor()
    monitor.load(state)
    assert scatter_of(monitor) == [None] * 5
    monitor.update(*(torch.tensor(z) for z in batches[1]))
    assert monitor.compute().batch == 30


def test_a_batch_that_is_not_finite_has_no_scatter():
    batches = batches_of(20, 3)
    bad = (batches[1][0].copy(), batches[1][1])
    bad[0][3, 1] = np.inf
    assert scatter_of(filled([batches[0], bad, batches[2]])) == pytest.approx(scatter([batches[0], batches[2]]))


def test_buffers_stay_where_a_graph_refers_to_them():
    monitor = filled(batches_of(20, 1))
    where = {name: value.data_ptr() for name, value in monitor.sums.items()}
    monitor.update(*(torch.tensor(z) for z in batches_of(20, 2)[1]))
    monitor.reset()
    monitor.update(*(torch.tensor(z) for z in batches_of(20, 2)[1]))
    assert {name: value.data_ptr() for name, value in monitor.sums.items()} == where
    assert "pairs" in where


@pytest.mark.parametrize("pairs", [4, 8, 64])
def test_correlations_of_views(pairs):
    """Known ones, from few pairs as well, whatever the scale of the modes and the mean."""
    rho, d = np.linspace(0.9, 0.2, 30), 30
    rng = np.random.default_rng(0)
    base = np.sqrt(rho) * rng.standard_normal((pairs * d, d))
    W = rng.standard_normal((d, d))
    a, b = ((base + np.sqrt(1 - rho) * rng.standard_normal(base.shape)) @ W + 3.0 for _ in "ab")
    found = filled([(a, b)]).compute().correlations
    assert found.mean() == pytest.approx(rho.mean(), abs=0.05)
    assert np.sqrt(((found - rho) ** 2).mean()) < (0.03 if pairs == 64 else 0.12)


def test_correlations_need_pairs_and_variance():
    a, b = (torch.randn(30, 8, dtype=torch.float64) for _ in "ab")
    monitor = sw.SpectrumMonitor()
    monitor.update(a, b)
    assert monitor.compute().correlations is None
    collapsed = sw.SpectrumMonitor()
    collapsed.update(torch.ones(40, 3), torch.ones(40, 3))
    found = collapsed.compute()
    assert found.correlations is None or np.isfinite(found.correlations).all()


def test_what_waits_stays_counted():
    z = torch.randn(5, 3)
    monitor = sw.SpectrumMonitor()
    for _ in range(4):
        monitor.collect(z, z)
    monitor.reset()
    monitor.collect(z * torch.nan, z)
    monitor.collect(z, z)
    found = monitor.compute()
    assert (found.samples, found.skipped, found.first_skipped) == (5, 1, 5)


def test_what_cannot_be_summed_is_heard_of_at_once(monkeypatch):
    def no_float64(_):
        raise TypeError("no float64 on this device")

    monkeypatch.setattr("stairwise.monitor.moments.precision", no_float64)
    with pytest.raises(TypeError, match="no float64"):
        sw.SpectrumMonitor().collect(torch.ones(4, 3), torch.ones(4, 3))


def test_cosines():
    """Mean cosines of positive and negative pairs by brute force, over batches."""
    torch.manual_seed(0)
    monitor, views = sw.SpectrumMonitor(), []
    for _ in range(3):
        a = torch.randn(20, 5) + 0.5
        views.append((a, a + 0.3 * torch.randn(20, 5)))
        monitor.collect(*views[-1])
    spectrum = monitor.compute()
    u = torch.nn.functional.normalize(torch.cat([torch.cat(side) for side in zip(*views, strict=True)]).double(), dim=1)
    cosines, n = u @ u.T, len(u) // 2
    same = torch.eye(n, dtype=torch.bool)
    others = ~same.repeat(2, 2)
    assert spectrum.positive == pytest.approx(cosines[:n, n:][same].mean().item())
    assert spectrum.negative == pytest.approx(cosines[others].mean().item())


def test_scores_of_other_libraries():
    """RankMe, LiDAR and lightly's spread as these are published, from the embeddings themselves."""
    a, b = embeddings(200, 12)
    found = filled([(a, b)]).compute()
    z = np.concatenate([a, b])
    sigma = np.linalg.svd(z, compute_uv=False)
    p = sigma / sigma.sum() + 1e-7
    assert found.rankme == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)
    samples = np.stack([a, b], axis=1)
    means = samples.mean(axis=1)
    between = (means - means.mean(axis=0)).T @ (means - means.mean(axis=0)) / (len(a) - 1)
    inner = (samples - means[:, None]).reshape(-1, 12)
    within, modes = np.linalg.eigh(inner.T @ inner / len(a) + 1e-4 * np.eye(12))
    root = modes / np.sqrt(within) @ modes.T
    p = np.maximum(np.linalg.eigvalsh(root @ between @ root), 0) + 1e-8
    p /= p.sum()
    assert found.lidar == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)
    spread = torch.nn.functional.normalize(torch.tensor(z), dim=1).std(dim=0).mean().item()
    assert found.std_of_l2_normalized == pytest.approx(spread, rel=1e-9)


def test_sums_of_an_older_version_are_converted():
    a, b = embeddings(50, 3)
    ones = np.ones((50, 8))
    rows = torch.tensor(np.concatenate([a, b, ones], axis=1))
    monitor = sw.SpectrumMonitor()
    monitor.load({"zz": rows.T @ rows, "u": torch.zeros(5), "before.zz": rows.T @ rows})
    fresh = filled([(a, b), (a, b)]).compute()
    assert monitor.compute().eigenvalues == pytest.approx(fresh.eigenvalues, rel=1e-10)
    assert monitor.compute().covariance == pytest.approx(fresh.covariance, rel=1e-10)
    assert monitor.compute().samples == 100


@pytest.mark.parametrize("d", [5, 90])
def test_picture_of_the_last_batch(d):
    """Both views in their two leading modes, whether there are more dimensions than rows or fewer."""
    a, b = embeddings(20, d)
    found = filled([(a, b)]).compute().leading
    flat = np.concatenate([a, b]).astype(np.float32)
    U, scale, _ = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    expected = (U[:, :2] * scale[:2]).reshape(2, 20, 2)
    assert np.abs(np.abs(found) - np.abs(expected)).max() < 1e-4 * scale[0]
    assert ((found.reshape(-1, 2) ** 3).sum(axis=0) >= 0).all()
