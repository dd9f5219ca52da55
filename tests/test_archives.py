"""Archives of arrays: damaged, forged or far too large ones are refused before they are expanded."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stairwise.archives import LARGEST, load_arrays, save_arrays
from stairwise.checks import InputError

QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def member(shape, descr="'<f8'", content=b""):
    """A .npy file that claims this shape and type."""
    stream = io.BytesIO()
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    stream.write(b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n" + content)
    return stream.getvalue()


def archive(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as stored:
        for name, content in members:
            stored.writestr(name, content)
    return path


def test_what_numpy_writes_is_read(tmp_path):
    arrays = {
        "x": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "text": np.array("größer"),
        "none": np.zeros((0, 4)),
        "pairs": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    }
    np.savez(tmp_path / "plain.npz", **arrays)
    save_arrays(tmp_path / "small.npz", arrays)
    for name in ("plain.npz", "small.npz"):
        back = load_arrays(tmp_path / name)
        assert back.keys() == arrays.keys()
        for key, value in arrays.items():
            np.testing.assert_array_equal(back[key], value)


def test_an_archive_that_expands_too_far_is_refused_before_it_does(tmp_path, monkeypatch):
    zeros = member((64 << 20,), "'|u1'", bytes(64 << 20))
    path = archive(tmp_path / "bomb.npz", [(f"x{i}.npy", zeros) for i in range(3)])
    assert path.stat().st_size < 300_000
    size = 3 * len(zeros)
    says = rf"bomb\.npz must expand to at most 100 MiB \(got 192 MiB\): if you trust it, allow more: largest={size}"
    with monkeypatch.context() as patch:
        patch.delattr(zipfile.ZipFile, "open")  # nothing is expanded
        with pytest.raises(InputError, match=says):
            load_arrays(path, largest=100 << 20)
    assert len(load_arrays(path, largest=size)) == 3
    assert LARGEST == 4 << 30


def test_a_directory_that_lies_about_sizes_expands_nothing_more(tmp_path):
    """What the directory claims is the most that is read of a member."""
    path = archive(tmp_path / "liar.npz", [("x.npy", member((1 << 20,), "'|u1'", bytes(1 << 20)))])
    content = path.read_bytes()
    at = content.rindex(b"PK\x01\x02") + 24  # uncompressed size in the central directory
    path.write_bytes(content[:at] + (1000).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(InputError, match="must be a whole"):
        load_arrays(path)


@pytest.mark.parametrize(
    ("members", "method", "says"),
    [
        ([("x.npy", member((10**15,)))], zipfile.ZIP_DEFLATED, r"x claims float64 of shape \(1000000000000000,\)"),
        ([("x.npy", member((-1,), content=bytes(8)))], zipfile.ZIP_DEFLATED, "x claims"),
        ([("x.npy", member((2,), "'|O'", bytes(16)))], zipfile.ZIP_DEFLATED, "x holds Python objects"),
        ([("x.npy", member((1,), "[('a', '|O')]", bytes(8)))], zipfile.ZIP_DEFLATED, "x holds Python objects"),
        ([("x.npy", member((1,), content=bytes(8)))], zipfile.ZIP_BZIP2, "in a way that numpy does not use"),
        ([("x.npy", member((1,), content=bytes(8)))], zipfile.ZIP_LZMA, "in a way that numpy does not use"),
        ([("x.npy", member((1,), content=bytes(8))), ("x", member((0,)))], zipfile.ZIP_STORED, "of one name"),
        ([("notes.txt", b"hello world")], zipfile.ZIP_STORED, "magic string"),
        ([("x.npy", b"")], zipfile.ZIP_STORED, "EOF"),
    ],
)
def test_forged_members(tmp_path, members, method, says):
    path = archive(tmp_path / "forged.npz", members, method)
    with pytest.raises(InputError, match=rf"forged\.npz must be a whole \.npz file of numbers or text.*{says}"):
        load_arrays(path)


def test_no_object_is_unpickled(tmp_path):
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}, None], dtype=object))
    with pytest.raises(InputError, match="x holds Python objects"):
        load_arrays(tmp_path / "objects.npz")


def test_files_that_are_not_there_are_called_that(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_arrays(tmp_path / "none.npz")


@QUICK
@given(data=st.data())
def test_flipped_bits_and_truncations_change_nothing_unnoticed(tmp_path, data):
    """Either the arrays are those that were written, or the file is refused."""
    arrays = {"x": np.arange(40.0), "facts": np.array('{"step": 12}'), "y": np.eye(3, dtype=np.float32)}
    path = tmp_path / "a.npz"
    save_arrays(path, arrays)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        at = data.draw(st.integers(0, 8 * len(content) - 1))
        content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)
    try:
        back = load_arrays(path)
    except InputError:
        return
    same = [name for name in arrays if name in back and np.array_equal(back[name], arrays[name])]
    renamed = set(back) - set(arrays)  # a name has no checksum; who reads it misses it
    assert len(same) + len(renamed) == len(back) == 3


def test_no_flipped_bit_of_the_directory_hides_an_array(tmp_path):
    """One that makes the comment of an entry longer, for instance, so that it holds the next entry."""
    path = tmp_path / "a.npz"
    save_arrays(path, {"x": np.arange(40.0), "facts": np.array("{}"), "y": np.eye(3)})
    content = path.read_bytes()
    refused = 0
    for at in range(8 * content.index(b"PK\x01\x02"), 8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            assert len(load_arrays(path)) == 3
        except InputError:
            refused += 1
    assert refused > 100
