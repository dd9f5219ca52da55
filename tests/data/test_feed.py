"""Batches: order, resumption, residence."""

from itertools import islice

import numpy as np
import pytest
import torch

from stairwise.checks import InputError
from stairwise.data.feed import Resident, Streamed, batch_rows, build_feed, channel_statistics, mixed
from stairwise.data.images import Images

CPU = torch.device("cpu")


def some_images(n=23, dtype=np.uint8):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (n, 6, 5, 3)).astype(dtype)


@pytest.mark.parametrize("kind", [Resident, Streamed])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_feeds_give_the_rows_asked_for(kind, dtype):
    pixels = some_images(dtype=dtype)
    rows = [torch.tensor([3, 1]), torch.tensor([22, 0]), torch.tensor([5, 5])] * 4
    for some, batch in zip(rows, kind(pixels, CPU).stream(iter(rows)), strict=True):
        assert batch.shape == (2, 6, 3, 5)
        assert np.array_equal(batch.numpy().transpose(0, 1, 3, 2), pixels[some.numpy()].astype(batch.numpy().dtype))
    assert batch.dtype == (torch.uint8 if dtype == np.uint8 else torch.float32)


def test_streaming_a_memory_mapped_file_and_stopping_early(tmp_path):
    np.save(tmp_path / "images.npy", some_images())
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    stream = Streamed(mapped, CPU).stream(batch_rows(23, 4, seed=0))
    assert len(list(islice(stream, 30))) == 30
    stream.close()


def test_large_images_are_streamed():
    images = Images("toy", some_images())
    assert isinstance(build_feed(images, CPU), Resident)
    assert isinstance(build_feed(images, CPU, budget=100), Streamed)
    with pytest.raises(InputError, match="images, height"):
        build_feed(Images("toy", np.zeros((3, 4))), CPU)


def test_an_epoch_visits_everything_once():
    rows = torch.cat(list(islice(batch_rows(24, 4, seed=1), 6)))
    assert sorted(rows.tolist()) == list(range(24))


@pytest.mark.parametrize("first", [0, 1, 5, 6, 17])
def test_order_is_a_function_of_the_step(first):
    whole = list(islice(batch_rows(27, 4, seed=3), 40))
    rest = list(islice(batch_rows(27, 4, seed=3, first=first), 40 - first))
    assert all(torch.equal(a, b) for a, b in zip(whole[first:], rest, strict=True))
    assert not torch.equal(whole[0], whole[6])  # a new shuffle every epoch


def test_processes_share_a_batch():
    whole = list(islice(batch_rows(24, 6, seed=3), 9))
    shares = [list(islice(batch_rows(24, 6, seed=3, rank=r, world=3), 9)) for r in range(3)]
    for i in range(9):
        assert torch.equal(torch.cat([share[i] for share in shares]), whole[i])


def test_bad_batches_and_pixels():
    with pytest.raises(InputError, match="at most 3"):
        next(batch_rows(3, 4, seed=0))
    with pytest.raises(InputError, match="finite"):
        channel_statistics(np.full((2, 2, 2, 3), np.nan))


def test_statistics():
    pixels = some_images()
    mean, std = channel_statistics(pixels)
    assert mean.numpy() == pytest.approx((pixels / 255).mean((0, 1, 2)), rel=1e-6)
    assert std.numpy() == pytest.approx((pixels / 255).std((0, 1, 2)), rel=1e-6)
    assert channel_statistics(np.zeros((2, 2, 2, 1), np.uint8))[1].tolist() == [1.0]


def test_mixed_seeds_differ():
    assert len({mixed(a, b) for a in range(20) for b in range(20)}) == 400
    assert mixed(1, 2) == mixed(1, 2)


def test_repeated_images_are_those_of_a_smaller_batch():
    smaller = list(islice(batch_rows(27, 4, seed=3), 12))
    repeated = list(islice(batch_rows(27, 8, seed=3, repeats=2), 12))
    assert all(torch.equal(both, one.repeat(2)) for both, one in zip(repeated, smaller, strict=True))
