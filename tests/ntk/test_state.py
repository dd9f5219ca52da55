"""Settings of torch and the state of models are restored."""

import subprocess
import sys

import torch
from torch import nn

from stairwise.ntk.empirical import empirical_ntk

# torch's old and new settings do not mix, so each case needs a process of its own
SETTINGS = """
import os, torch
from stairwise.ntk.empirical import empirical_ntk
from stairwise.kernel.precision import float32_products
torch.set_num_threads(1)
backends = torch.backends
new = hasattr(backends.cuda.matmul, "fp32_precision")

def set_up(name):
    if name == "matmul.fp32" and new: backends.cuda.matmul.fp32_precision = "tf32"
    if name == "all" and new: backends.fp32_precision = "tf32"
    if name == "cudnn" and new: backends.cudnn.fp32_precision = "tf32"
    if name == "conv" and new: backends.cudnn.conv.fp32_precision = "ieee"
    if name == "medium": torch.set_float32_matmul_precision("medium")
    if name == "legacy": backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = True, False

def state():
    calls = [lambda: backends.cuda.matmul.allow_tf32, lambda: backends.cudnn.allow_tf32]
    calls += [torch.get_float32_matmul_precision]
    if new: calls += [lambda: backends.cuda.matmul.fp32_precision, lambda: backends.cudnn.conv.fp32_precision]
    if new: calls += [lambda: backends.cudnn.rnn.fp32_precision, lambda: backends.mkldnn.matmul.fp32_precision]
    values = []
    for call in calls:
        try: values.append(call())
        except RuntimeError: values.append("mixed")
    return values

def check(name):
    set_up(name)
    before = state()
    with float32_products(tf32=False):
        inside = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul] if new else []
        assert not {place.fp32_precision for place in inside} & {"tf32", "bf16"}
    for precision in ("float32", "tf32"):
        empirical_ntk(torch.nn.Linear(3, 2), torch.randn(4, 3), precision=precision)
    assert state() == before, (name, before, state())
    try:
        with float32_products(tf32=True): raise KeyError
    except KeyError: pass
    assert state() == before
    if name == "all" and new:  # settings that were inherited still are
        backends.fp32_precision = "ieee"
        assert backends.cuda.matmul.fp32_precision == "ieee"

for name in ("matmul.fp32", "all", "cudnn", "conv", "medium", "legacy", "nothing"):
    child = os.fork()
    if not child:
        check(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_settings_of_torch_are_restored():
    assert subprocess.run([sys.executable, "-c", SETTINGS], check=False).returncode == 0


class Caching(nn.Module):
    """Keeps things in its forward pass: a table and its length, a list, a tensor that is written to."""

    def __init__(self):
        super().__init__()
        self.layer, self.n, self.cos, self.seen = nn.Linear(8, 3), None, None, []
        self.total, self.gain = torch.zeros(3), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
        self.register_buffer("queue", torch.zeros(0))

    def forward(self, x):
        if self.n != x.shape[1]:
            self.n = x.shape[1]
            self.cos = torch.cos(torch.arange(self.n) * 1.0)
        out = self.layer(x * self.cos) * self.gain * self.mask[:1]
        self.seen.append(len(x))
        self.total += 1
        self.queue.resize_(len(x))
        return out


def test_what_a_model_keeps_is_restored():
    model, x = Caching(), torch.randn(9, 8)
    loss = model(x).sum()
    n, cos, seen, total, queue = model.n, model.cos, list(model.seen), model.total.clone(), len(model.queue)
    empirical_ntk(model, x)
    assert (model.n, model.seen, len(model.queue)) == (n, seen, queue)
    assert model.cos is cos
    assert torch.equal(model.total, total)
    loss.backward()  # nothing in its graph has been written to
    model(x)
    fresh = Caching()
    empirical_ntk(fresh, x)
    assert (fresh.n, fresh.cos, fresh.seen) == (None, None, [])
    fresh(x)


def test_a_module_with_two_names_keeps_its_parameters():
    """torch.func.functional_call would restore them as plain tensors."""
    layer = nn.Linear(6, 6, bias=False)
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    before = dict(model.named_parameters())
    empirical_ntk(model, torch.randn(4, 6))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is p for name, p in before.items())
