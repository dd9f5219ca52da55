"""Files of KernelSSL that somebody has damaged or forged are refused, and the reason is said."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError
from stairwise.kernel import kernels
from stairwise.kernel.estimator import KernelSSL

X_A, X_B = np.random.default_rng(0).standard_normal((2, 30, 4))
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Arrays of four files that KernelSSL has written: one view, two views, two modalities, precomputed."""
    folder = tmp_path_factory.mktemp("saved")
    K = kernels.rbf(0.2)(np.vstack([X_A, X_B]), np.vstack([X_A, X_B]))
    fits = {
        "one": KernelSSL(3, kernel="ntk").fit(X_A),
        "two": KernelSSL(3, kernel="rbf").fit(X_A, X_b=X_B),
        "modalities": KernelSSL(3, kernel=("rbf", "laplace")).fit(X_A, X_b=X_B[:, :2]),
        "precomputed": KernelSSL(3, kernel="precomputed").fit(K),
        "single": KernelSSL(3, kernel="laplace", dtype="float32").fit(X_A, X_b=X_B),
    }
    for name, est in fits.items():
        est.save(folder / f"{name}.npz")
    return {name: load_arrays(folder / f"{name}.npz") for name in fits}


def forged(path, arrays, facts=None, **changes):
    """The file with other facts (None: without them) and other arrays (None: without them)."""
    facts = facts or {}
    stored = json.loads(str(arrays["facts"])) | facts
    stored = {name: value for name, value in stored.items() if value is not None or name not in facts}
    other = {**arrays, "facts": np.array(json.dumps(stored)), **changes}
    save_arrays(path, {name: value for name, value in other.items() if value is not None})
    return path


@pytest.mark.parametrize("name", ["one", "two", "modalities", "precomputed", "single"])
def test_what_was_saved_is_read(tmp_path, saved, name):
    est = KernelSSL.load(forged(tmp_path / "est.npz", saved[name]))
    np.testing.assert_array_equal(est.eigenvalues_, saved[name]["eigenvalues"])


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"n_components": 0}, "n_components must be a whole number of at least 1"),
        ({"n_components": 2.5}, "n_components must be a whole number"),
        ({"n_components": 10**12}, "eigenvalues must be float64 or float32 of shape"),
        ({"n_components": None}, "it lacks n_components"),
        ({"kernels": None}, "it lacks kernels"),
        ({"kernels": "exec"}, "kernels must be a list of 2"),
        ({"kernels": [["rbf", {}]]}, "kernels must be a list of 2"),
        ({"kernels": 2 * [["conv_ntk", {"strides": "2"}]]}, "strides must be at most 4 in a tuple"),
        ({"kernels": 2 * [["conv_ntk", {"shape": [2, 2.5, 1]}]]}, "shape must be a whole number"),
        ({"kernels": 2 * [["conv_ntk", {"head": [1]}]]}, "head is unknown"),
        ({"kernels": 2 * [["conv_ntk", {"kernel_size": 2}]]}, "kernel_size must be odd"),
        ({"kernels": [["os.system", {}], ["rbf", {}]]}, "kernels is unknown"),
        ({"kernels": [[["rbf"], {}], ["rbf", {}]]}, "kernels is unknown"),
        ({"kernels": [["rbf", {"gamma": "1"}], ["rbf", {}]]}, "gamma must be a number"),
        ({"kernels": [["rbf", {"code": 1}], ["rbf", {}]]}, "setting of rbf is unknown"),
        ({"kernels": [["ntk", {"depth": 10**9}], ["ntk", {"depth": 10**9}]]}, "depth must be at most 10000"),
        ({"kernels": [["polynomial", {"degree": 10**9}]] * 2}, "degree must be at most 10000"),
        ({"kernels": [["ntk", {"activation": "exec"}]] * 2}, "activation is unknown"),
        ({"kernels": [["rbf", {"gamma": 1}], ["rbf", {"gamma": 2}]]}, "kernels must be equal"),
        ({"kernels": "precomputed"}, "n_features_in must be 60"),
        ({"shared": "yes"}, "shared must be True or False"),
        ({"swaps": 1}, "swaps must be True or False"),
        ({"swaps": False}, "kernels must be a list of 1"),
        ({"dtype": "object"}, "dtype is unknown"),
        ({"solver": ["auto"]}, "solver is unknown"),
        ({"memory": -1}, "memory must be a whole number"),
        ({"memory": 10**30}, "memory must be at most"),
        ({"n_features_in": 5}, r"part0 must be float64 or float32 of shape \(30, 5\) \(got float64 of shape \(30, 4\)"),
        ({"n_features_in": "4"}, "n_features_in must be a whole number"),
        ({"solution": [0, 0, "krylov"]}, "solution must have four entries"),
        ({"solution": ["0", 0, "krylov", 0]}, "residual must be a number"),
        ({"solution": [0, 1.5, "krylov", 0]}, "products must be a whole number"),
        ({"solution": [0, 1, "magic", 0]}, "solver of the solution is unknown"),
        ({"solution": [0, 1, "krylov", -1]}, "precision must be at least 0"),
        ({"format": 3}, "format must be 1 or 2.*load it with the version that wrote it"),
    ],
)
def test_forged_facts(tmp_path, saved, facts, says):
    path = forged(tmp_path / "forged.npz", saved["two"], facts)
    with pytest.raises(InputError, match=rf"forged\.npz must be a file written by KernelSSL\.save \(got .*{says}"):
        KernelSSL.load(path)


NAN, ZEROS = np.full((60, 3), np.nan), np.zeros((60, 3))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("two", {"eigenvalues": None}, "it lacks eigenvalues"),
        ("two", {"eigenvalues": np.ones(4)}, r"eigenvalues must be .* of shape \(3,\)"),
        ("two", {"eigenvalues": np.array([3.0, 2.0, 0.0])}, "eigenvalues must be positive and descend"),
        ("two", {"eigenvalues": np.array([1.0, 2.0, 3.0])}, "eigenvalues must be positive and descend"),
        ("two", {"eigenvalues": np.array([1.0, np.nan, 0.5])}, "eigenvalues must be finite"),
        ("two", {"eigenvalues": np.array(["a", "b", "c"])}, r"got <U1 of shape \(3,\)"),
        ("two", {"dual_coef": NAN}, r"dual_coef must be finite \(got nan\)"),
        ("two", {"dual_coef": ZEROS.T}, "dual_coef must be"),
        ("two", {"dual_coef": ZEROS[:59]}, "dual_coef must have a row per point"),
        ("two", {"dual_coef": ZEROS[:2]}, "dual_coef must have a row per point"),
        ("two", {"dual_coef": ZEROS[:0]}, "dual_coef must be"),
        ("two", {"dual_coef": ZEROS.astype(complex)}, "got complex128"),
        ("two", {"dual_coef": ZEROS[:40]}, "part0 must be"),
        ("two", {"part1": None}, "it lacks part1"),
        ("two", {"part1": X_B[:29]}, "part1 must be"),
        ("two", {"part1": X_B[:, :3]}, "part1 must be"),
        ("two", {"part0": np.where(X_A > 0, np.inf, X_A)}, r"part0 must be finite \(got inf\)"),
        ("modalities", {"part1": X_B[:29, :2]}, "part1 must be"),
        ("precomputed", {"more_coef": ZEROS}, "more_coef must be"),
        ("precomputed", {"more_eigenvalues": np.ones(2)}, "more_eigenvalues must be at least 3"),
        ("precomputed", {"more_eigenvalues": None}, "it lacks more_eigenvalues"),
    ],
)
def test_forged_arrays(tmp_path, saved, name, changes, says):
    path = forged(tmp_path / "forged.npz", saved[name], **changes)
    with pytest.raises(InputError, match=rf"forged\.npz must be a file written by KernelSSL\.save \(got .*{says}"):
        KernelSSL.load(path)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (np.array(7.0), "facts must be text"),
        (np.array(["{}"]), "facts must be text"),
        (np.array("[1, 2]"), "facts must be a JSON object"),
        (np.array("{"), "Expecting"),
        (np.array("[" * 100_000), "recursion"),
    ],
    ids=["number", "list", "JSON list", "half", "deep"],
)
def test_facts_of_another_kind(tmp_path, saved, facts, says):
    save_arrays(tmp_path / "forged.npz", saved["two"] | {"facts": facts})
    with pytest.raises(InputError, match=rf"must be a file written by KernelSSL\.save \(got .*{says}"):
        KernelSSL.load(tmp_path / "forged.npz")


def test_files_beyond_the_limit(tmp_path, saved):
    path = forged(tmp_path / "est.npz", saved["two"])
    with pytest.raises(InputError, match=r"must expand to at most .*largest="):
        KernelSSL.load(path, largest=1000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@QUICK
@given(data=st.data())
def test_any_fact_of_any_kind_is_refused_or_harmless(tmp_path, saved, data):
    """Whatever JSON stands for a fact: an InputError, or an estimator that computes finite embeddings."""
    arrays = saved[data.draw(st.sampled_from(["one", "two", "modalities"]))]
    stored = json.loads(str(arrays["facts"]))
    stored[data.draw(st.sampled_from(sorted(stored)))] = data.draw(JSON)
    save_arrays(tmp_path / "est.npz", {**arrays, "facts": np.array(json.dumps(stored))})
    try:
        est = KernelSSL.load(tmp_path / "est.npz")
    except InputError:
        return
    assert np.isfinite(est.transform(X_A)).all()


# --- files of landmarks and random features, with their sums between batches


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Arrays of files of every kind of features."""
    folder = tmp_path_factory.mktemp("streams")
    fits = {
        "landmarks": KernelSSL(3, method="nystroem", n_features=8),
        "single": KernelSSL(3, method="nystroem", n_features=8, dtype="float32"),
        "waves": KernelSSL(3, kernel="laplace", method="features", n_features=8),
        "layer": KernelSSL(3, kernel=kernels.nngp(bias_variance=0.1), method="features", n_features=8),
        "points": KernelSSL(2, kernel="linear"),
        "modalities": KernelSSL(3, kernel=("rbf", "linear"), n_features=8),
        "images": KernelSSL(3, kernel=kernels.conv_ntk(2), n_features=8),
    }
    for name, est in fits.items():
        est.partial_fit(X_A, X_b=X_B[:, :3] if name == "modalities" else X_B).save(folder / f"{name}.npz")
    return {name: load_arrays(folder / f"{name}.npz") for name in fits}


STREAMS = ["landmarks", "single", "waves", "layer", "points", "modalities", "images"]


@pytest.mark.parametrize("name", STREAMS)
def test_streams_that_were_saved_are_read(tmp_path, streams, name):
    est = KernelSSL.load(forged(tmp_path / "est.npz", streams[name]))
    assert est.pairs_ == 30
    assert np.isfinite(est.transform(X_A)).all()
    est.save(tmp_path / "again.npz")
    again = load_arrays(tmp_path / "again.npz")
    assert again.keys() == streams[name].keys()
    assert all(np.array_equal(again[key], value) for key, value in streams[name].items())


RBF, LINEAR = ["rbf", {"gamma": 0.1}], ["linear", {}]


@pytest.mark.parametrize(
    ("name", "facts", "says"),
    [
        ("landmarks", {"format": True}, "format must be 1 or 2"),
        ("landmarks", {"format": 1}, "it lacks swaps"),
        ("landmarks", {"route": "magic"}, "route is unknown"),
        ("landmarks", {"route": "auto"}, "route is unknown"),
        ("landmarks", {"method": "magic"}, "method is unknown"),
        ("landmarks", {"method": None}, "it lacks method"),
        ("landmarks", {"landmarks": "best"}, "landmarks is unknown"),
        ("landmarks", {"n_features": 10**9}, "n_features must be at most 1000000"),
        ("landmarks", {"n_features": True}, "n_features must be a whole number"),
        ("landmarks", {"random_state": -1}, "random_state must be a nonnegative"),
        ("landmarks", {"random_state": 10**30}, "random_state must be at most"),
        ("landmarks", {"n_components": 9}, "n_components must be at most 8"),
        ("landmarks", {"n_components": 10**12}, "n_components must be at most 8"),
        ("landmarks", {"n_features_in": 5}, r"map0_0 must be .* of shape \(any, 5\)"),
        ("landmarks", {"memory": 10**30}, "memory must be at most"),
        ("landmarks", {"dtype": "float32"}, "map0_0 must be float32"),
        ("single", {"dtype": "float64"}, "map0_0 must be float64"),
        ("landmarks", {"kernels": [RBF, RBF]}, "kernels must be a list of 1"),
        ("landmarks", {"kernels": [LINEAR]}, "maps must suit the kernel linear"),
        ("landmarks", {"kernels": [["polynomial", {"coef0": -1e9}]]}, "kernel must be positive semidefinite"),
        ("landmarks", {"kernels": [["polynomial", {"degree": 100, "coef0": 1e9}]]}, "kernel must return finite"),
        ("landmarks", {"kernels": [["conv_ntk", {"shape": [3, 3, 1]}]]}, "shape must fit rows of 4"),
        ("landmarks", {"maps": "Landmarks"}, "maps must be a list of 1"),
        ("landmarks", {"maps": ["exec"]}, "maps is unknown"),
        ("landmarks", {"maps": [["Landmarks"]]}, "maps is unknown"),
        ("landmarks", {"maps": ["Identity"]}, "maps must suit the kernel rbf"),
        ("landmarks", {"maps": ["Waves"]}, "map0_0 must be"),
        ("landmarks", {"features_b": 4}, "features_b must be given for two modalities, and only"),
        ("landmarks", {"shared": False}, "kernels must be a list of 2"),
        ("layer", {"kernels": [["nngp", {"depth": 2}]]}, "maps must suit the kernel nngp"),
        ("layer", {"kernels": [["nngp", {"depth": 1}]]}, r"cross must be .* of shape \(8, 8\)"),
        ("points", {"n_features_in": 3}, r"cross must be .* of shape \(3, 3\)"),
        ("modalities", {"features_b": "3"}, "features_b must be a whole number"),
        ("modalities", {"features_b": 5}, r"cross must be .* of shape \(8, 5\)"),
        ("modalities", {"shared": True}, "kernels must be a list of 1"),
        ("modalities", {"maps": ["Landmarks"]}, "maps must be a list of 2"),
        ("modalities", {"kernels": [RBF, RBF]}, "maps must suit the kernel rbf"),
    ],
)
def test_forged_facts_of_streams(tmp_path, streams, name, facts, says):
    path = forged(tmp_path / "forged.npz", streams[name], facts)
    with pytest.raises(InputError, match=rf"forged\.npz must be a file written by KernelSSL\.save \(got .*{says}"):
        KernelSSL.load(path)


SQUARE = np.ones((8, 8))


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("landmarks", {"map0_0": None}, "it lacks map0_0"),
        ("landmarks", {"map0_0": X_A[:8, :3]}, "map0_0 must be"),
        ("landmarks", {"map0_0": X_A[:0]}, "map0_0 must be"),
        ("landmarks", {"map0_0": X_A[:8] * np.nan}, "map0_0 must be finite"),
        ("landmarks", {"map0_0": X_A[:8] * 1e200}, "kernel must return finite numbers"),
        ("landmarks", {"map0_0": X_A[:8] * 1j}, "got complex128"),
        ("landmarks", {"map0_0": X_A[:9]}, r"cross must be .* of shape \(9, 9\)"),
        ("landmarks", {"cross": None}, "it lacks cross"),
        ("landmarks", {"pairs": None}, "it lacks pairs"),
        ("landmarks", {"cross": SQUARE[:7]}, "cross must be"),
        ("landmarks", {"cross": SQUARE * np.inf}, "cross must be finite"),
        ("landmarks", {"cross": SQUARE.astype(np.float32)}, "cross must be float64"),
        ("landmarks", {"cross": SQUARE.astype(int)}, "cross must be"),
        ("landmarks", {"pairs": np.array(0)}, "pairs must be a whole number of at least 1"),
        ("landmarks", {"pairs": np.array(-30)}, "pairs must be a whole number of at least 1"),
        ("landmarks", {"pairs": np.array(1 << 60)}, "pairs must be at most"),
        ("landmarks", {"pairs": np.array(30.0)}, "pairs must be a whole number"),
        ("landmarks", {"pairs": np.array([30])}, "pairs must be a whole number"),
        ("landmarks", {"pairs": np.array(True)}, "pairs must be a whole number"),
        ("landmarks", {"batches": None}, "it lacks batches"),
        ("landmarks", {"batches": np.array([1.5])}, "batches must be whole numbers"),
        ("landmarks", {"batches": np.array([], dtype=int)}, "batches must be whole numbers"),
        ("waves", {"map0_0": np.ones((3, 4))}, "map0_0 must be"),
        ("waves", {"map0_1": np.ones(5)}, r"map0_1 must be .* of shape \(4,\)"),
        ("waves", {"map0_1": None}, "it lacks map0_1"),
        ("waves", {"map0_0": np.full((4, 4), 1e300)}, "map0_0 must be at most"),
        ("layer", {"map0_1": np.ones(7)}, r"map0_1 must be .* of shape \(8,\)"),
        ("layer", {"map0_0": np.ones((4, 9)), "map0_1": np.ones(9)}, "cross must be"),
        ("layer", {"map0_0": np.full((4, 8), 1e300)}, "map0_0 must be at most"),
        ("modalities", {"cross": np.ones((8, 8))}, r"cross must be .* of shape \(8, 3\)"),
        ("modalities", {"cross": np.ones((3, 8))}, r"cross must be .* of shape \(8, 3\)"),
    ],
)
def test_forged_arrays_of_streams(tmp_path, streams, name, changes, says):
    path = forged(tmp_path / "forged.npz", streams[name], **changes)
    with pytest.raises(InputError, match=rf"forged\.npz must be a file written by KernelSSL\.save \(got .*{says}"):
        KernelSSL.load(path)


def test_landmarks_without_pairs(tmp_path, streams):
    bare = KernelSSL.load(forged(tmp_path / "bare.npz", streams["landmarks"], cross=None, pairs=None, batches=None))
    with pytest.raises(InputError, match=r"combine needs pairs in every process \(got none in \[0\]\)"):
        bare.combine()
    full = KernelSSL.load(forged(tmp_path / "full.npz", streams["landmarks"]))
    assert bare.combine(full).pairs_ == 30


def test_sums_that_no_data_can_have(tmp_path, streams):
    """Their sizes are right, so only the modes show that they are forged."""
    for cross in (-np.eye(8), np.zeros((8, 8)), np.full((8, 8), 1e300)):
        est = KernelSSL.load(forged(tmp_path / "forged.npz", streams["landmarks"], cross=cross))
        with pytest.raises(InputError, match="must"):
            est.transform(X_A)


@QUICK
@given(data=st.data())
def test_any_fact_of_a_stream_is_refused_or_harmless(tmp_path, streams, data):
    arrays = streams[data.draw(st.sampled_from(STREAMS))]
    stored = json.loads(str(arrays["facts"]))
    stored[data.draw(st.sampled_from(sorted(stored)))] = data.draw(JSON)
    save_arrays(tmp_path / "est.npz", {**arrays, "facts": np.array(json.dumps(stored))})
    try:
        est = KernelSSL.load(tmp_path / "est.npz")
        z = est.transform(X_A)
        more = est.partial_fit(X_A, X_b=X_B[:, : est._model.features_b]).eigenvalues_
    except InputError:
        return
    assert np.isfinite(z).all()
    assert np.isfinite(more).all()
