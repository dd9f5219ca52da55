"""Fixed views that are followed through training."""

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.checks import InputError, RunWarning
from stairwise.evaluate.representations import eval_mode
from stairwise.runs.followed import read_followed, write_followed
from stairwise.training.following import PROJECTED
from stairwise.training.loop import Trainer
from tests.training.tiny import TINY

FOLLOWED = TINY.with_settings({"window": 16, "follow": 24})


@pytest.mark.parametrize("loss", ["barlow_twins", "simclr", "vicreg", "byol"])
def test_records_of_fixed_views(tmp_path, loss):
    recipe = FOLLOWED.with_settings({"loss": loss})
    run = sw.train(recipe, tmp_path / loss, device="cpu")
    found = read_followed(run.folder)
    assert found.t == pytest.approx(run.times)
    assert found.z.shape == (len(run.times), 48, 6)
    assert found.h.shape == (len(run.times), 48, 32)
    assert set(found.spectra) == ({"z", "predictor", "target"} if loss == "byol" else {"z"})
    assert np.abs(found.z.mean(axis=1)).max() < 1e-2 * np.abs(found.z).max()
    lam = (found.z**2).sum(axis=1) / 48
    assert lam == pytest.approx(found.spectra["z"], rel=5e-3)
    trainer = Trainer(recipe, run.folder, torch.device("cpu"))
    trainer.resume()
    x_a, x_b = trainer.material.pairs.fixed(torch.arange(24), 0)
    with eval_mode(trainer.objective):
        h, z = (torch.cat(both).double().numpy() for both in zip(*map(trainer.network, (x_a, x_b)), strict=True))
    trainer.close()
    assert found.h[-1] == pytest.approx(h, rel=2e-3, abs=2e-3 * np.abs(h).max())
    assert found.spectra["z"][-1] == pytest.approx(np.linalg.svd(z - z.mean(axis=0))[1] ** 2 / 48, rel=1e-4)


def test_following_does_not_change_the_training(tmp_path):
    runs = [sw.train(FOLLOWED.with_settings({"follow": n}), tmp_path / str(n), device="cpu") for n in (0, 24)]
    assert runs[0].series("loss").tolist() == runs[1].series("loss").tolist()
    assert read_followed(runs[0].folder) is None
    with pytest.warns(RunWarning, match="up to step 12"):
        longer = sw.train(FOLLOWED.with_settings({"steps": 12}), tmp_path / "24", device="cpu")
    assert read_followed(longer.folder).t == pytest.approx(longer.times)
    again = sw.train(FOLLOWED.with_settings({"seed": 3, "follow": 0}), tmp_path / "24", device="cpu", restart=True)
    assert read_followed(again.folder) is None


def test_float16_keeps_small_columns(tmp_path):
    z = np.random.default_rng(0).standard_normal((30, 3)) * [1.0, 1e-6, 1e-12]
    h = np.random.default_rng(1).standard_normal((30, 5)) * 1e4
    write_followed(tmp_path, 20, 2.0, z, h, {"z": np.ones(3)})
    write_followed(tmp_path, 5, 0.5, 2 * z, h, {"z": np.ones(3)})
    found = read_followed(tmp_path)
    assert found.t.tolist() == [0.5, 2.0]
    assert found.z == pytest.approx(np.stack([2 * z, z]), rel=1e-3, abs=0)
    assert found.h[0] == pytest.approx(h, rel=1e-3)


def test_large_representations_are_projected(tmp_path):
    recipe = FOLLOWED.with_settings({"encoder_options.width": 24, "steps": 2, "records": 1})
    found = read_followed(sw.train(recipe, tmp_path / "wide", device="cpu").folder)
    assert found.h.shape[2] == PROJECTED < 24 * 8


def test_bad_input(tmp_path):
    with pytest.raises(InputError, match="follow must be at most 80"):
        sw.train(FOLLOWED.with_settings({"follow": 81}), tmp_path, device="cpu")
