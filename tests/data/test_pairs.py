"""The one way from data to pairs of views."""

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.checks import InputError
from stairwise.data.images import Images, load
from stairwise.data.pairs import read_pairs, view_pairs
from stairwise.training.networks import fixed_views
from stairwise.training.recipe import Recipe


def test_rows_of_images_and_of_files(tmp_path):
    name, x_a, x_b = read_pairs("photos", n=30, crop=8, seed=1)
    assert name == "photos"
    assert x_a.shape == x_b.shape == (30, 192)
    np.save(tmp_path / "a.npy", x_a)
    np.save(tmp_path / "b.npy", x_b)
    name, again, _ = read_pairs(str(tmp_path / "a.npy"), str(tmp_path / "b.npy"))
    assert name == "a.npy, b.npy"
    assert isinstance(again, np.memmap)
    assert np.array_equal(again, x_a)
    with pytest.raises(InputError, match="is needed with the features of the first view"):
        read_pairs(str(tmp_path / "a.npy"))


@pytest.mark.parametrize(("images", "side", "pairs", "crop"), [(6, 64, 6, 20), (700, 8, 500, 5), (3, 1, 3, 1)])
def test_number_and_crop_fit_the_data_if_they_are_not_given(tmp_path, images, side, pairs, crop):
    pixels = np.random.default_rng(0).integers(0, 255, (images, side, side + 3, 1), np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    source = f"array:{tmp_path / 'x.npy'}"
    assert read_pairs(source).x_a.shape == (pairs, crop**2)
    assert read_pairs(source, n=2, crop=1).x_a.shape == (2, 1)
    with pytest.raises(InputError, match=f"n must be at most {images}"):
        read_pairs(source, n=images + 1)
    with pytest.raises(InputError, match=f"crop must be at most {side}"):
        read_pairs(source, crop=side + 1)


def test_the_papers_number_and_crop_where_they_fit():
    chosen, papers = read_pairs("photos"), read_pairs("photos", n=500, crop=20)
    assert all(np.array_equal(a, b) for a, b in zip(chosen[1:], papers[1:], strict=True))


def test_views_are_a_function_of_seed_and_step():
    images = load("photos")
    pairs, other = (view_pairs(images, "simclr-small", 16, seed) for seed in (0, 1))
    rows = torch.arange(10)
    first, second = pairs.fixed(rows), pairs.fixed(rows)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other.fixed(rows)[0])
    assert not torch.equal(first[0], pairs.fixed(rows, 1)[0])
    stream = list(zip(range(3), pairs.stream(iter([rows] * 3), 5), strict=False))
    resumed = next(pairs.copy().stream(iter([rows]), 6))
    assert torch.equal(stream[1][1][0], resumed[0])


def test_small_batches_are_left_out_if_asked():
    pairs = view_pairs(load("photos"), "crop", 16)
    assert [len(a) for a, _ in pairs.fixed_batches(torch.arange(9), batch=4)] == [4, 4, 1]
    assert [len(a) for a, _ in pairs.fixed_batches(torch.arange(9), batch=4, least=2)] == [4, 4]


def test_statistics_can_be_given():
    images = load("photos")
    pairs = view_pairs(images, "crop", 16, mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    plain = view_pairs(images, "crop", 16, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    shift = plain.fixed(torch.arange(4))[0] - pairs.fixed(torch.arange(4))[0]
    assert shift.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.1, 0.2, 0.3], abs=1e-5)
    with pytest.raises(InputError, match="3 numbers, one per channel"):
        view_pairs(images, "crop", 16, mean=(0.5,))


def test_float_images_beyond_one_can_be_studied_where_they_can_be_trained(tmp_path):
    """Plain crops clamp nothing, so any floats train; views of the run are drawn by the same rule."""
    np.save(tmp_path / "x.npy", 3 * load("photos").pixels[:40].astype(np.float32) / 255 - 1)
    recipe = Recipe(data=f"array:{tmp_path / 'x.npy'}", views="crop", size=8, encoder="mlp", hidden=[8], d=2)
    recipe = recipe.with_settings(
        {"encoder_options.inputs": 192, "encoder_options.widths": [8], "steps": 2, "batch": 20}
    )
    run = sw.train(recipe, tmp_path / "run", device="cpu")
    assert fixed_views(run, 10, 0, torch.device("cpu")).shape == (20, 3, 8, 8)
    with pytest.raises(InputError, match="floats from 0 to 1"):
        view_pairs(Images("x", np.load(tmp_path / "x.npy")), "simclr", 8)


@pytest.mark.parametrize("option", [{"n": 5}, {"crop": 8}, {"pixels": "unit"}, {"size": 32}])
def test_options_of_images_are_refused_with_features(tmp_path, option):
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.ones((20, 3)))
    with pytest.raises(InputError, match=f"{next(iter(option))} is for images"):
        read_pairs(str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), **option)
