"""Whole or absent."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from stairwise import files
from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError
from stairwise.data.images import load
from stairwise.data.pairs import read_features
from stairwise.files import atomic, check_target, leftovers, plain, save_json, save_text, set_aside
from stairwise.runs.log import MetricsLog as RunLog
from stairwise.runs.log import read_log


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


# what is not a regular file


def made(kind, path):
    """Something at `path` that must not be replaced."""
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(path))  # such names must be short
    else:
        path.symlink_to(path)


KINDS = ["a named pipe", "a folder", "a socket", "a link to itself"]


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_replaced(tmp_path, monkeypatch, kind, through_link):
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "out.json"
    made(kind, target)
    if through_link:
        (tmp_path / "link.json").symlink_to(target)
    before = target.lstat()
    given = tmp_path / "link.json" if through_link else target
    for write in (lambda: save_json(given, {}), lambda: save_arrays(given, {"x": 1}), lambda: RunLog(given)):
        with pytest.raises(InputError, match=f"must be a regular file.*got {kind}.*choose another name"):
            write()
    if kind != "a folder":
        with pytest.raises(InputError, match=f"--out must be a regular file.*{given.name}, {kind}"):
            check_target(given, "--out")
    assert target.lstat() == before
    assert len(list(tmp_path.iterdir())) == 1 + through_link


def test_pipes_are_not_read(tmp_path):
    """Opening one would wait for ever."""
    os.mkfifo(tmp_path / "x.npz")
    for read in (load_arrays, read_features, read_log, lambda path: load(f"array:{path}")):
        with pytest.raises(InputError, match=r"must be a regular file.*a named pipe"):
            read(tmp_path / "x.npz")


def test_the_page_of_a_run_goes_to_no_pipe(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "t": 1.0, "covariance": [1.0]}\n')
    os.mkfifo(tmp_path / "page.html")
    command = [sys.executable, "-m", "stairwise", "report", tmp_path, "--out", tmp_path / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "--out must be a regular file that you may write, or not exist yet" in done.stderr


# links and permissions


def test_links_are_written_through(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    (tmp_path / "far" / "file.txt").write_text("old")
    (tmp_path / "near" / "direct.txt").symlink_to("../far/file.txt")
    (tmp_path / "near" / "twice.txt").symlink_to("direct.txt")
    for name in ("direct.txt", "twice.txt"):
        save_text(tmp_path / "near" / name, name)
        assert (tmp_path / "far" / "file.txt").read_text() == name
        assert (tmp_path / "near" / name).is_symlink()
    (tmp_path / "near" / "new.txt").symlink_to("../further/new.txt")
    save_text(tmp_path / "near" / "new.txt", "made")
    assert (tmp_path / "further" / "new.txt").read_text() == "made"
    assert not (tmp_path / "further" / "new.txt").is_symlink()


def test_permissions_stay_and_new_files_follow_the_umask(tmp_path):
    target = tmp_path / "f.txt"
    before = os.umask(0o027)
    try:
        save_text(target, "new")
        assert target.stat().st_mode & 0o7777 == 0o640
        target.chmod(0o4755)
        save_text(target, "newer")
        assert target.stat().st_mode & 0o7777 == 0o755  # without setuid
        target.chmod(0o600)
        save_text(target, "newest")
        assert target.stat().st_mode & 0o7777 == 0o600
    finally:
        os.umask(before)


def test_a_read_only_file_is_not_replaced(tmp_path, monkeypatch):
    save_text(tmp_path / "f.txt", "kept")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anything
    with pytest.raises(InputError, match="a read-only file"):
        save_text(tmp_path / "f.txt", "lost")
    assert (tmp_path / "f.txt").read_text() == "kept"


def test_long_names_fit(tmp_path):
    name = "ü" * 120 + ".txt"  # 244 bytes of the 255 that a name may have
    save_text(tmp_path / name, "x")
    assert [p.name for p in tmp_path.iterdir()] == [name]


# leftovers


def test_the_next_writing_sweeps_what_a_killed_one_left(tmp_path):
    code = f"""
import os, signal
from stairwise.files import atomic
with atomic({str(tmp_path / "figure.png")!r}) as part:
    part.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == len(leftovers(tmp_path)) == 1
    save_text(tmp_path / "other.txt", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["other.txt"]


def test_files_that_are_being_written_and_those_of_others_stay(tmp_path):
    others = [".figure-original.png", ".figure.part-12.png", "figure.part-0123456789ab.png", ".vimrc"]
    for name in others:
        (tmp_path / name).write_text("")
    os.mkfifo(tmp_path / ".pipe.part-0123456789ab.png")
    (tmp_path / ".link.part-0123456789ab.png").symlink_to(".vimrc")
    with atomic(tmp_path / "slow.txt") as slow:
        slow.write_text("whole")
        save_text(tmp_path / "fast.txt", "x")
        assert slow.exists()
    assert (tmp_path / "slow.txt").read_text() == "whole"
    kept = {*others, ".pipe.part-0123456789ab.png", ".link.part-0123456789ab.png", "slow.txt", "fast.txt"}
    assert {p.name for p in tmp_path.iterdir()} == kept


def test_without_locks_leftovers_go_after_a_day(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    for name, age in (("young", 3600), ("old", 2 * 24 * 3600)):
        path = tmp_path / f".{name}.part-0123456789ab.txt"
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    save_text(tmp_path / "f.txt", "x")
    assert {p.name for p in tmp_path.iterdir()} == {".young.part-0123456789ab.txt", "f.txt"}


# disks


@pytest.mark.parametrize("target", ["link", "file"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, target):
    save_text(tmp_path / "file", "old")
    (tmp_path / "link").symlink_to("file")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_text(tmp_path / target, "new")
    assert caught.value.filename == str(tmp_path / target)
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_a_really_full_disk_of_arrays(tmp_path):
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    code = f"""
import resource, signal
import numpy as np
from stairwise.archives import save_arrays
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
save_arrays({str(tmp_path / "a.npz")!r}, {{"x": np.random.default_rng(0).standard_normal(100_000)}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_durable_files_are_flushed_with_their_folders(tmp_path, monkeypatch):
    flushed, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (flushed.append(os.fstat(handle).st_ino), real(handle)))
    save_text(tmp_path / "a" / "f.txt", "x")
    assert flushed == []
    save_text(tmp_path / "a" / "f.txt", "y", durable=True)
    assert flushed == [path.stat().st_ino for path in (tmp_path / "a" / "f.txt", tmp_path / "a", tmp_path)]


@pytest.mark.parametrize(("code", "fails"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_file_systems_that_cannot_flush_a_folder(tmp_path, monkeypatch, code, fails):
    real = os.fsync

    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=os.strerror(code)) if fails else nullcontext():
        save_text(tmp_path / "f.txt", "x", durable=True)
    assert (tmp_path / "f.txt").read_text() == "x"


def test_damaged_files_get_free_names(tmp_path):
    for content in "abc":
        (tmp_path / "f.json").write_text(content)
        set_aside(tmp_path / "f.json")
    kept = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert kept == {"f.json.damaged": "a", "f.json.damaged-2": "b", "f.json.damaged-3": "c"}
