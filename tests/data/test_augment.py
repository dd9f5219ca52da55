"""Views against Pillow, scipy, colorsys and the statistics that their definitions imply."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest
import scipy.ndimage
import torch
from PIL import Image, ImageEnhance, ImageOps

from stairwise.checks import InputError
from stairwise.data import augment as A
from stairwise.data.augment import PIPELINES, View, augment, full_view, to_layout
from stairwise.data.images import load

ZERO, ONE = torch.zeros(3), torch.ones(3)
NOTHING = View((1.0, 1.0), (1.0, 1.0), flip=0, jitter=0, gray=0, blur=0)
PHOTOS = load("photos").pixels


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def view_of(images, view, size=32, seed=0):
    """As (N, H, W, channels), unnormalized."""
    return augment(to_layout(torch.tensor(images)), view, size, generator(seed), ZERO, ONE).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize("box", [(3, 5, 20, 17), (0, 0, 32, 32), (10, 2, 7, 30), (31, 31, 1, 1)])
@pytest.mark.parametrize("size", [32, 50, 12])
def test_resizing_is_pillows(resample, box, size):
    top, left, h, w = box
    plane = PHOTOS[7, :, :, 0].astype(np.float32)
    kind = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[resample]
    expected = np.asarray(Image.fromarray(plane).crop((left, top, left + w, top + h)).resize((size, size), kind))
    rows, columns = (
        A.resize_matrices(torch.tensor([float(start)]), torch.tensor([float(length)]), 32, size, resample)[0].numpy()
        for start, length in ((top, h), (left, w))
    )
    assert rows @ plane @ columns.T == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_scipys_gaussian(sigma):
    plane = PHOTOS[3, :, :, 1].astype(np.float64)
    W = A.blur_matrices(torch.tensor([sigma]), 32)[0].double().numpy()
    expected = scipy.ndimage.gaussian_filter(plane, sigma, mode="mirror", truncate=8)
    assert W @ plane @ W.T == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("shift", [-0.3, -0.1, 0.0, 0.04, 0.5])
def test_hue_is_colorsys(shift):
    x = torch.tensor(PHOTOS[:4], dtype=torch.float32)[:, ::5, ::5] / 255
    found = A.turn_hue(to_layout(x), torch.full((4,), shift)).transpose(2, 3).reshape(-1, 3).numpy()
    hsv = [colorsys.rgb_to_hsv(*p) for p in x.reshape(-1, 3).tolist()]
    expected = [colorsys.hsv_to_rgb((h + shift) % 1, s, v) for h, s, v in hsv]
    assert found == pytest.approx(np.array(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("operation", "enhancer"), [(0, ImageEnhance.Brightness), (1, ImageEnhance.Contrast), (2, ImageEnhance.Color)]
)
@pytest.mark.parametrize("factor", [0.6, 1.4])
def test_blends_are_pillows(operation, enhancer, factor):
    x = to_layout(torch.tensor(PHOTOS[:3], dtype=torch.float32) / 255)
    found = A._blend(x, torch.full((3,), operation), torch.full((3, 1), factor)).transpose(2, 3).numpy() * 255
    expected = np.stack([np.asarray(enhancer(Image.fromarray(p)).enhance(factor)) for p in PHOTOS[:3]])
    assert found == pytest.approx(expected, abs=1.5)  # Pillow rounds, the mean gray too


def test_gray_and_solarize_are_pillows():
    gray = view_of(PHOTOS[:8], replace(NOTHING, gray=1.0)) * 255
    assert gray == pytest.approx(
        np.stack([np.asarray(Image.fromarray(p).convert("L").convert("RGB")) for p in PHOTOS[:8]]), abs=1
    )
    solar = view_of(PHOTOS[:8], replace(NOTHING, solarize=1.0)) * 255
    assert solar == pytest.approx(
        np.stack([np.asarray(ImageOps.solarize(Image.fromarray(p), 128)) for p in PHOTOS[:8]]), abs=1e-3
    )


def test_nothing_to_do_changes_nothing_and_flip_flips():
    assert view_of(PHOTOS[:9], NOTHING) == pytest.approx(PHOTOS[:9] / 255, abs=1e-6)
    assert view_of(PHOTOS[:9], replace(NOTHING, flip=1.0)) == pytest.approx(PHOTOS[:9, :, ::-1] / 255, abs=1e-6)


def test_normalization_and_whole_view():
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])
    images = to_layout(torch.tensor(PHOTOS[:5]))
    expected = (torch.tensor(PHOTOS[:5]) / 255 - mean) / std
    for x in (augment(images, NOTHING, 32, generator(), mean, std), full_view(images, 32, mean, std)):
        assert x.shape == (5, 3, 32, 32)
        assert x.is_contiguous()  # on a CPU
        assert x.permute(0, 2, 3, 1).numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    middle = full_view(images, 20, mean, std, crop=True)
    assert middle.permute(0, 2, 3, 1).numpy() == pytest.approx(expected[:, 6:26, 6:26].numpy(), abs=1e-5)
    assert full_view(images, 16, mean, std).shape == (5, 3, 16, 16)


def test_every_image_keeps_its_row_and_its_own_parameters():
    """Constant images of different gray stay in order; equal images come out different."""
    levels = np.linspace(30, 220, 40).astype(np.uint8)
    constant = np.broadcast_to(levels[:, None, None, None], (40, 32, 32, 3)).copy()
    crops = view_of(constant, replace(NOTHING, scale=(0.2, 1.0), flip=0.5, blur=0.5))
    assert crops.mean(axis=(1, 2, 3)) * 255 == pytest.approx(levels, abs=0.01)
    same = view_of(np.repeat(PHOTOS[:1], 30, axis=0), PIPELINES["simclr"][0])
    assert len({v.tobytes() for v in same}) == 30


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("side", [(32, 32), (24, 40)])
def test_pipelines_stay_in_range_and_repeat(name, side):
    images = np.random.default_rng(0).integers(0, 256, (11, *side, 3), dtype=np.uint8)
    for view in PIPELINES[name]:
        first, again, other = (view_of(images, view, 20, seed) for seed in (1, 1, 2))
        assert first.shape == (11, 20, 20, 3)
        assert first.min() >= -1e-6
        assert first.max() <= 1 + 1e-6
        assert np.array_equal(first, again)
        assert name == "none" or not np.array_equal(first, other)


def test_images_of_one_channel_and_floats():
    digits = load("digits").pixels[:6]
    x = augment(to_layout(torch.tensor(digits)), PIPELINES["simclr"][0], 8, generator(), torch.zeros(1), torch.ones(1))
    assert x.shape == (6, 1, 8, 8)
    floats = torch.tensor(PHOTOS[:4]) / 255
    assert torch.allclose(
        augment(to_layout(floats), PIPELINES["simclr"][0], 32, generator(), ZERO, ONE),
        augment(to_layout(torch.tensor(PHOTOS[:4])), PIPELINES["simclr"][0], 32, generator(), ZERO, ONE),
        atol=1e-6,
    )


# statistics, within 3σ of what the definitions say

N = 20_000


def crop_boxes(view, height=96, width=96, size=96, n=N):
    return [b.numpy() for b in A.crop_boxes(n, height, width, size, view, generator(3), torch.device("cpu"))]


def test_crop_boxes_are_torchvisions():
    view = View((0.2, 1.0))
    top, left, h, w = crop_boxes(view)
    assert ((top >= 0) & (left >= 0) & (top + h <= 96) & (left + w <= 96)).all()
    # the rule in plain words: draw area and log-ratio until the box fits
    rng = np.random.default_rng(0)
    areas, ratios = [], []
    while len(areas) < N:
        area = 96 * 96 * rng.uniform(0.2, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w_, h_ = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w_ <= 96 and 0 < h_ <= 96:
            areas.append(w_ * h_)
            ratios.append(np.log(w_ / h_))
    for found, expected in ((h * w, np.array(areas)), (np.log(w / h), np.array(ratios))):
        for statistic in (lambda v: v, lambda v: (v - v.mean()) ** 2):
            a, b = statistic(found), statistic(expected)
            assert abs(a.mean() - b.mean()) < 3 * np.sqrt(a.var() / N + b.var() / N)
    # positions: uniform over the room that is left
    room = 96 - h[h < 96]
    share = (top[h < 96] + 0.5) / (room + 1)
    assert abs(share.mean() - 0.5) < 3 * share.std() / np.sqrt(len(share))


def test_plain_crops_are_uniform_and_bounded():
    top, _, h, w = crop_boxes(View(None), 32, 32, 20)
    assert set(h) == set(w) == {20.0}
    counts = np.bincount(top.astype(int), minlength=13)
    assert len(counts) == 13
    assert (np.abs(counts - N / 13) < 4 * np.sqrt(N / 13)).all()
    with pytest.raises(InputError, match="at most 16"):
        crop_boxes(View(None), 16, 32, 20)


def test_no_box_fits_a_very_wide_image_so_it_is_cut_in_the_middle():
    top, left, h, w = crop_boxes(View((1.0, 1.0)), 32, 96, 32)
    assert set(h) == {32.0}
    assert set(w) == {43.0}
    assert set(left) == {26.0}
    assert set(top) == {0.0}


@pytest.mark.parametrize("name", ["flip", "gray", "blur", "solarize", "jitter"])
def test_probabilities(name):
    n, p = 4000, 0.3
    images = np.repeat(PHOTOS[30:31, :16, :16], n, axis=0)
    changed = view_of(images, replace(NOTHING, **{name: p}, sigma=(1.0, 1.0)), 16) - images / 255
    share = (np.abs(changed).max(axis=(1, 2, 3)) > 2e-3).mean()
    assert abs(share - p) < 3 * np.sqrt(p * (1 - p) / n)


def test_jitter_factors_are_uniform():
    """Brightness alone scales a dark constant image by U(0.6, 1.4)."""
    n = 4000
    dark = np.full((n, 8, 8, 3), 60, np.uint8)
    only = replace(NOTHING, jitter=1.0, strengths=(0.4, 0.0, 0.0, 0.0))
    factor = view_of(dark, only, 8).mean(axis=(1, 2, 3)) * 255 / 60
    assert factor.min() >= 0.6 - 1e-4
    assert factor.max() <= 1.4 + 1e-4
    assert abs(factor.mean() - 1) < 3 * 0.8 / np.sqrt(12 * n)
    assert abs(factor.var() - 0.64 / 12) < 3 * 0.64 / 12 * np.sqrt(0.8 / n)


def test_all_orders_of_colour_operations_occur(monkeypatch):
    """Operations write their number into the image: brightness 1, contrast 2, saturation 3, hue 4."""
    monkeypatch.setattr(A, "_blend", lambda x, which, factor: 10 * x + (which + 1).view(-1, 1, 1, 1))
    monkeypatch.setattr(A, "turn_hue", lambda x, shift: 10 * x + 4)
    n = 9600
    written = A._jitter(torch.zeros(n, 1, 3, 1), View(jitter=1.0), generator())[:, 0, 0, 0].numpy().astype(int)
    orders, counts = np.unique(written, return_counts=True)
    assert {"".join(sorted(str(o))) for o in orders} == {"1234"}
    assert len(orders) == 24
    assert (np.abs(counts - n / 24) < 4 * np.sqrt(n / 24)).all()


def test_bad_views_are_refused():
    with pytest.raises(InputError, match="probability"):
        View(flip=1.5)
    with pytest.raises(InputError, match="did you mean 'bicubic'"):
        View(resample="bicubik")
