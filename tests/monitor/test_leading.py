"""Leading eigenvalues of large embeddings, from dense sums and from a tracked basis, against dense computations."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stairwise as sw
from stairwise.checks import InputError
from stairwise.monitor import bases, digest, moments, products, rows, spectrum
from stairwise.monitor.decompose import decompose
from tests.two_processes import run_two


@pytest.fixture(params=["dense", "tracked", "halves", "rows"])
def layout(request, monkeypatch):
    """Both layouts for embeddings of a few hundred dimensions; dense also in half precision, as on a GPU, from sums and
    from rows that are kept."""
    kind = "halves" if request.param == "rows" else request.param
    if kind == "halves":
        monkeypatch.setattr(products, "uses_halves", lambda x: x.dtype == torch.float32)
        for module in ("frames", "spectrum"):
            monkeypatch.setattr(f"stairwise.monitor.{module}.uses_halves", lambda x: x.dtype == torch.float32)
        for module in (products, rows):
            monkeypatch.setattr(module, "of_halves", lambda left, right: left.float() @ right.float())
        monkeypatch.setattr(products, "add_of_halves", _add)
    monkeypatch.setattr(products, "ROWS", 64)
    monkeypatch.setattr(rows, "MOST", 1000)
    monkeypatch.setattr(rows, "DIFFERENCES", 100)
    monkeypatch.setattr(moments, "ALL", 64)
    monkeypatch.setattr(moments, "AT_ONCE", 128)
    monkeypatch.setattr(moments, "KEPT", 24)
    monkeypatch.setattr("stairwise.monitor.decompose.KEPT", 24)
    monkeypatch.setattr(bases, "BLOCK", 48)
    monkeypatch.setattr(bases, "FRESH", 4)
    for module in ("stairwise.monitor.moments", "stairwise.monitor.bases", "stairwise.monitor.digest"):
        monkeypatch.setattr(f"{module}.COLUMNS", 96)
    monkeypatch.setattr(moments, "DENSE", 64 if kind == "tracked" else 8192)
    if request.param == "rows":
        monkeypatch.setattr(sw.SpectrumMonitor, "update", _collect)
    return kind


def _collect(monitor, *batch):
    """Like `update`, which keeps no rows."""
    monitor.collect(*batch)
    monitor.flush()


def _add(into, left, right, keep):
    into.addmm_(left.float(), right.float(), beta=keep)


def embeddings(n, d=300, seed=0, turn=0.0, mean=0.5):
    """Pairs whose modes fall as a power law, with a mean; `turn` rotates the modes."""
    rng = np.random.default_rng(1)
    modes = np.linalg.qr(rng.standard_normal((d, d)))[0]
    if turn:
        modes = np.linalg.qr(modes + turn * np.random.default_rng(2).standard_normal((d, d)) / np.sqrt(d))[0]
    scale = np.arange(1, d + 1) ** -1.0
    draw = np.random.default_rng(seed)
    base = draw.standard_normal((n, d)) * scale
    views = ((base + 0.3 * scale * draw.standard_normal((n, d)) + mean * scale) @ modes.T for _ in "ab")
    return tuple(torch.tensor(z, dtype=torch.float32) for z in views)


def expected(a, b, count=24):
    """The leading values by definition."""
    a, b = a.double().numpy(), b.double().numpy()
    C = (a.T @ b + b.T @ a) / (2 * len(a))
    covariance = np.cov(np.concatenate([a, b]).T)
    return {
        "eigenvalues": np.linalg.eigvalsh(C)[::-1][:count],
        "covariance": np.linalg.eigvalsh(covariance)[::-1][:count],
        "trace": np.trace(C),
        "variance": np.trace(covariance),
    }


def batches(a, b, size=50):
    return zip(a.split(size), b.split(size), strict=True)


def filled(a, b, **options):
    monitor = sw.SpectrumMonitor(**options)
    for pair in batches(a, b):
        monitor.update(*pair)
    return monitor


def agrees(found, a, b, rel):
    for name, values in expected(a, b).items():
        tolerance = 1e-5 if name in ("trace", "variance") else rel
        assert getattr(found, name) == pytest.approx(values, rel=tolerance), name


def test_leading_values_and_exact_totals(layout):
    a, b = embeddings(1000)
    found = filled(a, b).compute()
    agrees(found, a, b, rel=1e-4 if layout != "tracked" else 0.02)
    assert (found.samples, found.dimensions, len(found.eigenvalues), found.batch) == (1000, 300, 24, 50)
    exact = filled(a, b, exact=True).compute()
    assert len(exact.covariance) == 300
    assert exact.mean_square == pytest.approx(found.mean_square, rel=1e-5)
    assert (found.positive, found.negative) == pytest.approx((exact.positive, exact.negative), rel=1e-5)
    assert found.std_of_l2_normalized == pytest.approx(exact.std_of_l2_normalized, rel=1e-5)
    assert found.rankme is None
    assert found.lidar is None


def test_standardized_embeddings(layout):
    """Of dense sums, with the mean variance of both views, which differ here; a tracked basis has none."""
    a, b = embeddings(1000, mean=2.0)
    b = 1.02 * b + 0.1
    found = filled(a, b, normalized=True).compute()
    if layout == "tracked":
        assert found.normalized is None
        return
    exact = filled(a, b, normalized=True, exact=True).compute().normalized
    assert found.normalized == pytest.approx(exact[:24], rel=1e-3)
    assert found.normalized_trace == pytest.approx(exact.sum(), rel=1e-3)


def test_bases_follow_modes_that_turn(layout):
    """A window starts with the basis of the one before; what turns in between is found again."""
    monitor = filled(*embeddings(600))
    for turn in (0.3, 0.3):
        monitor.reset()
        a, b = embeddings(600, seed=4, turn=turn)
        for pair in batches(a, b):
            monitor.update(*pair)
    agrees(monitor.compute(), a, b, rel=1e-4 if layout != "tracked" else 5e-3)


def test_a_mean_that_dominates(layout):
    """The variance is 1e-5 of the squared mean, which float32 alone would lose; the mean drifts, too."""
    monitor = sw.SpectrumMonitor()
    for seed, mean in enumerate((300.0, 310.0, 320.0)):
        monitor.reset()
        a, b = embeddings(600, seed=seed, mean=mean)
        for pair in batches(a, b):
            monitor.update(*pair)
    found, values = monitor.compute(), expected(a, b)
    assert found.variance < 2e-5 * found.mean_square
    assert found.variance == pytest.approx(values["variance"], rel=1e-4)
    assert found.trace == pytest.approx(values["trace"], rel=1e-6)
    assert found.covariance == pytest.approx(
        values["covariance"], rel={"dense": 1e-3, "halves": 1e-2, "tracked": 0.02}[layout]
    )
    assert found.eigenvalues[0] == pytest.approx(values["eigenvalues"][0], rel=1e-5)


@pytest.mark.parametrize("options", [{"window": 400}, {"half_life": 100}])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_mean_that_drifts_is_followed_without_reset(layout, options, recorded):
    """In the end it is a hundred times the spread away from where it began."""
    monitor, exact = sw.SpectrumMonitor(**options), sw.SpectrumMonitor(**options, exact=True)
    for seed in range(20):
        a, b = (z + 0.4 * seed for z in embeddings(400, seed=seed))
        for pair in batches(a, b):
            monitor.update(*pair)
            exact.update(*pair)
        if recorded:
            monitor.compute()
    found, values = monitor.compute(), exact.compute()
    assert found.variance == pytest.approx(values.variance, rel=1e-4)
    assert found.trace == pytest.approx(values.trace, rel=1e-6)
    assert found.covariance[:12] == pytest.approx(values.covariance[:12], rel=0.01 if layout != "tracked" else 0.1)


@pytest.mark.parametrize(("rows", "views"), [(100, "unrelated"), (1000, "unrelated"), (1000, "opposed")])
def test_as_many_negative_eigenvalues_as_positive_ones(layout, rows, views):
    """C of unrelated views, or of views opposed in every other mode; its leading modes are new in each record."""
    if layout == "tracked":
        pytest.skip("such modes are too many for one basis")
    monitor, signs = sw.SpectrumMonitor(), torch.tensor([1.0, -1.0]).repeat(150)
    for seed in range(3):
        monitor.reset()
        a, b = (modes_apart(rows, seed), modes_apart(rows, seed + 10))
        if views == "opposed":
            b = a * signs + 0.5 * b
        for pair in batches(a, b):
            monitor.update(*pair)
        values = expected(a, b)["eigenvalues"]
        assert monitor.compute().eigenvalues == pytest.approx(values, rel={"dense": 3e-4, "halves": 1e-3}[layout])


def modes_apart(n, seed):
    """Embeddings whose modes are the dimensions."""
    scale = torch.arange(1, 301) ** -1.0
    return scale * torch.randn(n, 300, generator=torch.Generator().manual_seed(seed))


def test_few_rows_are_exact(layout):
    """Fewer rows than the basis has columns: their span is the basis."""
    a, b = embeddings(40)
    monitor = sw.SpectrumMonitor()
    for pair in batches(a, b, 20):
        monitor.collect(*pair)
    agrees(monitor.compute(), a, b, rel=1e-3 if layout == "halves" else 1e-4)


def test_hidden_representations(layout):
    h = embeddings(500, seed=3)
    monitor = sw.SpectrumMonitor()
    z = torch.randn(250, 4)
    for part in torch.cat(h).split(125):
        monitor.collect_hidden(part)
    monitor.update(z, z)
    found = monitor.compute()
    values = np.linalg.eigvalsh(np.cov(torch.cat(h).double().numpy().T))[::-1]
    assert found.hidden == pytest.approx(values[:24], rel=1e-4 if layout != "tracked" else 0.02)
    assert (found.hidden_dimensions, found.dimensions) == (300, 4)
    assert found.hidden_variance == pytest.approx(values.sum(), rel=1e-5)


def test_windows_half_lives_and_merging(layout):
    a, b = embeddings(1200)
    window = filled(a, b, window=400).compute()
    assert window.samples == 400
    agrees(window, a[800:], b[800:], rel=2e-3 if layout != "tracked" else 0.05)
    one, two = filled(a[:600], b[:600]), filled(a[600:], b[600:])
    assert not torch.equal(one.frames.centres["z"], two.frames.centres["z"])
    one.merge(two)
    agrees(one.compute(), a, b, rel=1e-4 if layout != "tracked" else 0.03)
    decayed, exact = (filled(a, b, half_life=300, exact=kind).compute() for kind in (None, True))
    assert decayed.covariance == pytest.approx(exact.covariance[:24], rel=1e-4 if layout != "tracked" else 0.03)
    assert decayed.variance == pytest.approx(exact.variance, rel=1e-5)


@pytest.mark.parametrize("rows", [(64, 2048), (2048, 64)])
@pytest.mark.parametrize("how", ["merged", "merged into none", "loaded"])
def test_sums_of_another_device_go_on(layout, monkeypatch, rows, how):
    """CPU and GPU sum dense moments in blocks of other sizes, of which they know the upper triangle."""
    a, b = embeddings(800)
    monkeypatch.setattr(products, "ROWS", rows[0])
    first = filled(a[:400], b[:400])
    monkeypatch.setattr(products, "ROWS", rows[1])
    second = sw.SpectrumMonitor()
    if how == "loaded":
        second.load(first.state())
    elif how == "merged into none":
        second.merge(first)
    for pair in batches(a[400:], b[400:]):
        second.update(*pair)
    if how == "merged":
        second.merge(first)
    agrees(second.compute(), a, b, rel={"dense": 1e-4, "halves": 1e-3, "tracked": 0.03}[layout])


def test_merging_into_a_window_that_has_just_begun(layout):
    """It has no sums yet, but those of the window before refer to its centre."""
    a, b = embeddings(800)
    monitor = filled(a[:400], b[:400], window=400)
    assert not monitor.sums
    monitor.merge(filled(a[400:] + 3.0, b[400:] + 3.0))
    a, b = (torch.cat([z[:400], z[400:] + 3.0]) for z in (a, b))
    agrees(monitor.compute(), a, b, rel={"dense": 1e-3, "halves": 2e-2, "tracked": 0.2}[layout])


def test_sums_of_another_kind_are_not_merged(layout):
    a, b = embeddings(100)
    with pytest.raises(InputError, match="same `exact`"):
        filled(a, b).merge(filled(a, b, exact=True))
    with pytest.raises(InputError, match="same size"):
        filled(a, b).merge(filled(a[:, :-1], b[:, :-1]))


@pytest.mark.parametrize("options", [{}, {"window": 150}, {"half_life": 130}])
def test_state_continues_to_the_bit(layout, options):
    a, b = embeddings(400)
    one = filled(a[:200], b[:200], **options)
    one.compute()
    two = sw.SpectrumMonitor(**options)
    two.load({name: value.clone() for name, value in one.state().items()})
    for monitor in (one, two):
        for pair in batches(a[200:], b[200:]):
            monitor.update(*pair)
    assert np.array_equal(one.compute().covariance, two.compute().covariance)


def test_buffers_stay_where_a_graph_refers_to_them(layout):
    a, b = embeddings(100)
    monitor = filled(a, b)

    def where():
        parts = (monitor.sums, monitor.frames.bases, monitor.frames.centres)
        return [value.data_ptr() for part in parts for value in part.values()]

    before = where()
    monitor.compute()
    monitor.reset()
    monitor.update(a, b)
    assert where() == before


def test_a_monitor_that_is_deleted_leaves_its_last_record(layout):
    a, b = embeddings(400)
    monitor = filled(a, b)
    copies, gone = monitor.copies(), weakref.ref(monitor)
    monitor.reset()
    del monitor
    assert gone() is None  # nothing holds it, so its memory is free
    agrees(decompose(copies.arrays()), a, b, rel=1e-4 if layout != "tracked" else 0.02)


def test_bad_batches_and_no_batches(layout):
    a, b = embeddings(200)
    monitor = filled(a, b)
    monitor.update(a * torch.nan, b)
    found = monitor.compute()
    agrees(found, a, b, rel=1e-4 if layout != "tracked" else 0.02)
    assert (found.skipped, found.first_skipped) == (1, 5)
    monitor.reset()
    monitor.update(a * torch.inf, b)
    with pytest.raises(InputError, match="two pairs"):
        monitor.compute()
    monitor.reset()
    monitor.update(a, b)
    agrees(monitor.compute(), a, b, rel={"dense": 1e-4, "halves": 2e-4, "tracked": 0.05}[layout])


@pytest.mark.parametrize("rows", [60, 600])
def test_a_collapsed_embedding(layout, rows):
    point = torch.ones(rows, 300)
    monitor = sw.SpectrumMonitor()
    monitor.update(point, point)
    found = monitor.compute()
    assert found.eigenvalues[0] == pytest.approx(300.0, rel=1e-4)
    assert found.mean_square == pytest.approx(300.0, rel=1e-5)
    assert abs(found.covariance).max() < 1e-3


def test_a_batch_whose_squares_overflow_costs_one_batch(layout):
    """Finite numbers, but their squares are not, in float32."""
    a, b = embeddings(200)
    monitor = filled(a, b)
    huge = a.clone()
    huge[3, 7] = 1e25
    monitor.update(huge, b)
    found = monitor.compute()
    assert found.skipped == 1
    agrees(found, a, b, rel=1e-4 if layout != "tracked" else 0.02)


def test_a_record_that_fails_does_not_spoil_the_next(layout):
    a, b = embeddings(200)
    monitor = filled(a, b)
    for value in monitor.sums.values():
        value.fill_(torch.inf)
    monitor.snapshot()
    monitor.reset()
    for _ in range(2):
        monitor.reset()
        monitor.update(a, b)
        found = monitor.compute()
    agrees(found, a, b, rel=2e-3 if layout != "tracked" else 0.1)


def test_states_of_older_versions(layout):
    """They hold sums in float64, of all dimensions: dense ones go on, for a tracked basis there is nothing to use."""
    a, b = embeddings(200)
    rows = torch.cat([a, b, torch.ones(200, 8)], dim=1).double()
    monitor = sw.SpectrumMonitor()
    monitor.load({"zz": rows.T @ rows, "u": torch.zeros(302)})
    monitor.update(a, b)
    if layout != "tracked":
        a, b = torch.cat([a, a]), torch.cat([b, b])
    assert monitor.compute().samples == len(a)
    agrees(monitor.compute(), a, b, rel=1e-4 if layout != "tracked" else 0.02)


def test_representations_that_begin_after_a_window(layout):
    a, b = embeddings(300)
    monitor = sw.SpectrumMonitor(window=100)
    for i, (x, y) in enumerate(batches(a, b)):
        monitor.update(x, y, *((x, y) if i > 3 else ()))
    assert monitor.compute().hidden_dimensions == 300


def test_autocast_and_random_numbers_of_the_user(layout):
    a, b = embeddings(200)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        monitor = filled(a, b)
    found = monitor.compute()
    assert torch.equal(torch.get_rng_state(), before)
    agrees(found, a, b, rel=1e-4 if layout != "tracked" else 0.02)


def test_embeddings_in_other_precisions(layout):
    a, b = embeddings(257)
    found = sw.SpectrumMonitor()
    found.update(a.double(), b.double())
    agrees(found.compute(), a, b, rel=1e-3 if layout != "tracked" else 0.05)
    halves = sw.SpectrumMonitor()
    halves.update(a.bfloat16(), b.bfloat16())
    assert halves.compute().batch == 257


def test_sums_that_were_complete_go_on(layout):
    """A state of a monitor that computed all eigenvalues, in one that computes the leading ones."""
    a, b = embeddings(200, mean=0.0)
    older = filled(a, b, exact=True, normalized=True)
    monitor = sw.SpectrumMonitor(normalized=True)
    monitor.load(older.state())
    monitor.update(a, b)
    assert "ab" not in monitor.sums
    if layout != "tracked":
        agrees(monitor.compute(), torch.cat([a, a]), torch.cat([b, b]), rel=1e-3)


class NoProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in ("mm", "mv", "dot", "einsum")), func
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave", "_to_copy.cpu")
        assert not any(name in str(func) for name in waits), func
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_before_the_record_is_complete(layout):
    """On a GPU the host would wait for it, and a graph could not be recorded."""
    if layout == "tracked":
        pytest.skip("the first basis is found at once")
    a, b = embeddings(600)
    monitor = sw.SpectrumMonitor()
    with NoWaiting():
        for spent in (False, True, True):
            for pair in batches(a, b):
                monitor.update(*pair, *pair)
            copies = monitor.copies(spent=spent)
            monitor.reset()
    agrees(decompose(copies.arrays()), a, b, rel=1e-3)


def test_directions_need_no_matrix_products():
    """On a GPU these would be rounded to 11 bits if the user has allowed TF32."""
    a, b = torch.randn(2, 3, 20, 7)
    with NoProducts():
        found = digest.direction_sums(a, b)
    u, v = (nn.functional.normalize(z.double(), dim=2) for z in (a, b))
    assert found[:, :7] == pytest.approx((u + v).sum(dim=1).numpy(), abs=1e-5)
    assert found[:, 7:14] == pytest.approx((u**2 + v**2).sum(dim=1).numpy(), abs=1e-5)
    assert found[:, 14] == pytest.approx(2 * torch.einsum("bnd,bnd->b", u, v).numpy(), abs=1e-5)
    assert found[:, 15].tolist() == [40.0] * 3


def test_pairs_wanted():
    monitor = sw.SpectrumMonitor()
    monitor.update(torch.randn(3, 10), torch.randn(3, 10))
    assert monitor.pairs_wanted() == 40
    large = sw.SpectrumMonitor()
    large.update(torch.randn(3, 2000), torch.randn(3, 2000))
    assert large.pairs_wanted() == spectrum.ENOUGH == 4096


TWO = """
import sys
import numpy as np
import torch
import torch.distributed as dist
import stairwise as sw
from stairwise.monitor import bases, decompose, digest, moments
from tests.monitor.test_leading import batches, embeddings

for module in (moments, bases, digest):
    module.COLUMNS = 96
moments.KEPT = decompose.KEPT = 24
dist.init_process_group("gloo")
rank = dist.get_rank()
for layout, sizes in (("all", (1024, 8192)), ("dense", (64, 8192)), ("tracked", (64, 64))):
    for case, options in eval(sys.argv[2]).items():
        moments.ALL, moments.DENSE = sizes
        monitor = sw.SpectrumMonitor(**options)
        for seed in range(3):
            if not options:
                monitor.reset()
            a, b = embeddings(400, seed=seed)
            for pair in batches(a[rank::2], b[rank::2]):
                monitor.update(*pair)
            sums = monitor.snapshot(joint=True)
        if rank == 0:
            found = decompose.decompose(sums)
            parts = {"eigenvalues": found.eigenvalues, "covariance": found.covariance, "variance": found.variance}
            np.savez(f"{sys.argv[1]}/{layout}, {case}.npz", **parts)
dist.destroy_process_group()
"""
WEIGHTED = {"all": {}, "window": {"window": 100}, "half-life": {"half_life": 30}}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    assert run_two("-c", TWO, folder, repr(WEIGHTED)) == [0, 0]
    return folder


@pytest.mark.parametrize("case", WEIGHTED)
@pytest.mark.parametrize(
    ("kind", "rel"),  # the ids begin with a group, so that one worker runs both processes for all tests
    [pytest.param(kind, rel, id=f"two:{kind}") for kind, rel in (("all", 1e-9), ("dense", 1e-4), ("tracked", 0.02))],
)
def test_two_processes_are_one(of_two, kind, rel, case):
    """Each sums half of the pairs; the spectra are those of the pairs that count, as one process has them."""
    options = WEIGHTED[case]
    alone = sw.SpectrumMonitor(**{name: 2 * value for name, value in options.items()}, exact=True)
    for seed in range(3):
        if not options:
            alone.reset()
        for pair in batches(*embeddings(400, seed=seed), size=100):
            alone.update(*pair)
    values = alone.compute()
    with np.load(of_two / f"{kind}, {case}.npz") as found:
        for name in ("eigenvalues", "covariance"):
            assert found[name][:24] == pytest.approx(getattr(values, name)[:24], rel=rel), name
        assert found["variance"] == pytest.approx(values.variance, rel=1e-5)


@pytest.mark.parametrize("factor", [1.0, 0.5, 300.0])
def test_sums_that_are_spent(layout, factor):
    """Records that overwrite the sums they reset are those of monitors that keep them, while z grows or shrinks."""
    kept, spent = sw.SpectrumMonitor(), sw.SpectrumMonitor()
    for record in range(4):
        a, b = (factor**record * z for z in embeddings(600, seed=record, mean=0.05))
        found = []
        for monitor in (kept, spent):
            for pair in batches(a, b):
                monitor.update(*pair, *pair)
            found.append(decompose(monitor.copies(spent=monitor is spent).arrays()))
            monitor.reset()
        agrees(found[1], a, b, rel=1e-4 if layout != "tracked" else 0.03)
        for name in ("eigenvalues", "covariance", "hidden", "variance"):
            assert np.array_equal(getattr(found[0], name), getattr(found[1], name)), name


def test_embeddings_that_grow_too_much_from_one_record_to_the_next(layout):
    """Half precision on a GPU bounds it; batches that cannot be summed are counted, and the next record has all."""
    a, b = embeddings(400)
    monitor = filled(a, b)
    for skipped in (8, 8):  # all of the first record with them, none of the next
        monitor.copies(spent=True)
        monitor.reset()
        for pair in batches(1e6 * a, 1e6 * b):
            monitor.update(*pair)
        assert monitor.state()["flaws"][1] == (skipped if layout == "halves" else 0)
    assert round(monitor.compute().samples) == 400


def test_one_large_entry_costs_its_batch_only(layout):
    """In the first batch, where the centre begins, and later; the next record is right."""
    a, b = embeddings(600)
    for place, value in ((3, 1e25), (103, 1e15)):
        monitor = sw.SpectrumMonitor()
        bad = a.clone()
        bad[place, 7] = value
        for pair in batches(bad, b):
            monitor.update(*pair)
        monitor.reset()
        for pair in batches(a, b):
            monitor.update(*pair)
        assert monitor.state()["flaws"][1] == (1 if value > 1e20 or layout == "halves" else 0)
        if value > 1e20 or layout == "halves":  # else the centre is far away for a record
            agrees(monitor.compute(), a, b, rel=1e-3 if layout != "tracked" else 0.02)


def test_rows_are_kept_again_after_a_long_window(layout):
    monitor = sw.SpectrumMonitor()
    for seed, number in enumerate((600, 200, 200, 600)):
        a, b = embeddings(number, seed=seed)
        for pair in batches(a, b):
            monitor.update(*pair)
        found = decompose(monitor.copies(spent=True).arrays())
        assert found.samples == number
        agrees(found, a, b, rel=1e-3 if layout != "tracked" else 0.05)
        monitor.reset()


def test_a_collapsed_embedding_that_drifts(layout):
    """The variance vanishes beside the way of the mean, from which sums in half precision cannot tell it."""
    a, b = embeddings(400, mean=0.0)
    drift = torch.linspace(0, 1, 400)[:, None] * torch.ones(300)
    monitor = filled(1e-4 * a + drift, 1e-4 * b + drift)
    found = monitor.compute()
    assert found.covariance[0] == pytest.approx(np.cov(drift[:, 0].repeat(2), ddof=1) * 300, rel=1e-3)
    assert np.isfinite(found.eigenvalues).all()


def test_bases_that_are_not_finite_are_found_again(layout):
    a, b = embeddings(400)
    monitor = filled(a, b)
    monitor.compute()
    for basis in monitor.bases.values():
        basis[:, :30] = torch.nan
    for _ in range(3):
        monitor.compute()
    agrees(monitor.compute(), a, b, rel=1e-2 if layout != "tracked" else 0.02)


def test_rows_of_a_checkpoint_become_sums_for_several_processes(layout):
    """The first process takes what was summed, the others the same sums of nothing, so that they can be added."""
    a, b = embeddings(400)
    state = filled(a, b).state()
    first, other = sw.SpectrumMonitor(), sw.SpectrumMonitor()
    first.load(state)
    first.sum_rows()
    other.load(digest.without_sums(state))
    shapes = [{name: value.shape for name, value in monitor.sums.items()} for monitor in (first, other)]
    assert shapes[0] == shapes[1]
    assert all(not value.any() for value in other.sums.values())
    agrees(first.compute(), a, b, rel=1e-3 if layout != "tracked" else 0.02)


def test_a_state_without_rows_goes_on(layout):
    """It was stored after a reset, and is stored or reset again before the next batch."""
    a, b = embeddings(400)
    monitor = filled(a, b)
    monitor.reset()
    second = sw.SpectrumMonitor()
    second.load(monitor.state())
    second.reset()
    second.load(second.state())
    for pair in batches(a, b):
        second.update(*pair)
    agrees(second.compute(), a, b, rel=1e-3 if layout != "tracked" else 0.05)


@pytest.mark.parametrize("options", [{"window": 300}, {"half_life": 1e9}])
def test_rows_of_a_checkpoint_become_sums_where_old_batches_are_forgotten(layout, options):
    a, b = embeddings(400)
    monitor = sw.SpectrumMonitor(**options)
    monitor.load(filled(a[:200], b[:200]).state())
    monitor.compute()
    for pair in batches(a[200:], b[200:]):
        monitor.update(*pair)
    agrees(monitor.compute(), a, b, rel=1e-3 if layout != "tracked" else 0.05)


def test_the_variance_of_nearly_collapsed_embeddings(layout):
    """The mean is 100,000 times larger; it does not count as growth."""
    a, b = (1 + 1e-5 * z for z in embeddings(500, mean=0.0))
    monitor = sw.SpectrumMonitor()
    for _ in range(3):
        monitor.reset()
        for pair in batches(a, b):
            monitor.update(*pair)
        assert monitor.compute().variance == pytest.approx(expected(a, b)["variance"], rel=1e-2)


def test_growth_is_noticed_although_the_last_batch_is_not_finite(layout):
    a, b = embeddings(400)
    monitor = filled(a, b)
    for _ in range(3):
        monitor.reset()
        for pair in batches(1e6 * a, 1e6 * b):
            monitor.update(*pair)
        monitor.update(a[:50] * torch.nan, b[:50])
    agrees(monitor.compute(), 1e6 * a, 1e6 * b, rel=1e-3 if layout != "tracked" else 0.05)


def test_a_mean_that_moves_beside_a_bad_batch(layout):
    a, b = embeddings(400)
    monitor = filled(a, b)
    monitor.reset()
    for pair in batches(a + 10, b + 10):
        monitor.update(*pair)
    monitor.update(a[:50] * torch.nan, b[:50])
    found = monitor.compute()
    assert found.samples == 400
    assert found.covariance[0] == pytest.approx(expected(a, b)["covariance"][0], rel=0.02)


def test_a_collapsed_point_that_moves(layout):
    monitor = sw.SpectrumMonitor()
    for size in (1e-3, 2e-3, 2e-3):
        monitor.reset()
        point = torch.full((100, 300), size)
        monitor.update(point, point)
    assert monitor.compute().eigenvalues[0] == pytest.approx(300 * 4e-6, rel=1e-3)


@pytest.mark.parametrize("steepness", [0.5, 1.15])
def test_steep_spectra(layout, steepness):
    """What is left beside the leading modes is rounding; it must not take their place."""
    if layout == "tracked":
        pytest.skip("its error is relative to the largest")
    draw = torch.Generator().manual_seed(0)
    scale = torch.exp(-steepness * torch.arange(300.0))
    base = torch.randn(500, 300, generator=draw) * scale
    a, b = (base + 0.1 * scale * torch.randn(500, 300, generator=draw) for _ in "ab")
    monitor = filled(a, b)
    for _ in range(2):
        monitor.compute()
    found, values = monitor.compute(), expected(a, b)
    for name in ("eigenvalues", "covariance"):
        assert getattr(found, name)[:5] == pytest.approx(values[name][:5], rel=1e-3), name


def test_batches_of_any_size(layout):
    """Also h in other numbers than z; bad batches are left out of both."""
    a, b = embeddings(430)
    monitor, sizes = sw.SpectrumMonitor(), [50, 50, 7, 7, 7, 100, 9, 200]
    for pair in zip(a.split(sizes), b.split(sizes), strict=True):
        monitor.collect(*pair)
        monitor.collect_hidden(torch.cat(pair)[:33])
        monitor.flush()
    monitor.collect(a[:20] * torch.inf, b[:20])
    monitor.collect_hidden(a[:20] * torch.nan)
    found = monitor.compute()
    agrees(found, a, b, rel=1e-3 if layout != "tracked" else 0.05)
    assert (found.samples, found.skipped, found.batch) == (430, 1, 54)
    h = torch.cat([torch.cat(pair)[:33] for pair in zip(a.split(sizes), b.split(sizes), strict=True)])
    assert found.hidden_variance == pytest.approx(float(h.var(dim=0).sum()), rel=1e-3)


def test_the_picture_is_of_the_last_batch(layout):
    """Also after rows have been summed; not if that batch is bad."""
    a, b = embeddings(300)
    pictures = []
    for again in (False, True):
        monitor = filled(a * 100, b * 100)
        monitor.reset()
        for pair in batches(a, b):
            monitor.update(*pair)
        if again:
            monitor.sum_rows()
        pictures.append(monitor.compute().leading)
    assert pictures[0].shape == (2, 50, 2)
    assert pictures[0] == pytest.approx(pictures[1], rel=1e-2, abs=1e-2)
    assert abs(pictures[0]).max() < 20
    monitor.update(a * torch.nan, b)
    assert monitor.compute().leading is None


def test_rows_of_h_beside_small_z_are_summed_on_a_cpu(layout, monkeypatch):
    a, b = embeddings(200)
    first, second = sw.SpectrumMonitor(), sw.SpectrumMonitor()
    first.update(a[:, :4], b[:, :4], a, b)
    state = first.state()
    for module in ("products", "frames", "spectrum"):
        monkeypatch.setattr(f"stairwise.monitor.{module}.uses_halves", lambda x: False)
    monkeypatch.setattr(rows, "of_halves", None)  # a CPU has no such product
    second.load(state)
    values = np.linalg.eigvalsh(np.cov(torch.cat([a, b]).double().numpy().T))[::-1][:24]
    assert second.compute().hidden == pytest.approx(values, rel=1e-3 if layout != "tracked" else 0.05)


def test_sums_of_other_layouts_cannot_become_exact(layout):
    """They are relative to a centre; only what comes after them is recorded."""
    a, b = embeddings(200)
    monitor = sw.SpectrumMonitor(exact=True)
    monitor.load(filled(a + 1, b + 1).state())
    for pair in batches(a, b):
        monitor.update(*pair)
    found = monitor.compute()
    assert found.samples == 200
    assert found.eigenvalues[:24] == pytest.approx(expected(a, b)["eigenvalues"], rel=1e-5)
