"""The benchmark of probes of kernel embeddings, with few photographs."""

import json

import pytest
import torch

import stairwise as sw
from benchmarks import bench_kernel_probes as bench
from stairwise.checks import InputError


@pytest.mark.slow
def test_every_embedding_is_probed(tmp_path):
    sizes = bench.Sizes(60, 20, 100, 60, 4, 30, 3, "flatten", 1 << 28, (*bench.QUICK.tuned, ("steps", 3)))
    found = bench.measure(bench.photographs(), sizes, 1.0, torch.device("cpu"))
    lines = {(line["of"], line["kernel"], line["method"].lstrip("0123456789 ")): line for line in found["rows"]}
    assert set(lines) >= {
        ("pixels", "conv NTK", "landmarks"),
        ("network", "linear", "exact"),
        ("pixels", "RBF", "exact"),
    }
    assert len(found["rows"]) == 9
    for line in found["rows"]:
        assert (line["fit_s"] > 0) == (line["embed_s"] > 0) == (line["kernel"] != "no kernel")
        assert line["d"] == 4 or line["kernel"] == "no kernel"
    assert lines["pixels", "RBF", "exact"]["logistic"] > 60  # chance is about 50
    (tmp_path / "found.json").write_text(json.dumps(found))
    assert bench.table(tmp_path / "found.json").count("\n| ") == 9


def test_only_too_many_modes_halve_d():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sets = bench.Sets(x, x, x, x, None, None)
    _, est = bench.fitted(sw.KernelSSL(8, kernel="linear"), sets, torch.device("cpu"))
    assert est.n_components == 2
    bad = sw.KernelSSL(8, kernel="ntk", method="features")
    with pytest.raises(InputError, match="no random features"):
        bench.fitted(bad, sets, torch.device("cpu"))
    assert bad.n_components == 8


def test_the_page_shows_what_is_stored(tmp_path):
    assert bench.table(tmp_path / "nothing.json") == bench.NOTHING
    text = bench.PAGE.read_text(encoding="utf-8")
    assert bench.filled(text, {"probes": bench.table(bench.STORED)}) == text
