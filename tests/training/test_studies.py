"""Tangent kernels of trained runs: the machinery of Tables 1 and 2."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.archives import load_arrays
from stairwise.checks import InputError
from stairwise.ntk.empirical import empirical_ntk
from stairwise.ntk.predict import kernel_pca, predict_embeddings
from stairwise.ntk.study import Outputs, compare, embed, kernel_drift
from stairwise.theory.spectra import subspace_alignment
from stairwise.training.loop import Trainer
from stairwise.training.networks import fixed_views, initial_network, kept_networks, load_network
from stairwise.training.studies import (
    drift_of,
    refuse_other_views,
    stored_coming,
    stored_drift,
    stored_study,
    study_of,
)
from tests.command_lines import stairwise
from tests.training.tiny import TINY

CPU = torch.device("cpu")
SHARED = True
TANGENT = ("tangent.json", "tangent.npz", "lengths.json", "lengths.npz")
pytestmark = pytest.mark.slow
STUDIED = TINY.with_settings(
    {"encoder_options.width": 8, "d": 4, "batch": 64, "steps": 30, "records": 3, "alpha": 0.5, "keep": 3}
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        sw.train(STUDIED.with_settings({"loss": loss}), folder / loss, device="cpu") for loss in ("vicreg", "simclr")
    ]


def test_scores_are_what_they_say(runs):
    found = study_of(runs[0], n=30, device="cpu")
    x = fixed_views(runs[0], 30, 0, CPU)
    model = Outputs(load_network(runs[0])).eval()
    K = empirical_ntk(model, x).numpy()
    z = embed(model, x)
    assert found.embeddings == pytest.approx(z)
    assert found.scores["theory"] == pytest.approx(subspace_alignment(z, predict_embeddings(K, 4)), rel=1e-3)
    assert found.by_dimension.shape == (2, 4)
    assert found.by_dimension[0, -1] == pytest.approx(found.scores["theory"], rel=1e-6)
    assert found.by_pairs[:, -1] == pytest.approx([30, found.scores["theory"], found.scores["kernel PCA"]], rel=1e-6)
    assert found.scores["chance"] == pytest.approx(4 / 60, rel=0.5)
    assert found.facts["kernel_error"] < 1e-4
    assert found.facts["drift"]["distance"] > 0


def test_leading_modes(runs):
    found = study_of(runs[0], n=30, device="cpu", initial=False)
    modes, K = np.linalg.svd(found.embeddings, full_matrices=False)[0], found.kernel.astype(np.float32)
    for k in range(1, 5):
        F, pca = predict_embeddings(K, k), kernel_pca(K, k)
        expected = [subspace_alignment(modes[:, :k], other) for other in (F, pca)]
        assert found.by_dimension[:, k - 1] == pytest.approx(expected, rel=1e-6)


def test_a_study_is_saved_and_drawn(runs, tmp_path):
    found = study_of(runs[0], n=20, device="cpu", initial=False)
    paths = found.write(tmp_path)
    assert sorted(tmp_path.iterdir()) == paths == [tmp_path / "tangent.json", tmp_path / "tangent.npz"]
    assert found.draw(tmp_path) == [tmp_path / "figure.png"]
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_all_studies_for_the_tables_without_matplotlib(runs, tmp_path):
    """On a machine that only computes."""
    shutil.copytree(runs[0].folder, tmp_path / "run")
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from stairwise.runs.reader import Run\n"
        "from stairwise.training.studies import stored_coming, study_for_tables\n"
        "run = Run(sys.argv[1])\n"
        "study_for_tables(run, 'simclr', n=20, draws=2, device='cpu')\n"
        "stored_coming(run, 20, range(2), 'cpu', 'float16', lambda *_: None, views='simclr')\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "run"], check=True)
    studied = tmp_path / "run" / "ntk"
    files = {path.relative_to(studied).as_posix() for path in studied.rglob("*") if path.is_file()}
    both = {f"simclr-{seed}/{name}" for seed in (0, 1) for name in TANGENT}
    assert both | {f"simclr-0/{name}" for name in ("drift.json", "drift.npz", "coming.json", "coming.npz")} <= files


def test_the_same_pairs_for_every_run(runs):
    first, second = (fixed_views(run, 20, 3, CPU) for run in runs)
    assert torch.equal(first, second)
    assert not torch.equal(first, fixed_views(runs[0], 20, 4, CPU))
    # partners are views of one image: closer than strangers
    a, b = first[:20].flatten(1), first[20:].flatten(1)
    assert (a - b).norm(dim=1).mean() < (a - b.roll(1, 0)).norm(dim=1).mean()


def test_method_against_method(runs):
    found = [study_of(run, n=30, device="cpu", initial=False) for run in runs]
    table = compare(found)
    assert table.header == ["", "vicreg", "simclr"]
    assert table.rows[0][1] == table.rows[1][2] == "1.000"
    assert table.rows[0][2] == table.rows[1][1]
    assert "theory, initial kernel" not in found[0].scores


def test_the_network_with_which_a_run_began(runs, tmp_path):
    trainer = Trainer(STUDIED, tmp_path, CPU)
    again = initial_network(runs[0]).state_dict()
    for name, value in trainer.network.state_dict().items():
        assert torch.equal(value, again[name]), name
    trainer.close()


def test_drift():
    K = np.diag([2.0, 1.0])
    still, scaled = kernel_drift([K, 3 * K])
    assert still == pytest.approx({"distance": 0.0, "alignment": 1.0})
    assert scaled == pytest.approx({"distance": 2.0, "alignment": 1.0})


def test_the_kernel_through_training(runs, tmp_path):
    found = drift_of(runs[0], n=30, device="cpu")
    assert found.steps.tolist() == [0, 10, 20, 30]
    assert np.all(np.diff(found.t) > 0)
    assert found.change[0] == 0 < found.change[1]
    assert [found.with_first[0], found.with_last[-1]] == pytest.approx([1, 1])
    assert found.with_first[-1] == pytest.approx(found.with_last[0])
    assert found.theory[-1] == pytest.approx(study_of(runs[0], n=30, device="cpu", initial=False).scores["theory"])
    assert [path.name for path in (*found.write(tmp_path), *found.draw(tmp_path))] == ["drift.npz", "drift.png"]
    assert load_arrays(tmp_path / "drift.npz")["theory"].shape == (4,)
    assert found.chance == pytest.approx(4 / 60)
    for n in (30, 25):  # those of other pairs are not taken for these
        arrays = stored_drift(runs[0], n, 0, "cpu", "float32", lambda *_: None)
        assert int(arrays["n"]) == n
        assert (arrays["theory"][-1] == pytest.approx(found.theory[-1])) == (n == 30)
    last = list(kept_networks(runs[0]))[-1][2].state_dict()
    assert all(torch.equal(value, last[name]) for name, value in load_network(runs[0]).state_dict().items())
    bare = sw.train(STUDIED.with_settings({"keep": 0, "steps": 9}), tmp_path / "bare", device="cpu")
    with pytest.raises(InputError, match="keep=10"):
        drift_of(bare, n=30, device="cpu")
    assert stored_drift(bare, 30, 0, "cpu", "float32", lambda *_: None) is None


def test_the_kernel_through_training_on_views_for_all(runs):
    """Both runs see one tensor of views, and it is not their own."""
    how = 25, 0, "cpu", "float32", lambda *_: None
    for run in runs:
        found = stored_drift(run, *how, views="simclr")
        assert (run.folder / "ntk" / "simclr-0" / "drift.npz").is_file()
        direct = drift_of(run, 25, device="cpu", views="simclr")
        assert found["with_last"] == pytest.approx(direct.with_last)
        assert not np.allclose(found["with_last"], drift_of(run, 25, device="cpu").with_last, rtol=1e-4)


def test_the_next_modes_of_a_run(runs):
    how = [0, 1], "cpu", "float32", lambda *_: None
    found = stored_coming(runs[0], 25, *how, views="simclr")
    assert found["steps"].tolist() == [10, 20, 30]
    assert found["shares"].shape[:2] == (2, 2)
    assert json.loads((runs[0].folder / "ntk" / "simclr-0" / "coming.json").read_text())["seeds"] == [0, 1]
    again = stored_coming(runs[0], 25, *how, views="simclr")
    assert np.array_equal(again["shares"], found["shares"], equal_nan=True)


def test_studies_of_other_views_are_refused(runs, tmp_path):
    how = "cpu", "float32", lambda *_: None
    for run in runs:
        stored_study(run, 20, 7, *how, views="simclr")
    refuse_other_views(runs, 7, "simclr")
    path = runs[1].folder / "ntk" / "simclr-7" / "tangent.json"
    facts = json.loads(path.read_text())
    assert len(facts["sample"]) == 64
    facts["sample"][3] += 0.5
    path.write_text(json.dumps(facts))
    with pytest.raises(InputError, match=r"must be of the same views \(got simclr\)"):
        refuse_other_views(runs, 7, "simclr")


def test_few_modes(tmp_path):
    """Early in training the kernel has fewer modes than the embedding has dimensions; the error says what to do."""
    run = sw.train(STUDIED.with_settings({"steps": 2}), tmp_path / "young", device="cpu")
    with pytest.raises(InputError, match=r"4 modes above rounding error.*take more pairs \(n\)"):
        study_of(run, n=1, device="cpu")


def test_command_line(runs, tmp_path):
    folders = [run.folder for run in runs]
    done = stairwise("ntk", *folders, "--n", "20", "--keep-kernel", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)["scores"]
    assert set(scores) == {str(folder) for folder in folders}
    stored = load_arrays(folders[0] / "ntk" / "tangent.npz")
    assert stored["kernel"].shape == (40, 40)
    assert np.all(np.diff(stored["spectrum"]) <= 0)
    assert (folders[0] / "ntk" / "figure.png").stat().st_size > 20_000
    # as many pairs as there are images
    done = stairwise("ntk", folders[0], "--no-initial", "--precision", "float64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((folders[0] / "ntk" / "tangent.json").read_text())["n"] == runs[0].facts["training_images"]
    done = stairwise("ntk", folders[0], "--n", "20", "--over-time", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "with the last" in done.stdout
    assert (folders[0] / "ntk" / "drift.png").is_file()


def test_bad_input(runs, tmp_path):
    with pytest.raises(InputError, match="at most 80"):
        study_of(runs[0], n=600, device="cpu")
    with pytest.raises(InputError, match="at least 1"):
        study_of(runs[0], n=0, device="cpu")
    with pytest.raises(InputError, match="stairwise train"):
        study_of(sw.Run(tmp_path), n=10, device="cpu")
    with pytest.raises(InputError, match="precision"):
        study_of(runs[0], n=10, device="cpu", precision="half")
