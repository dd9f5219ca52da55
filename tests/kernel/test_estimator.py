"""KernelSSL: scikit-learn's contract, the theory, time, two modalities, torch."""

import warnings

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import KernelPCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from stairwise.checks import InputError
from stairwise.dynamics.flow import gradient_flow
from stairwise.kernel import kernels, operators, tiles
from stairwise.kernel.estimator import KernelSSL
from stairwise.theory.correlation import Correlation
from stairwise.theory.solutions import top_spectral_weights


def views(n=60, m=8, noise=0.3, seed=0, offset=0.0):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n, m)) * np.linspace(2, 0.3, m) + offset
    return tuple(base + noise * rng.standard_normal((n, m)) for _ in "ab")


X_A, X_B = views()
NEW = views(20, seed=1)[0]


def cross_correlation(z_a, z_b):
    return (z_a.T @ z_b + z_b.T @ z_a) / (2 * len(z_a))


@parametrize_with_checks([KernelSSL(n_components=2), KernelSSL(n_components=1, kernel="linear")])
def test_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        check(estimator)


# --- the theory


@pytest.mark.parametrize("solver", ["auto", "krylov", "cholesky", "features"])
def test_linear_kernel_is_the_explicit_theory(solver):
    est = KernelSSL(4, kernel="linear", solver=solver).fit(X_A, X_b=X_B)
    corr = Correlation.from_pairs(X_A, X_B)
    np.testing.assert_allclose(est.eigenvalues_, corr.eigenvalues[:4], rtol=1e-10)
    explicit = NEW @ top_spectral_weights(corr, 4).T
    z = est.transform(NEW)
    np.testing.assert_allclose(np.abs(z), np.abs(explicit), atol=1e-8)  # distinct γ: signs are the only freedom
    np.testing.assert_allclose(z @ z.T, explicit @ explicit.T, atol=1e-8)


ALL_KERNELS = ["linear", "rbf", "polynomial", "laplace", "nngp", "ntk", kernels.ntk(depth=3, activation="erf")]


@pytest.mark.parametrize("kernel", ALL_KERNELS, ids=str)
def test_zero_loss_and_free_embeddings(kernel):
    est = KernelSSL(5, kernel=kernel).fit(X_A, X_b=X_B)
    z_a, z_b = est.transform(X_A), est.transform(X_B)
    np.testing.assert_allclose(cross_correlation(z_a, z_b), np.eye(5), atol=1e-8)
    np.testing.assert_allclose(est.embedding_, np.vstack([z_a, z_b]), atol=1e-8)
    np.testing.assert_allclose(est.rkhs_norms_**-2, est.eigenvalues_)
    np.testing.assert_allclose(est.learned_kernel(NEW), est.transform(NEW) @ est.transform(NEW).T)
    K = est.kernel_(np.vstack([X_A, X_B]), np.vstack([X_A, X_B]))
    weights = est.dual_coef_ / np.sqrt(est.eigenvalues_)
    np.testing.assert_allclose(np.diag(weights.T @ K @ weights), est.rkhs_norms_**2, rtol=1e-8)


def test_the_papers_formula():
    """Literal K_Γ = K̃^{-1/2} Z K̃^{-1/2} and Eq. 24, corrected (errata A9, A10), as an oracle."""
    est = KernelSSL(4, kernel="rbf").fit(X_A, X_b=X_B)
    X = np.vstack([X_A, X_B])
    n, K = len(X_A), est.kernel_(X, X)
    aa, ab, bb = K[:n, :n], K[:n, n:], K[n:, n:]
    Z = np.block([[ab @ aa, ab @ ab], [bb @ aa, bb @ ab]]) / (2 * n)
    Z = Z + Z.T
    w, v = np.linalg.eigh(K)
    root = (v / np.sqrt(w)) @ v.T
    gamma, b = np.linalg.eigh(root @ Z @ root)
    gamma, b = gamma[::-1][:4], b[:, ::-1][:, :4]
    np.testing.assert_allclose(est.eigenvalues_, gamma, rtol=1e-9)
    literal = est.kernel_(NEW, X) @ root @ b / np.sqrt(gamma)
    np.testing.assert_allclose(np.abs(est.transform(NEW)), np.abs(literal), atol=1e-7)


def test_same_views_are_kernel_pca():
    """Errata A11: γ = eigenvalues of K̃/2n, which are those of K/n."""
    est = KernelSSL(3, kernel=kernels.rbf(0.1)).fit(X_A)
    twice = KernelSSL(3, kernel=kernels.rbf(0.1)).fit(X_A, X_b=X_A)
    K = kernels.rbf(0.1)(X_A, X_A)
    np.testing.assert_allclose(est.eigenvalues_, np.linalg.eigvalsh(K / len(K))[::-1][:3], rtol=1e-10)
    np.testing.assert_allclose(twice.eigenvalues_, est.eigenvalues_, rtol=1e-9)
    np.testing.assert_allclose(np.abs(est.transform(NEW)), np.abs(twice.transform(NEW)), atol=1e-8)
    centred = X_A - X_A.mean(0)
    pca = KernelPCA(3, kernel="linear").fit_transform(centred)
    ours = KernelSSL(3, kernel="linear").fit_transform(centred)
    cosines = np.abs((pca * ours).sum(0)) / np.linalg.norm(pca, axis=0) / np.linalg.norm(ours, axis=0)
    np.testing.assert_allclose(cosines, 1, atol=1e-9)


def test_precomputed_equals_callable():
    X = np.vstack([X_A, X_B])
    kernel = kernels.rbf(0.2)
    named = KernelSSL(4, kernel=kernel).fit(X_A, X_b=X_B)
    called = KernelSSL(4, kernel=lambda x, y: kernel(x, y)).fit(X_A, X_b=X_B)
    computed = KernelSSL(4, kernel="precomputed").fit(kernel(X, X))
    np.testing.assert_allclose(called.transform(NEW), named.transform(NEW), atol=1e-12)
    np.testing.assert_allclose(computed.transform(kernel(NEW, X)), named.transform(NEW), atol=1e-7)


@pytest.mark.parametrize("memory", [1, 10_000, 1 << 30])
def test_tiles_change_nothing(memory):
    whole = KernelSSL(3, solver="krylov").fit(X_A, X_b=X_B)
    tiled = KernelSSL(3, solver="krylov", memory=memory).fit(X_A, X_b=X_B)
    np.testing.assert_allclose(tiled.transform(NEW), whole.transform(NEW), atol=1e-9)


# --- time


@pytest.mark.parametrize("alpha", [1e-4, 1e-6])
def test_spectrum_over_time_is_that_of_gradient_flow(alpha):
    """The same kernel machine, trained in explicit features (those of a quadratic kernel)."""
    a, b = views(40, 3)
    est = KernelSSL(4, kernel=kernels.polynomial(2, gamma=1.0, coef0=1.0)).fit(a, X_b=b)

    def features(x):  # (x·y + 1)² = φ(x)·φ(y)
        i, j = np.triu_indices(3)
        cross = np.where(i == j, 1.0, 2**0.5) * x[:, i] * x[:, j]
        return np.hstack([np.ones((len(x), 1)), 2**0.5 * x, cross])

    corr = Correlation.from_pairs(features(a), features(b))
    W0 = alpha * np.random.default_rng(3).standard_normal((4, corr.features))
    init = np.vstack([features(a), features(b)]) @ W0.T
    t = np.linspace(0, 1.3 * est.step_times(alpha, 0.95)[0, -1], 200)
    flow = gradient_flow(W0, corr, t, weights=True)
    np.testing.assert_allclose(est.spectrum_at(t, init=init), flow.eigenvalues, atol=0.01)
    z = est.transform_at(a, t, init=init)
    z_b = est.transform_at(b, t, init=init)
    c = np.stack([cross_correlation(p, q) for p, q in zip(z, z_b, strict=True)])
    np.testing.assert_allclose(np.linalg.eigvalsh(c)[:, ::-1], flow.eigenvalues, atol=0.01)
    trained = features(a) @ flow.weights[100].T
    assert np.abs(z[100] - trained).max() < 0.1 * np.abs(trained).max()


@pytest.mark.parametrize("law", ["logistic", "aligned"])
def test_ends_where_fit_says(law):
    est = KernelSSL(3).fit(X_A, X_b=X_B)
    late = est.transform_at(NEW, np.inf, alpha=1e-5, law=law)
    z = est.transform(NEW)
    np.testing.assert_allclose(late @ late.T, z @ z.T, atol=1e-5)
    assert est.transform_at(NEW, [[0.0, 1.0]], alpha=1e-5).shape == (1, 2, 20, 3)
    assert np.abs(est.transform_at(NEW, 0.0, alpha=1e-5)).max() < 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"solver": "krylov"},
        {"solver": "krylov", "dtype": "float32"},
        {"solver": "krylov", "memory": 50_000},
        {"solver": "cholesky"},
        {"kernel": "linear"},
        {"method": "nystroem", "n_features": 60},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_fit_finds_the_modes_of_the_dynamics_too(settings, tmp_path, monkeypatch):
    """K̃ is not multiplied, nor Γ diagonalized, again after the fit; also not after loading an exact model."""
    a, b = views(150)
    est = KernelSSL(3, **settings).fit(a, X_b=b)
    exact = est._model.modes(23, at_most=True).eigenvalues
    est.save(tmp_path / "model.npz")
    loaded = [] if settings.get("method") == "nystroem" else [KernelSSL.load(tmp_path / "model.npz")]

    def refuse(*_):
        raise AssertionError("solved again")

    for place in (operators.DensePairs, operators.FeaturePairs, tiles.TilePairs):
        monkeypatch.setattr(place, "matmul", refuse)
    monkeypatch.setattr(Correlation, "top", refuse)
    for one in (est, *loaded):
        assert one.step_times(1e-5).shape == (3, 3)
        assert one.spectrum_at([1.0], alpha=1e-5).shape == (1, 3)
        assert one.transform_at(NEW, 1.0, alpha=1e-5).shape == (20, 3)
        found = one._modes().eigenvalues
        assert len(found) == len(exact) >= 8
        np.testing.assert_allclose(found, exact, rtol=1e-5)
        np.testing.assert_array_equal(found[:3], one.eigenvalues_)


def test_step_times():
    est = KernelSSL(3).fit(X_A, X_b=X_B)
    low, middle, high = est.step_times(1e-5)
    assert (np.diff(middle) > 0).all()
    assert ((low < middle) & (middle < high)).all()


# --- two modalities


def test_two_modalities():
    """K_XX' = 0: the explicit theory in orthogonal feature spaces (errata B)."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((80, 2))
    a = np.hstack([hidden, rng.standard_normal((80, 3))]) @ rng.standard_normal((5, 5))
    b = np.hstack([hidden, rng.standard_normal((80, 1))]) @ rng.standard_normal((3, 3))
    est = KernelSSL(2, kernel=("linear", "linear")).fit(a, X_b=b)
    s = np.linalg.svd(a.T @ b / 160, compute_uv=False)
    np.testing.assert_allclose(est.eigenvalues_, s[:2], rtol=1e-9)
    z_a, z_b = est.transform(a, view="a"), est.transform(b, view="b")
    np.testing.assert_allclose(cross_correlation(z_a, z_b), np.eye(2), atol=1e-8)
    np.testing.assert_allclose(est.learned_kernel(a, b, view_y="b"), z_a @ z_b.T)
    with pytest.raises(InputError, match="n_components must be at most 3"):
        KernelSSL(4, kernel=("linear", "linear")).fit(a, X_b=b)
    with pytest.raises(InputError, match="must have 3 features for view b"):
        est.transform(a, view="b")
    with pytest.raises(InputError, match="view is unknown"):
        est.transform(a, view="c")


def test_halves_of_digits_find_one_another():
    images = load_digits().images / 16
    left, right = images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)
    est = KernelSSL(16, kernel=("rbf", "laplace")).fit(left[:1000], X_b=right[:1000])
    z_a, z_b = est.transform(left[1000:1200], view="a"), est.transform(right[1000:1200], view="b")
    z_a, z_b = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_a, z_b))
    rank = ((z_a @ z_b.T) > (z_a * z_b).sum(1)[:, None]).sum(1)
    assert (rank < 10).mean() > 0.35  # chance: 0.05


# --- the contract beyond scikit-learn's checks


def test_clone_and_params():
    est = KernelSSL(3, kernel=kernels.rbf(0.5), solver="krylov")
    assert clone(est).get_params() == est.get_params()
    assert est.set_params(n_components=4).n_components == 4


def test_pandas_in_and_out():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X_A, columns=list("abcdefgh"))
    est = KernelSSL(2).set_output(transform="pandas").fit(frame, X_b=X_B)
    assert list(est.transform(frame).columns) == ["kernelssl0", "kernelssl1"]
    with pytest.raises(ValueError, match="feature names"):
        est.transform(frame[list("hgfedcba")])


def test_names_out():
    est = KernelSSL(3).fit(X_A, X_b=X_B)
    assert est.get_feature_names_out().tolist() == ["kernelssl0", "kernelssl1", "kernelssl2"]


def test_pipeline_scales_both_views():
    scaler = StandardScaler().fit(X_A)
    by_hand = KernelSSL(3).fit(scaler.transform(X_A), X_b=scaler.transform(X_B)).transform(scaler.transform(NEW))
    with sklearn.config_context(enable_metadata_routing=True):
        steps = [("scale", StandardScaler()), ("ssl", KernelSSL(3).set_fit_request(X_b=True))]
        pipe = Pipeline(steps, transform_input=["X_b"]).fit(X_A, X_b=X_B)
        np.testing.assert_allclose(pipe.transform(NEW), by_hand, atol=1e-10)
    assert make_pipeline(StandardScaler(), KernelSSL(2)).fit_transform(X_A).shape == (60, 2)


@pytest.mark.parametrize("kernel", ["rbf", ("rbf", kernels.laplace(0.3))], ids=str)
def test_save_and_load(tmp_path, kernel):
    est = KernelSSL(3, kernel=kernel).fit(X_A, X_b=X_B)
    est.save(tmp_path / "est.npz")
    back = KernelSSL.load(tmp_path / "est.npz")
    np.testing.assert_array_equal(back.transform(NEW), est.transform(NEW))
    np.testing.assert_allclose(back.embedding_, est.embedding_)
    np.testing.assert_allclose(back.transform_at(NEW, 1.0, alpha=1e-3), est.transform_at(NEW, 1.0, alpha=1e-3))
    with pytest.raises(InputError, match="to be saved"):
        KernelSSL(2, kernel=lambda x, y: x @ y.T).fit(X_A).save(tmp_path / "no.npz")
    assert not (tmp_path / "no.npz").exists()


def test_save_takes_numpy_numbers_and_load_refuses_strangers(tmp_path):
    est = KernelSSL(np.int64(2), kernel=kernels.polynomial(np.int64(2), np.float32(0.5))).fit(X_A, X_b=X_B)
    est.save(tmp_path / "est.npz")
    assert KernelSSL.load(tmp_path / "est.npz").kernel_ == kernels.polynomial(2, 0.5)
    for facts in ('{"format": 99}', "not json", "{}"):
        np.savez(tmp_path / "other.npz", facts=np.array(facts))
        with pytest.raises(InputError, match=r"must (be a file written by KernelSSL|.*format must be 1)"):
            KernelSSL.load(tmp_path / "other.npz")


def test_precomputed_knows_the_way_too(tmp_path):
    X = np.vstack([X_A, X_B])
    K = kernels.rbf(0.2)(X, X)
    named, computed = KernelSSL(3, kernel=kernels.rbf(0.2)).fit(X_A, X_b=X_B), KernelSSL(3, kernel="precomputed").fit(K)
    init = 1e-3 * np.random.default_rng(0).standard_normal((120, 3))
    t = [0.0, 1.0, 5.0]
    np.testing.assert_allclose(
        computed.spectrum_at(t, init=init), named.spectrum_at(t, init=init), rtol=1e-6, atol=1e-12
    )
    computed.save(tmp_path / "est.npz")
    back = KernelSSL.load(tmp_path / "est.npz")
    np.testing.assert_allclose(back.transform_at(K[:4], 1.0, alpha=1e-3), computed.transform_at(K[:4], 1.0, alpha=1e-3))


def test_rows_of_a_precomputed_kernel_cannot_be_left_out():
    """Cross-validation would break the pairs without a word."""
    K = kernels.rbf(0.2)(np.vstack([X_A, X_B]), np.vstack([X_A, X_B]))
    assert not KernelSSL(kernel="precomputed").__sklearn_tags__().input_tags.pairwise
    with pytest.raises(InputError, match="square"):
        KernelSSL(2, kernel="precomputed").fit(K[10:])


def test_a_network_as_initial_function():
    est = KernelSSL(2).fit(X_A, X_b=X_B)
    W = 1e-3 * np.random.default_rng(0).standard_normal((8, 2))
    by_call = est.transform_at(NEW, [1.0, 9.0], init=lambda x: np.tanh(x @ W))
    by_value = est.transform_at(NEW, [1.0, 9.0], init=np.tanh(np.vstack([X_A, X_B]) @ W))
    np.testing.assert_array_equal(by_call, by_value)


def test_all_modes_carry_the_start():
    """With every mode kept, C at t = 0 is that of the initial function, for an estimator of fewer components."""
    a, b = views(40, 6)
    est = KernelSSL(2, kernel="linear").fit(a, X_b=b)
    W0 = 0.05 * np.random.default_rng(0).standard_normal((2, 6))
    np.testing.assert_allclose(
        est.transform_at(NEW[:, :6], 0.0, init=np.vstack([a, b]) @ W0.T), NEW[:, :6] @ W0.T, atol=1e-9
    )


def test_strips_change_nothing_in_transform():
    whole, tiny = (
        KernelSSL(3, solver="cholesky").fit(X_A, X_b=X_B),
        KernelSSL(3, solver="cholesky", memory=1).fit(X_A, X_b=X_B),
    )
    np.testing.assert_allclose(tiny.transform(NEW), whole.transform(NEW), atol=1e-12)


def test_float32():
    double = KernelSSL(3).fit(X_A, X_b=X_B)
    single = KernelSSL(3, dtype="float32").fit(X_A, X_b=X_B)
    np.testing.assert_allclose(single.eigenvalues_, double.eigenvalues_, rtol=1e-4)


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    expected = KernelSSL(3, solver="krylov").fit(X_A, X_b=X_B)
    for solver in ("krylov", "cholesky"):
        est = KernelSSL(3, solver=solver).fit(torch.tensor(X_A), X_b=torch.tensor(X_B))
        z = est.transform(torch.tensor(NEW))
        assert isinstance(z, torch.Tensor)
        np.testing.assert_allclose(z.numpy(), expected.transform(NEW), atol=1e-7)
    moving = est.transform_at(torch.tensor(NEW), [0.5, 2.0], alpha=1e-3)
    np.testing.assert_allclose(moving.numpy(), expected.transform_at(NEW, [0.5, 2.0], alpha=1e-3), atol=1e-6)
    np.testing.assert_allclose(est.transform(NEW).numpy(), z.numpy())  # to the kind it was fitted with
    np.testing.assert_allclose(expected.transform(torch.tensor(NEW)), z.numpy(), atol=1e-7)
    linear = KernelSSL(3, kernel="linear").fit(torch.tensor(X_A), X_b=torch.tensor(X_B))
    assert linear.solution_.solver == "features"
    assert isinstance(linear.embedding_, torch.Tensor)


K_GOOD = kernels.rbf(0.2)(np.vstack([X_A, X_B]), np.vstack([X_A, X_B]))
NAN = np.where(np.eye(60, 8) > 0, np.nan, X_A)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KernelSSL(kernel="precomputed").fit(K_GOOD + np.triu(np.ones_like(K_GOOD))), "symmetric"),
        (lambda: KernelSSL(kernel="precomputed").fit(K_GOOD - 0.5 * np.eye(120)), "positive semidefinite"),
        (lambda: KernelSSL(kernel="precomputed").fit(K_GOOD[:5]), "square"),
        (lambda: KernelSSL(kernel="precomputed").fit(K_GOOD[:5, :5]), "even number of rows"),
        (lambda: KernelSSL(kernel="precomputed").fit(K_GOOD, X_b=X_B), "X_b must be None"),
        (lambda: KernelSSL().fit(X_A, X_b=X_B[:50]), "same number of rows .*60 and 50"),
        (lambda: KernelSSL().fit(X_A, X_b=X_B[:, :5]), "same number of features"),
        (lambda: KernelSSL().fit(X_A, X_b=NAN), "finite"),
        (lambda: KernelSSL().fit(X_A, X_b=X_B[:0]), "must not be empty"),
        (lambda: KernelSSL(20, kernel="linear").fit(X_A, X_b=X_B), "n_components must be at most 8"),
        (lambda: KernelSSL(121).fit(X_A, X_b=X_B), "n_components must be at most 120"),
        (lambda: KernelSSL().fit(X_A, X_B), "y is ignored, and must not be a second view .* give it as X_b="),
        (lambda: KernelSSL().fit_transform(X_A, X_B), "give it as X_b="),
        (lambda: KernelSSL().fit(X_A.tolist(), X_B.tolist()), "give it as X_b="),
        (lambda: KernelSSL().partial_fit(X_A, X_B), "give it as X_b="),
        (lambda: KernelSSL(2, kernel="linear").fit(X_A, X_b=-X_A), "views must have something in common"),
        (
            lambda: KernelSSL(2, kernel="linear", method="nystroem").fit(X_A, X_b=-X_A),
            "views must have something in common",
        ),
        (lambda: KernelSSL(kernel=lambda x, y: x @ y.T * np.nan).fit(X_A), "must return finite numbers"),
        (lambda: KernelSSL(kernel="rfb").fit(X_A), "kernel"),
        (lambda: KernelSSL(kernel=kernels.ntk(activation="gelu")).fit(X_A), "activation is unknown .*relu, erf"),
        (lambda: KernelSSL(kernel=lambda x, y: x).fit(X_A), "must return a matrix of shape"),
        (lambda: KernelSSL(kernel=lambda x, y: x @ y.T * np.inf).fit(X_A), "must return finite numbers"),
        (lambda: KernelSSL(kernel=("rbf",)).fit(X_A, X_b=X_B), "needs two kernels"),
        (lambda: KernelSSL(kernel=("rbf", "rbf")).fit(X_A), "needs two kernels and X_b"),
        (lambda: KernelSSL(2).fit(X_A).transform_at(NEW, 1.0), "alpha or init"),
        (lambda: KernelSSL(2).fit(X_A).transform_at(NEW, -1.0, alpha=1e-3), "t must be nonnegative"),
        (lambda: KernelSSL(2).fit(X_A).transform_at(NEW, 1.0, init=np.ones((3, 2))), r"init must have shape \(60, 2\)"),
        (lambda: KernelSSL(2).fit(X_A).transform_at(NEW, 1.0, alpha=1e3), "alpha must start .* below 1"),
        (lambda: KernelSSL(kernel=kernels.rbf).fit(X_A), "must be a name, an object"),
        (lambda: KernelSSL(kernel=lambda x, y: (x @ y.T).astype("f4")).fit(X_A), 'use dtype="float32"'),
        (lambda: KernelSSL(1, kernel="linear", solver="krylov").fit(np.zeros((5, 2))), "must not vanish"),
        (lambda: KernelSSL(2).fit(X_A).transform_at(NEW, 1.0, alpha=1e-3, law="magic"), "law is unknown"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words), np.errstate(invalid="ignore", over="ignore"):
        make()


@pytest.mark.parametrize("y", [np.arange(60), np.eye(60)[:, :8], np.ones((60, 8), int), np.ones((60, 3)), None])
def test_labels_are_ignored(y):
    """Also in several columns; and anything, if the second view is given."""
    expected = KernelSSL(2).fit(X_A).eigenvalues_
    np.testing.assert_array_equal(KernelSSL(2).fit(X_A, y).eigenvalues_, expected)
    paired = KernelSSL(2).fit(X_A, X_B, X_b=X_B).eigenvalues_
    np.testing.assert_array_equal(paired, KernelSSL(2).fit(X_A, y, X_b=X_B).eigenvalues_)
