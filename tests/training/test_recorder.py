"""Embeddings that wait to be summed, in a run that continues under other conditions."""

import pytest
import torch

import stairwise as sw
from stairwise.training import recorder
from stairwise.training.objective import Embedded
from stairwise.training.recorder import Recorder

CPU = torch.device("cpu")


def embedded(n, dtype, seed):
    z = torch.randn(4, n, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Embedded(torch.tensor(1.0), z[0], z[0] + z[1], z[2], z[3])


def observe(into, outs):
    for out in outs:
        into.keep(out)
        into.observe(out.loss, torch.tensor(1.0))
        into.observed()


def continued(outs):
    """A recorder with the state of one that has observed the batches."""
    first, second = (Recorder(CPU, normalized=False, hidden=True) for _ in range(2))
    observe(first, outs)
    state = first.state()
    parts = ({k.removeprefix(f"{part}."): v for k, v in state.items() if k.startswith(part)} for part in WHERE)
    second.load(state["numbers"], *parts)
    return second


WHERE = ("monitor", "shelf")


@pytest.mark.parametrize("before", [3, 11])
@pytest.mark.parametrize(("n", "dtype"), [(8, torch.float32), (12, torch.float32), (8, torch.bfloat16)])
def test_batches_of_another_size_or_precision_are_taken_over(before, n, dtype):
    """As if a run continues on more processes, or on a CPU after a GPU."""
    outs = [embedded(n, dtype, i) for i in range(before)] + [embedded(8, torch.float32, 20 + i) for i in range(7)]
    second = continued(outs[:before])
    assert second.state()["shelf.z"].shape == (3, n, 12)  # also before a new batch comes
    observe(second, outs[before:])
    second.flush()
    found, direct = second.monitor, sw.SpectrumMonitor()
    for out in outs:
        direct.update(*out[1:])
    assert found.compute().samples == direct.compute().samples
    for name in ("eigenvalues", "covariance", "hidden"):
        assert getattr(found.compute(), name) == pytest.approx(getattr(direct.compute(), name), rel=1e-9)


def test_large_representations_take_few_places(monkeypatch):
    monkeypatch.setattr(recorder, "SHELF_BYTES", 2000)
    shelf = recorder.Shelf(CPU)
    shelf.put(z=(torch.zeros(2, 1), torch.zeros(2, 1)), h=(torch.zeros(2, 30), torch.zeros(2, 30)))  # 480 bytes of h
    assert {name: len(rows) for name, rows in shelf.rows.items()} == {"z": 4, "h": 4}  # two per half


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_shelf_holds_what_was_put_there(dtype, transposed):
    """Every bit of it, whatever its layout in memory."""
    shelf, batches = recorder.Shelf(CPU), []
    for i in range(3):
        numbers = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(i)).to(dtype)
        numbers[0, 0, 0] = torch.nan
        if transposed:
            numbers = numbers.transpose(1, 2).contiguous().transpose(1, 2)
        batches.append(numbers)
        shelf.put(z=(numbers[0], numbers[1]))
        shelf.filled += 1
    expected = torch.stack([torch.cat([a, b], dim=1) for a, b in batches])
    torch.testing.assert_close(shelf.held()["z"], expected, rtol=0, atol=0, equal_nan=True)
