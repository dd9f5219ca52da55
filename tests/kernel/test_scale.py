"""Many points: landmarks, random features, batches, several processes, and the choice between them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from stairwise.checks import InputError, TheoryWarning
from stairwise.kernel import kernels
from stairwise.kernel.estimator import KernelSSL
from stairwise.kernel.landmarks import CHOICES
from stairwise.kernel.operators import Blocks
from stairwise.kernel.tiles import TilePairs, dealt, layout
from stairwise.theory.correlation import Correlation
from tests.kernel import in_processes
from tests.two_processes import run_two

X_A, X_B = in_processes.views()
WORKER = str(Path(in_processes.__file__))


def spans_agree(z, w):
    """Whether the columns of w are those of z up to sign."""
    signs = np.sign((z * w).sum(0))
    np.testing.assert_allclose(w * signs, z, atol=1e-6)


# --- the approximations become exact


@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.parametrize("kernel", ["rbf", "ntk", ("rbf", "laplace")], ids=str)
def test_all_points_as_landmarks_are_exact(kernel, how):
    exact = KernelSSL(4, kernel=kernel).fit(X_A, X_b=X_B)
    est = KernelSSL(4, kernel=kernel, method="nystroem", n_features=260, landmarks=how).fit(X_A, X_b=X_B)
    assert est.kernel_ == exact.kernel_
    np.testing.assert_allclose(est.eigenvalues_, exact.eigenvalues_, rtol=1e-6)
    for view, x in zip("ab", (X_A, X_B), strict=True):
        spans_agree(exact.transform(x, view=view), est.transform(x, view=view))
    if how == "uniform" and kernel == "rbf":
        np.testing.assert_allclose(est.step_times(1e-4), exact.step_times(1e-4), rtol=1e-4)


def error(est, exact):
    return np.abs(est.eigenvalues_ / exact.eigenvalues_ - 1).max()


@pytest.mark.parametrize(
    "kernel",
    [kernels.rbf(0.05), kernels.laplace(0.1), kernels.nngp(), kernels.nngp(1, "erf", 1.5, 0.3)],
    ids=lambda kernel: f"{type(kernel).__name__}-{getattr(kernel, 'activation', '')}",
)
def test_random_features_converge(kernel):
    exact = KernelSSL(3, kernel=kernel).fit(X_A, X_b=X_B)
    errors = [
        np.mean(
            [
                error(
                    KernelSSL(3, kernel=kernel, method="features", n_features=width, random_state=s).fit(X_A, X_b=X_B),
                    exact,
                )
                for s in range(2)
            ]
        )
        for width in (40, 600)
    ]
    assert errors[1] < 0.5 * errors[0]  # a fifth is expected: the error falls with the root of the number
    assert errors[1] < 0.15


def test_more_landmarks_are_better_and_pivots_beat_chance():
    exact = KernelSSL(4).fit(X_A, X_b=X_B)
    errors = {
        how: [
            error(KernelSSL(4, method="nystroem", n_features=m, landmarks=how).fit(X_A, X_b=X_B), exact)
            for m in (15, 90)
        ]
        for how in CHOICES
    }
    assert all(many < 0.3 * few for few, many in errors.values())
    assert errors["pivoted"][1] < errors["uniform"][1]


@pytest.mark.parametrize("kinds", [1, 2], ids=["one kernel", "two modalities"])
@pytest.mark.parametrize("features", [3, 8])
def test_landmarks_in_float32_know_their_error(features, kinds):
    """Directions of landmarks that are small are kept, or counted in `precision`."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((3000, features)) * np.linspace(2, 0.3, features)
    a, b = (base + 0.3 * rng.standard_normal(base.shape) for _ in "ab")
    a, b = (x.astype(np.float32).astype(float) for x in (a, b))
    kernel = kernels.rbf(0.02)
    settings = {"kernel": kernel if kinds == 1 else (kernel, kernel), "method": "nystroem", "n_features": 150}
    double, single = (KernelSSL(10, dtype=dtype, **settings).fit(a, X_b=b) for dtype in ("float64", "float32"))
    assert error(single, double) < single.solution_.precision < 1e-2
    assert error(single, double) < 1e-4


def test_rounding_of_sums_is_no_mode():
    """Two features with a smooth kernel: k(landmarks, landmarks) has 38 directions in float64, the last ones noise."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((6000, 2)) * [2, 0.3]
    a, b = (base + 0.3 * rng.standard_normal(base.shape) for _ in "ab")
    settings = {"kernel": kernels.rbf(0.02), "method": "nystroem"}
    many, few = (KernelSSL(10, n_features=m, **settings).fit(a, X_b=b) for m in (300, 40))
    assert error(many, few) < 0.02  # 40 landmarks are almost all directions that there are
    assert not KernelSSL(20, n_features=300, **settings).fit(a, X_b=b).solution_.trusted


# --- one pass over batches


def batches(est, order, size=26):
    for start in order:
        est.partial_fit(X_A[start : start + size], X_b=X_B[start : start + size])
    return est


def test_batches_are_one_fit(tmp_path):
    """In any order, in parts that are merged, and after a stop."""
    settings = {"kernel": kernels.rbf(0.05), "method": "features", "n_features": 60}
    whole = KernelSSL(4, **settings).partial_fit(X_A, X_b=X_B)
    begun = KernelSSL(4, **settings).partial_fit(X_A[:26], X_b=X_B[:26])
    begun.save(tmp_path / "begun.npz")
    one, other = (KernelSSL.load(tmp_path / "begun.npz") for _ in range(2))
    batches(one, (26, 52))
    batches(other, (104, 78)).save(tmp_path / "other.npz")
    other, start = (KernelSSL.load(tmp_path / f"{name}.npz") for name in ("other", "begun"))
    merged = one.combine(other, start=start)  # the first batch, which both hold, counts once
    assert merged.pairs_ == 130
    np.testing.assert_allclose(
        merged.eigenvalues_, whole.eigenvalues_, rtol=1e-4
    )  # the mean of the first batch differs
    before = begun.eigenvalues_.copy()
    again = batches(begun, (26, 52, 78, 104))
    assert not np.allclose(before, again.eigenvalues_)
    np.testing.assert_allclose(merged.eigenvalues_, again.eigenvalues_, rtol=1e-12)
    spans_agree(merged.transform(X_A), again.transform(X_A))
    z_a, z_b = again.transform(X_A), again.transform(X_B)
    np.testing.assert_allclose((z_a.T @ z_b + z_b.T @ z_a) / 260, np.eye(4), atol=1e-8)


def test_no_pair_counts_twice(tmp_path):
    begun = KernelSSL(3, n_features=20).partial_fit(X_A[:30], X_b=X_B[:30])
    begun.save(tmp_path / "begun.npz")
    start, one, other = (KernelSSL.load(tmp_path / "begun.npz") for _ in range(3))
    one.partial_fit(X_A[30:60], X_b=X_B[30:60])
    other.partial_fit(X_A[60:], X_b=X_B[60:])
    for wrong in (lambda: one.combine(other), lambda: one.combine(one), lambda: one.combine(begun)):
        with pytest.raises(InputError, match=r"must not hold the same pairs.*start=KernelSSL\.load\(file\)"):
            wrong()
    with pytest.raises(InputError, match="start must hold only pairs that all estimators hold"):
        one.combine(other, start=one)
    with pytest.raises(InputError, match="must not hold the same pairs"):
        one.combine(other, other, start=start)
    assert one.pairs_ == 60  # a refusal changes nothing
    assert one.combine(other, start=start).pairs_ == 130
    with pytest.raises(InputError, match="must not hold the same pairs"):
        one.combine(other, start=start)
    whole = begun.partial_fit(X_A[30:], X_b=X_B[30:])
    np.testing.assert_allclose(one.eigenvalues_, whole.eigenvalues_, rtol=1e-10)


def test_linear_batches_are_gamma():
    est = batches(KernelSSL(3, kernel="linear"), range(0, 130, 26))
    corr = Correlation.from_pairs(X_A, X_B)
    np.testing.assert_allclose(est.eigenvalues_, corr.eigenvalues[:3], rtol=1e-12)


def test_memory_mapped_files_and_float32(tmp_path):
    for name, x in (("a", X_A), ("b", X_B)):
        np.save(tmp_path / f"{name}.npy", x.astype(np.float32))
    a, b = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab")
    settings = {"method": "nystroem", "n_features": 40}
    double = KernelSSL(3, **settings).fit(X_A, X_b=X_B)
    for device in (None, "cpu"):
        single = KernelSSL(3, dtype="float32", device=device, **settings).fit(a, X_b=b)
        np.testing.assert_allclose(single.eigenvalues_, double.eigenvalues_, rtol=1e-4)
        z = single.transform(a)
        assert isinstance(z, np.ndarray)
        np.testing.assert_allclose(np.abs(z), np.abs(double.transform(X_A)), atol=1e-2)
    tensors = KernelSSL(3, **settings).fit(torch.tensor(X_A), X_b=torch.tensor(X_B))
    np.testing.assert_allclose(tensors.eigenvalues_, double.eigenvalues_, rtol=1e-10)
    assert isinstance(tensors.transform(torch.tensor(X_A)), torch.Tensor)


@pytest.mark.parametrize("kernel", ["rbf", ("rbf", "linear")], ids=str)
def test_save_and_load_a_stream(tmp_path, kernel):
    est = KernelSSL(3, kernel=kernel, method="nystroem", n_features=30).fit(
        X_A, X_b=X_B[:, :5] if len(kernel) == 2 else X_B
    )
    est.save(tmp_path / "est.npz")
    back = KernelSSL.load(tmp_path / "est.npz")
    np.testing.assert_allclose(back.transform(X_A), est.transform(X_A), atol=1e-10)
    assert back.get_params()["n_features"] == 30
    if kernel == "rbf":  # goes on where it is told to
        back.set_params(device="cpu").partial_fit(X_A, X_b=X_B)
        assert isinstance(back.dual_coef_, torch.Tensor)
        est.partial_fit(X_A, X_b=X_B)
        start = KernelSSL.load(tmp_path / "est.npz")
        np.testing.assert_allclose(back.combine(est, start=start).eigenvalues_, est.eigenvalues_, rtol=1e-10)
        assert back.pairs_ == 390


# --- tiles


@pytest.mark.parametrize("memory", [2_000, 200_000, 1 << 30])
@pytest.mark.parametrize("shared", [True, False])
def test_tiles_of_all_shares_are_the_matrix(memory, shared):
    kernel = kernels.rbf(0.05)
    blocks = Blocks((X_A, X_B), (kernel, kernel), shared)
    tiles = list(layout(blocks, 9))
    assert sorted(tile for hand in dealt(tiles, 3) for tile in [hash(t) for t in hand]) == sorted(map(hash, tiles))
    v = np.random.default_rng(0).standard_normal((260, 3))
    shares = [TilePairs(blocks, memory=memory, share=i, shares=3) for i in range(3)]
    np.testing.assert_allclose(sum(pairs.matmul(v) for pairs in shares), blocks.matrix() @ v, atol=1e-12)
    assert all(pairs.stored == (memory > 100_000) for pairs in shares)
    areas = [sum(tile.area for tile in pairs.tiles) for pairs in shares]
    assert max(areas) < 1.2 * min(areas)


# --- the choice


def test_the_route_is_told_before_anything_starts():
    told = []
    est = KernelSSL(3, memory=200_000, n_features=30, progress=lambda *report: told.append(report))
    with pytest.warns(TheoryWarning, match=r"nystroem: tiles of K̃ of 260 points would take 2\d\d KiB.*approximate"):
        est.fit(X_A, X_b=X_B)
    assert told[0][2] == str(est.route_) == str(est.plan(X_A, X_B))
    assert told[-1][0] == told[-1][1]
    shares = [done / total for done, total, _ in told]
    assert shares == sorted(shares)
    assert KernelSSL(memory=300_000).plan(X_A, X_B).method == "exact"  # half of K̃ fits
    assert KernelSSL(memory=200_000, method="exact").fit(X_A, X_b=X_B).route_.method == "exact"
    assert KernelSSL(kernel="linear", memory=10_000).plan(X_A, X_B).method == "features"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KernelSSL(method="nystrom").fit(X_A), "method"),
        (lambda: KernelSSL(landmarks="best", method="nystroem").fit(X_A), "landmarks"),
        (lambda: KernelSSL(kernel="ntk", method="features").fit(X_A), 'no random features.*method="nystroem"'),
        (lambda: KernelSSL(method="exact").partial_fit(X_A), "method must not be exact"),
        (lambda: KernelSSL(kernel="precomputed").partial_fit(X_A), "method must not be exact"),
        (lambda: KernelSSL(30, method="nystroem", n_features=20).fit(X_A), "n_components must be at most 20"),
        (lambda: KernelSSL(2, method="nystroem").fit(X_A, X_b=X_B[:50]), "same number of rows"),
        (lambda: KernelSSL(2, method="nystroem").fit(X_A).transform(X_A[:, :3]), "features"),
        (lambda: KernelSSL(2).fit(X_A).combine(), "combine needs"),
        (lambda: KernelSSL(2).partial_fit(X_A).combine(KernelSSL(2).partial_fit(X_B)), "same landmarks"),
        (lambda: KernelSSL(2).partial_fit(X_A).transform_at(X_A, 1.0, init=X_A), "init needs the exact method"),
        (lambda: KernelSSL(2, method="nystroem").fit(np.where(X_A > 2, np.nan, X_A)), "finite"),
        (lambda: KernelSSL(2, device="gpu").fit(X_A), "device must be cpu, cuda"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_embeddings_of_streamed_points_are_not_kept():
    with pytest.raises(AttributeError, match="use transform"):
        _ = KernelSSL(2, method="nystroem").fit(X_A).embedding_


@pytest.mark.parametrize("kernel", ["linear", ("linear", kernels.linear())], ids=["one", "two"])
@pytest.mark.parametrize("method", ["nystroem", "features"])
def test_linear_kernels_are_exact_by_any_method(kernel, method):
    est = KernelSSL(3, kernel=kernel, method=method, n_features=5).fit(X_A, X_b=X_B)
    exact = KernelSSL(3, kernel=kernel, method="exact").fit(X_A, X_b=X_B)
    np.testing.assert_allclose(est.eigenvalues_, exact.eigenvalues_, rtol=1e-10)
    assert est.route_.method == method
    assert est.route_.reason.startswith(f"a linear kernel, so Γ of {8 if kernel == 'linear' else 16} features")


def test_two_modalities_have_no_tiles_between_them():
    both, one = ({"kernel": kernel, "memory": 200_000} for kernel in (("rbf", "rbf"), "rbf"))
    assert KernelSSL(**both).plan(X_A, X_B).method == "exact"  # 2 × 8 × 130 × 131 / 2 bytes
    assert KernelSSL(**one).plan(X_A, X_B).method == "nystroem"
    assert KernelSSL(kernel=("linear", "linear"), memory=10_000).plan(X_A, X_B).method == "features"


def test_unfitted_and_continued(tmp_path):
    for name in ("pairs_", "blocks_"):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(KernelSSL(), name)
    est = KernelSSL(2, n_features=20).partial_fit(X_A, X_b=X_B)
    est.save(tmp_path / "est.npz")
    back = KernelSSL.load(tmp_path / "est.npz")
    assert [str(one.route_) for one in (est, back)] == [
        "nystroem: pairs are added batch by batch",
        "nystroem: loaded from a file",
    ]
    x = torch.tensor(X_A)
    assert isinstance(back.partial_fit(x).transform(x), torch.Tensor)
    assert isinstance(back.partial_fit(X_A).transform(X_A), np.ndarray)


# --- several processes


def test_two_processes_are_one_until_one_is_lost(tmp_path, capfd):
    assert run_two(WORKER, str(tmp_path)) == [1, -9]
    assert "process 0 of 2 has lost another one, which has ended or does not answer" in capfd.readouterr().err
    assert float((tmp_path / "seconds").read_text()) < 30
    (tmp_path / "alone").mkdir()
    alone = in_processes.results(tmp_path / "alone")
    for rank in range(2):
        found = np.load(tmp_path / f"{rank}.npz")
        assert set(found) == set(alone)
        for name, expected in alone.items():
            off = 1e-6 if name.startswith("halves") else 1e-10  # sums in float32 depend on the shares
            np.testing.assert_allclose(found[name], expected, rtol=off, atol=off, err_msg=name)


def test_without_torch():
    """numpy users need no torch."""
    code = (
        "import sys, numpy as np, stairwise as sw; x = np.random.default_rng(0).standard_normal((40, 3));"
        "sw.KernelSSL(2, method='nystroem', n_features=9).fit(x).transform(x); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
