"""Γ by every route is the same Γ."""

import numpy as np
import pytest
import scipy.sparse.linalg

from stairwise.checks import InputError
from stairwise.theory import correlation
from stairwise.theory.correlation import Correlation
from stairwise.theory.krylov import top_eigenpairs


def pairs(n, m, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n, m)) * np.linspace(2, 0.1, m) + 0.3
    return tuple((base + 0.5 * rng.standard_normal((n, m))).astype(dtype) for _ in "ab")


def by_definition(x_a, x_b):
    a, b = x_a.astype(float), x_b.astype(float)
    return sum(np.outer(p, q) + np.outer(q, p) for p, q in zip(a, b, strict=True)) / (2 * len(a))


SHAPES = [(40, 7), (4, 30), (15, 30), (1, 5)]


@pytest.mark.parametrize(("n", "m"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int16])
def test_matrix_is_the_definition(n, m, dtype):
    x_a, x_b = pairs(n, m, dtype=dtype)
    np.testing.assert_allclose(Correlation.from_pairs(x_a, x_b).matrix, by_definition(x_a, x_b), atol=1e-12)


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_eigenpairs(n, m):
    x_a, x_b = pairs(n, m)
    corr, dense = Correlation.from_pairs(x_a, x_b), by_definition(x_a, x_b)
    values, vectors = corr.eigenvalues, corr.eigenvectors
    assert len(values) == corr.rank_bound == min(m, 2 * n)
    assert (np.diff(values) <= 0).all()
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(len(values)), atol=1e-12)
    np.testing.assert_allclose((vectors * values) @ vectors.T, dense, atol=1e-11)


def test_streaming_and_merging_equal_the_whole():
    x_a, x_b = pairs(50, 20)
    whole = Correlation.from_pairs(x_a, x_b)
    streamed = Correlation()
    for start in range(0, 50, 7):
        assert streamed.update(x_a[start : start + 7], x_b[start : start + 7]) is streamed
    for cut in (3, 12, 45):
        merged = Correlation.from_pairs(x_a[:cut], x_b[:cut]) + Correlation.from_pairs(x_a[cut:], x_b[cut:])
        np.testing.assert_allclose(merged.matrix, whole.matrix, atol=1e-12)
    np.testing.assert_allclose(streamed.matrix, whole.matrix, atol=1e-12)
    assert streamed.pairs == whole.pairs == 50
    np.testing.assert_allclose((Correlation() + whole).matrix, whole.matrix)


def test_adding_changes_neither_part():
    x_a, x_b = pairs(50, 20)
    first, second = Correlation.from_pairs(x_a[:30], x_b[:30]), Correlation.from_pairs(x_a[30:], x_b[30:])
    before = first.matrix.copy(), second.matrix.copy()
    (first + second).update(x_a, x_b)
    np.testing.assert_array_equal(first.matrix, before[0])
    np.testing.assert_array_equal(second.matrix, before[1])


def test_update_forgets_the_old_decomposition():
    x_a, x_b = pairs(50, 20)
    corr = Correlation.from_pairs(x_a[:30], x_b[:30])
    stale = corr.eigenvalues.copy()
    corr.update(x_a[30:], x_b[30:])
    assert not np.allclose(corr.eigenvalues, stale)
    np.testing.assert_allclose(corr.eigenvalues, Correlation.from_pairs(x_a, x_b).eigenvalues, atol=1e-12)


def test_held_pairs_are_copies():
    x_a, x_b = pairs(4, 30)
    corr = Correlation.from_pairs(x_a, x_b)
    expected = by_definition(x_a, x_b)
    x_a[:] = 0
    np.testing.assert_allclose(corr.matrix, expected, atol=1e-12)


@pytest.mark.parametrize(("n", "m"), [(300, 120), (40, 300)])
def test_matrix_free_top_equals_arpack(monkeypatch, n, m):
    monkeypatch.setattr(correlation, "DENSE_LIMIT", 10)
    x_a, x_b = pairs(n, m)
    corr = Correlation.from_pairs(x_a, x_b)
    values, vectors = corr.top(6)
    assert "_decomposition" not in corr.__dict__  # truly matrix-free
    expected = scipy.sparse.linalg.eigsh(by_definition(x_a, x_b), 6, which="LA")[0][::-1]
    np.testing.assert_allclose(values, expected, rtol=1e-9)
    np.testing.assert_allclose(corr.product(vectors), vectors * values, atol=1e-8)


def test_krylov_with_clustered_and_negative_eigenvalues():
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.standard_normal((200, 200)))
    spectrum = np.concatenate([[5, 5, 5, 4.999, 1], np.linspace(0.5, -9, 195)])
    a = (q * spectrum) @ q.T
    values, vectors = top_eigenpairs(lambda x: a @ x, 200, 5)
    np.testing.assert_allclose(values, spectrum[:5], atol=1e-8)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(5), atol=1e-10)


def test_krylov_says_when_it_fails():
    a = np.diag(np.linspace(1, 2, 500))
    with pytest.raises(RuntimeError, match="did not converge in 2 passes"):
        top_eigenpairs(lambda x: a @ x, 500, 3, passes=2)


def test_memory_mapped_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(correlation, "DENSE_LIMIT", 10)
    monkeypatch.setattr(correlation, "MATRIX_LIMIT", 20)
    monkeypatch.setattr("stairwise.checks.BLOCK_BYTES", 8 * 30 * 7)  # several blocks
    x_a, x_b = pairs(60, 30, dtype=np.float32)
    np.save(tmp_path / "a.npy", x_a)
    np.save(tmp_path / "b.npy", x_b)
    mapped = Correlation.from_pairs(*(np.load(tmp_path / f"{v}.npy", mmap_mode="r") for v in "ab"))
    assert mapped._sum is None  # stayed on disk
    np.testing.assert_allclose(mapped.top(3)[0], np.linalg.eigvalsh(by_definition(x_a, x_b))[::-1][:3], rtol=1e-9)
    np.testing.assert_allclose(mapped.matrix, by_definition(x_a, x_b), atol=1e-10)


def test_copy_on_write_maps_keep_their_changes(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.ones((30, 4)))
    changed = np.load(tmp_path / "a.npy", mmap_mode="c")
    changed[:] = 5
    assert Correlation.from_pairs(changed, np.full((30, 4), 5.0)).matrix[0, 0] == 25
    assert (changed == 5).all()


def test_large_pairs_on_disk_are_never_folded(tmp_path, monkeypatch):
    monkeypatch.setattr(correlation, "MATRIX_LIMIT", 20)
    x_a, x_b = pairs(60, 30)
    np.save(tmp_path / "a.npy", x_a)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    half = Correlation.from_pairs(mapped, x_b)
    assert half._sum is None
    both = half + half
    assert both._sum is None
    np.testing.assert_allclose(both.matrix, by_definition(x_a, x_b), atol=1e-12)


def test_results_cannot_be_changed_from_outside():
    corr = Correlation.from_pairs(*pairs(50, 20))
    for array in (corr.eigenvalues, corr.eigenvectors, corr.matrix):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_from_matrix():
    corr = Correlation.from_matrix([3.0, -1.0, 2.0])
    np.testing.assert_allclose(corr.eigenvalues, [3, 2, -1])
    weighted = Correlation.from_matrix(np.eye(2), pairs=3) + Correlation.from_matrix(3 * np.eye(2), pairs=1)
    np.testing.assert_allclose(weighted.matrix, 1.5 * np.eye(2))


def test_two_orthogonal_modalities_come_in_signed_pairs():
    """x in the first features, x' in the others: eigenvalues are ± singular values of XᵀX'/2n (errata B)."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 4)), rng.standard_normal((30, 3))
    x_a, x_b = np.hstack([x, np.zeros((30, 3))]), np.hstack([np.zeros((30, 4)), y])
    s = np.linalg.svd(x.T @ y / 60, compute_uv=False)
    np.testing.assert_allclose(Correlation.from_pairs(x_a, x_b).eigenvalues, [*s, 0, *-s[::-1]], atol=1e-12)


GOOD = np.ones((3, 4))


@pytest.mark.parametrize(
    ("x_a", "x_b", "words"),
    [
        (GOOD, np.ones((3, 5)), r"x_a and x_b must have the same shape \(got \(3, 4\) and \(3, 5\)\)"),
        (np.array([[1.0, np.nan]]), np.ones((1, 2)), r"x_a\[0, 1\] must be finite \(got nan\)"),
        (GOOD, np.where(np.eye(3, 4) > 0, np.inf, 1.0), r"x_b\[0, 0\] must be finite \(got inf\)"),
        (np.ones((0, 4)), np.ones((0, 4)), "x_a must not be empty"),
        (np.ones(4), np.ones(4), "x_a must be 2-D"),
        (np.array([[object()]]), GOOD, "x_a must hold real numbers"),
        (GOOD + 1j, GOOD, "x_a must hold real numbers"),
        ([[1.0], [1.0, 2.0]], GOOD, "x_a must be a rectangular array"),
    ],
)
def test_bad_pairs(x_a, x_b, words):
    with pytest.raises(InputError, match=words):
        Correlation.from_pairs(x_a, x_b)


def test_bad_use():
    with pytest.raises(InputError, match="at least one pair"):
        _ = Correlation().eigenvalues
    corr = Correlation.from_pairs(GOOD, GOOD)
    with pytest.raises(InputError, match="must have 4 features"):
        corr.update(np.ones((2, 5)), np.ones((2, 5)))
    assert corr.pairs == 3
    with pytest.raises(InputError, match="x must have 4 rows"):
        corr.product(np.ones((3, 1)))
    with pytest.raises(InputError, match="must not be masked"):
        Correlation.from_pairs(np.ma.masked_equal(GOOD, 1), GOOD)
    with pytest.raises(InputError, match="k must be at most 4"):
        corr.top(5)
    with pytest.raises(InputError, match="W0 must have 4 columns"):
        corr.project(np.ones((2, 3)))
    with pytest.raises(InputError, match="symmetric"):
        Correlation.from_matrix([[1.0, 2.0], [0.0, 1.0]])
    with pytest.raises(InputError, match="same features"):
        corr + Correlation.from_matrix(np.eye(3))
