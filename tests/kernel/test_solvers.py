"""All solvers on all operators, and the cases that break naive formulas."""

import numpy as np
import pytest
import scipy.sparse.linalg

from stairwise.checks import InputError
from stairwise.kernel.arrays import cast
from stairwise.kernel.kernels import linear, ntk, rbf
from stairwise.kernel.operators import Blocks, DensePairs, FeaturePairs
from stairwise.kernel.solvers import SOLVERS, cholesky, krylov, solve
from stairwise.kernel.tiles import TilePairs

N, K = 80, 6


def views(n=N, m=30, seed=0, offset=0.0, decay=0.3):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n, m)) * np.exp(-decay * np.arange(m)) + offset
    return tuple(base + 0.2 * np.exp(-decay * np.arange(m)) * rng.standard_normal((n, m)) for _ in "ab")


def dense_oracle(matrix, k, swaps=True):
    """γ from the eigenvalues of P K̃ / N by a general dense solver."""
    n = len(matrix)
    swapped = np.roll(matrix, n // 2, axis=0) if swaps else matrix
    return np.sort(np.linalg.eigvals(swapped / n).real)[::-1][:k]


def operators(a, b, kernel=None):
    kernel = kernel or linear()
    blocks = Blocks((a, b), (kernel, kernel), shared=True)
    found = {"dense": DensePairs(blocks.matrix()), "tiled": TilePairs(blocks, memory=32 * 160 * 7)}
    if isinstance(kernel, linear):
        found["features"] = FeaturePairs(np.vstack([a, b]))
    return found


CASES = [
    (name, solver, kernel)
    for kernel in (linear(), rbf(0.3), ntk(2))
    for name in operators(*views(4, 3), kernel)
    for solver in SOLVERS
    if solver != "features" or name == "features"
]


@pytest.mark.parametrize(("name", "solver", "kernel"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_all_solvers_on_all_operators(name, solver, kernel):
    a, b = views()
    pairs = operators(a, b, kernel)[name]
    found = solve(pairs, K, solver)
    X = np.vstack([a, b])
    matrix = kernel(X, X)
    np.testing.assert_allclose(found.eigenvalues, dense_oracle(matrix, K), rtol=1e-9)
    arpack = scipy.sparse.linalg.eigs(np.roll(matrix, N, axis=0), K, which="LR")[0].real / len(X)
    np.testing.assert_allclose(found.eigenvalues, np.sort(arpack)[::-1], rtol=1e-9)
    gram = found.coefficients.T @ matrix @ found.coefficients
    np.testing.assert_allclose(gram, np.eye(K), atol=1e-8)
    assert found.trusted
    assert found.solver == solver


@pytest.mark.parametrize("solver", ["krylov", "cholesky"])
@pytest.mark.parametrize("case", ["duplicates", "same views", "singular", "condition 1e15", "mean offset"])
def test_hard_cases(solver, case):
    a, b = views(offset=100.0 if case == "mean offset" else 0.0)
    kernel = rbf(1e-4) if case == "condition 1e15" else linear()
    if case == "duplicates":
        a[40:], b[40:] = a[:40], b[:40]
    if case == "same views":
        b = a
    if case == "singular":
        a, b = a[:, :8], b[:, :8]
    X = np.vstack([a, b])
    matrix = kernel(X, X)
    if case == "condition 1e15":
        assert np.linalg.cond(matrix) > 1e14
    found = solve(DensePairs(matrix), K, solver)
    np.testing.assert_allclose(found.eigenvalues, dense_oracle(matrix, K), rtol=1e-6)
    z = np.roll(found.coefficients, N, axis=0) * len(X) * np.sqrt(found.eigenvalues)
    c = (z[:N].T @ z[N:] + z[N:].T @ z[:N]) / (2 * N)
    np.testing.assert_allclose(c, np.eye(K), atol=1e-7)


def steep(ratio):
    """Pairs whose K-th mode is `ratio` of the first."""
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.standard_normal((N, K)))
    x = q * np.sqrt(np.geomspace(1, ratio, K)) * N**0.5
    return x, x


def test_a_range_that_float64_carries():
    a, b = steep(4e-8)
    found = solve(DensePairs(np.vstack([a, b]) @ np.vstack([a, b]).T), K)
    np.testing.assert_allclose(found.eigenvalues, np.geomspace(1, 4e-8, K), rtol=1e-6)


@pytest.mark.parametrize("solver", ["krylov", "cholesky"])
def test_a_range_that_float32_cannot_carry(solver):
    a, b = steep(4e-8)
    matrix = cast(np.vstack([a, b]) @ np.vstack([a, b]).T, "float32")
    with pytest.raises(InputError, match=r'n_components must be at most [1-5].*dtype="float64"'):
        solve(DensePairs(matrix), K, solver)


@pytest.mark.parametrize("solver", ["krylov", "cholesky"])
def test_float32_kernel_with_float64_iteration(solver):
    a, b = steep(1e-3)
    matrix = cast(np.vstack([a, b]) @ np.vstack([a, b]).T, "float32")
    found = solve(DensePairs(matrix), K, solver)
    np.testing.assert_allclose(found.eigenvalues, np.geomspace(1, 1e-3, K), rtol=1e-3)


@pytest.mark.parametrize("solver", ["krylov", "cholesky"])
def test_indefinite_kernels_are_refused(solver):
    a, b = views()
    X = np.vstack([a, b])
    with pytest.raises(InputError, match="positive semidefinite"):
        solve(DensePairs(rbf(0.3)(X, X) - 0.5 * np.eye(2 * N)), K, solver)


def test_auto_policy():
    a, b = views()
    assert solve(operators(a, b)["features"], K).solver == "features"
    assert solve(operators(a, b)["dense"], K).solver == "cholesky"
    many = np.random.default_rng(0).standard_normal((700, 40))
    assert solve(DensePairs(many @ many.T), 5).solver == "krylov"
    assert solve(DensePairs(rbf(0.01)(many, many)), 100).solver == "cholesky"


def test_krylov_on_many_points_and_modes():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((900, 60)) * np.arange(1, 61) ** -0.7
    pairs = DensePairs(rbf(0.2)(x, x))
    fast, slow = krylov(pairs, 40), cholesky(pairs, 40)
    np.testing.assert_allclose(fast.eigenvalues, slow.eigenvalues, rtol=1e-9)
    assert fast.residual < 1e-7
    assert fast.products < 900


@pytest.mark.parametrize("k", [10, 25])
def test_steep_spectra_in_float64(k):
    """γ_k/γ_1 of 1e-4 to 1e-8 on 800 points: Krylov or, where it stalls, Cholesky; never wrong modes."""
    a, b = views(400, 2, decay=0.5)
    X = np.vstack([a, b])
    matrix = rbf(0.1)(X, X)
    found = solve(DensePairs(matrix), k)
    np.testing.assert_allclose(found.eigenvalues, cholesky(DensePairs(matrix), k).eigenvalues, rtol=1e-5)
    z = np.roll(found.coefficients, 400, axis=0) * 800 * np.sqrt(found.eigenvalues)
    np.testing.assert_allclose((z[:400].T @ z[400:] + z[400:].T @ z[:400]) / 800, np.eye(k), atol=1e-5)
    assert found.trusted


def test_multiple_eigenvalues_are_all_found():
    x = np.eye(10)[np.arange(700) % 10]
    blocks = Blocks((x, x[:, ::-1].copy()), (linear(), linear()), shared=False)
    np.testing.assert_allclose(krylov(DensePairs(blocks.matrix()), 10).eigenvalues, 0.05)
    np.testing.assert_allclose(krylov(DensePairs(np.eye(900)), 20).eigenvalues, 1 / 900)
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((700, 700)))
    spectrum = np.concatenate([np.full(15, 5.0), np.linspace(4, 0.01, 685)])
    found = krylov(DensePairs((q * spectrum) @ q.T, swaps=False), 20)
    np.testing.assert_allclose(found.eigenvalues * 700, spectrum[:20], rtol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_krylov_on_few_points(seed):
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(1, 11)), int(rng.integers(1, 5))
    a, b = views(n, m, seed)
    X = np.vstack([a, b])
    pairs = DensePairs(rbf(float(10 ** rng.uniform(-2, 1)))(X, X))
    exact = solve(pairs, min(5, 2 * n), "cholesky", at_most=True)
    found = krylov(pairs, len(exact.eigenvalues))
    np.testing.assert_allclose(found.eigenvalues, exact.eigenvalues, rtol=1e-10 + 1e3 * exact.precision)


def test_as_many_modes_as_there_are():
    a, b = views(m=5)
    pairs = operators(a, b)["dense"]
    for solver in ("krylov", "cholesky"):
        assert len(solve(pairs, 12, solver, at_most=True).eigenvalues) == 5
    with pytest.raises(InputError, match=r"must not vanish|positive semidefinite"):
        krylov(DensePairs(np.zeros((160, 160))), 3)


def test_bad_input():
    a, b = views()
    pairs = operators(a, b)["dense"]
    with pytest.raises(InputError, match="solver is unknown"):
        solve(pairs, 3, "arpack")
    with pytest.raises(InputError, match="n_components must be at most 160"):
        solve(pairs, 161)
    with pytest.raises(InputError, match="features needs explicit features"):
        solve(pairs, 3, "features")
    with pytest.raises(InputError, match=r"must not vanish|positive semidefinite"):
        solve(DensePairs(np.zeros((160, 160))), 3)


def test_sizes_that_cannot_fit(monkeypatch):
    monkeypatch.setattr("stairwise.kernel.solvers.MOST_DENSE", 100)
    a, b = views()
    with pytest.raises(InputError, match=r'cholesky takes .* GiB for 160 points.*solver="krylov"'):
        solve(operators(a, b)["dense"], 3, "cholesky")
