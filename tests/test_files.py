"""Whole or absent."""

import os

import numpy as np
import pytest

from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError
from stairwise.files import atomic, check_target, plain, save_json, save_text


def test_failure_leaves_the_old_file(tmp_path):
    target = tmp_path / "f.txt"
    save_text(target, "old")

    def interrupted():
        with atomic(target) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.txt"]


def test_arrays_round_trip(tmp_path):
    save_arrays(tmp_path / "a.npz", {"x": np.arange(3), "y": 2.5})
    back = load_arrays(tmp_path / "a.npz")
    np.testing.assert_array_equal(back["x"], [0, 1, 2])
    assert back["y"] == 2.5
    with pytest.raises(InputError, match="Python objects"):
        save_arrays(tmp_path / "b.npz", {"x": np.array([object()])})
    assert not (tmp_path / "b.npz").exists()


def test_damaged_arrays(tmp_path):
    save_arrays(tmp_path / "a.npz", {"x": np.arange(3000)})
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    with pytest.raises(InputError, match=r"must be a whole \.npz file"):
        load_arrays(tmp_path / "a.npz")


def test_json_of_numpy(tmp_path):
    value = {"a": np.float64(1.5), "b": np.array([1, 2]), "c": np.inf, "d": (np.nan, tmp_path)}
    assert plain(value) == {"a": 1.5, "b": [1, 2], "c": None, "d": [None, str(tmp_path)]}
    save_json(tmp_path / "x.json", value)
    assert (tmp_path / "x.json").read_text().endswith("}\n")


def test_targets_are_checked_before_the_work(tmp_path):
    endings = (".png", ".pdf")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.png").mkdir()
    for given, says in (
        ("figure.txt", r"--out must end in \.png or \.pdf \(got .*figure\.txt\)"),
        ("folder.png", r"--out must be a file \(got the folder .*folder\.png\): add a name"),
        ("file/deeper/figure.png", r"--out must lie in a folder \(got .*, but .*file is a file\)"),
    ):
        with pytest.raises(InputError, match=says):
            check_target(tmp_path / given, "--out", endings)
    for good in ("figure.png", "new/deeper/figure.pdf"):
        assert check_target(tmp_path / good, "--out", endings) == tmp_path / good
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]  # nothing was made


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_target_without_rights(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="where you may write"):
        check_target(tmp_path / "figure.png", "--out", (".png",))
