"""Tables 1 and 2 and the modes that come next: how their claims are judged, from invented measurements."""

import json

import numpy as np
import pytest

from stairwise.checks import InputError
from stairwise.ntk.lengths import SCALES
from stairwise.paper import coming, table1, table2
from stairwise.theory.spectra import subspace_alignment
from tests.paper.test_predictions import PREDICTED


def spans(seed=0):
    """Embeddings of two methods in 6 dimensions on 100 pairs; of the first, three modes have grown."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((200, 6)) * [9, 8, 7, 0.1, 0.1, 0.1]
    return first, first @ rng.standard_normal((6, 6)) + rng.standard_normal((200, 6))


def test_spans_of_several_draws():
    """Table 2: means and spreads over three draws of pairs, and grown modes within all of the other method."""
    draws = [spans(seed) for seed in range(3)]
    found = [table2.compared(list(one)) for one in draws]
    arrays = {name: np.array([one[name] for one in found]) for name in found[0]}
    arrays |= {"about": np.array(json.dumps({"bt": {}, "vicreg": {}})), "points": np.array(200), "d": np.array(6)}
    values = [subspace_alignment(*one) for one in draws]
    mean, spread = np.mean(values), np.std(values, ddof=1)
    assert table2.table(arrays).rows[0][2] == f"{mean:.3f} ± {spread:.3f}"
    modes = [np.linalg.svd(first, full_matrices=False)[0][:, :3] for first, _ in draws]
    shares = [subspace_alignment(a, b) for a, (_, b) in zip(modes, draws, strict=True)]
    assert table2.grown_table(arrays).rows[0][0] == "Barlow Twins, 3 grown"
    assert table2.grown_table(arrays).rows[0][2].startswith(f"{np.mean(shares):.3f} ± ")
    claims = table2.check(arrays)
    assert [claim.text for claim in claims] == [
        "Barlow Twins and VICReg",
        "grown modes of Barlow Twins within VICReg",
        "grown modes of VICReg within Barlow Twins",
    ]
    assert all(claim.judged and claim.holds for claim in claims)
    arrays["grown_in"][1, 0, 1] = 0.01
    assert [claim.holds for claim in table2.check(arrays)] == [True, False, True], "every draw counts"
    assert table2.joined(arrays) is arrays
    with pytest.raises(InputError, match="cannot add methods"):
        table2.joined(arrays | {"about": np.array(json.dumps({"bt": {}, "vicreg": {}, "simclr": {}}))})


def test_shares_that_rise_with_s():
    """Judged, in the mean over draws, from s = 1 to 2 and from 2 to 4."""
    scores = json.dumps({"theory": 0.4, "kernel PCA": 0.3, "chance": 0.025})
    shares = np.zeros((3, 6, 5))
    shares[:, :, 0] = [0.1, 0.2, 0.40, 0.52, 0.69, 0.6]  # s from 1/4 to 8
    shares[:, :, 1] = [0.1, 0.2, 0.29, 0.28, 0.58, 0.6]
    arrays = {
        "about": np.array(json.dumps({"bt-large": {"data": "stl10", "seed": 0}})),
        "bt-large.scores": np.array(scores),
        "bt-large.draws": np.array([[0.40, 0.29], [0.41, 0.30], [0.39, 0.40]]),
        "bt-large.kernels": np.array([f"s = {s:g}" for s in SCALES]),
        "bt-large.lengths": shares,
        "bt-large.hidden": np.zeros((3, 3)),
    }
    claims = {claim.text.removeprefix("Barlow Twins, batch 256: "): claim for claim in table1.check(arrays)}
    rises = [
        claims[f"{way}, smallest rise from s = 1 to 2 and from 2 to 4, predicted"] for way in ("theory", "kernel PCA")
    ]
    assert [(claim.holds, claim.judged) for claim in rises] == [(True, True), (False, True)]
    assert [claim.measured for claim in rises] == pytest.approx([0.12, -0.01])
    assert (claims["theory at s = 4"].measured, claims["theory at s = 4"].predicted) == (0.69, 0.69)
    draws = claims["theory less kernel PCA, smallest of 3 draws of pairs"]
    assert draws.measured == pytest.approx(-0.01)
    assert not draws.holds
    for name, data in (("bt-large", "photos"), ("bt", "stl10")):
        other = {key.replace("bt-large", name): value for key, value in arrays.items()}
        other["about"] = np.array(json.dumps({name: {"data": data, "seed": 0}}))
        texts = [claim.text for claim in table1.check(other)]
        assert not any(text.endswith("predicted") for text in texts)
        assert sum("smallest rise" in text for text in texts) == 2, "judged all the same"


def test_the_code_judges_what_the_page_says():
    low, high = (" and ".join(f"{table1.FORESEEN[way, s]:.2f}" for way in table1.DRAWN) for s in table1.RISING[::2])
    assert f"theory and kernel PCA rise with s, from {low} at s = 1 to {high} at s = 4" in PREDICTED
    assert "theory above kernel PCA above chance, both rising with s" in PREDICTED
    arrays = {
        "about": np.array(json.dumps({"bt-large": {"data": "stl10", "seed": 0}})),
        "bt-large.scores": np.array(json.dumps({"theory": 0.4, "kernel PCA": 0.3, "chance": 0.025})),
        "bt-large.carried": np.array([33.0, 40.0, 47.0]),
    }
    found = {claim.text: claim.holds for claim in table1.check(arrays) if claim.text.endswith("predicted")}
    assert list(found.values()) == [False, True]
    assert "at least 47 of 50 modes of variance above 0.1" in PREDICTED
    assert "within 15 %" in PREDICTED


def test_next_modes_are_judged():
    """In every draw, against twice chance; and there must be moments before new modes."""
    shares, chance = np.full((3, 4, 2, 5, 2), 0.3), np.full((3, 4, 5, 2), 0.05)
    shares[:, 3] = np.nan
    arrays = {
        "about": np.array(json.dumps({"simclr": {}})),
        "simclr.steps": np.array([100, 200, 300, 400, 500]),
        "simclr.grown": np.array([1, 2, 2, 4, 4]),
        "simclr.until": np.array([1, 3, 3, -1]),
        "simclr.shares": shares,
        "simclr.chance": chance,
    }
    claims = [claim for claim in coming.check(arrays) if claim.judged]
    assert [claim.holds for claim in claims] == [True, True]
    assert "0.300 ± 0.000" in coming.table(arrays).rows[0]
    assert [row[1:3] for row in coming.moments_table(arrays).rows] == [
        ["100 to 200", "1 → 2"],
        ["200 to 400", "2 → 4"],
        ["300 to 400", "2 → 4"],
    ]
    shares[1, :3, 0, 2, 0] = 0.09
    assert [claim.holds for claim in coming.check(arrays) if claim.judged] == [True, False]
    shares[1, :3, 0, 2, 0] = 0.3
    shares[:, 1, :, 2, 0] = chance[:, 1, 2, 0] = np.nan  # the kernel of directions predicts nothing at one moment
    assert [claim.holds for claim in coming.check(arrays) if claim.judged] == [True, True]
    assert coming.means(arrays, "simclr")[0] == pytest.approx(np.full((3, 5, 2), 0.3))
    arrays["simclr.until"] = np.full(4, -1)
    arrays["simclr.shares"] = np.full_like(shares, np.nan)
    assert [claim.holds for claim in coming.check(arrays) if claim.judged] == [False, False]
    assert coming.table(arrays).rows[0][3:] == ["–", "–", "–"]
