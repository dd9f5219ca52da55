"""Which parameters rules cover, and models that rules, vmap or a second call of the model could get wrong."""

from contextlib import suppress
from copy import deepcopy
from io import BytesIO

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stairwise.checks import InputError
from stairwise.ntk.capture import Capture, RulesChanged
from stairwise.ntk.empirical import empirical_ntk
from tests.ntk.zoo import Net, apply, build, by_autograd, conv, mean, pool, scale, twice


def check(model, x, **tolerance):
    """The kernel equals that of autograd."""
    exact = by_autograd(model, x)
    torch.testing.assert_close(empirical_ntk(model, x), exact, **tolerance)


SINGLE = {"rtol": 1e-4, "atol": 1e-5}


def verified(model, x):
    """Parameters that rules cover after the trial."""
    capture = Capture(model, mean, x)
    with suppress(RulesChanged):
        capture.factors(x)
    return capture.by_rule


def test_rules_are_used_where_they_hold():
    """Otherwise the zoo would only test vmap."""
    for name, rules in (("tied", {"mix.weight", "mix.bias"}), ("called twice", {"out.weight", "out.bias"})):
        assert verified(*build(name)) == rules
    model, x = build("resnet")
    assert verified(model, x) == {name for name, _ in model.named_parameters()}
    assert "out.weight" not in verified(*build("attention, samples second"))
    assert "into.weight" in verified(*build("attention"))


def two_names():
    """One parameter under two names."""
    w = nn.Parameter(torch.randn(5, 4))
    return Net(lambda m, x: torch.tanh(x @ m.w) @ m.v.T, w=w, v=w)


def deeper():
    """Calls a layer once more for some samples."""

    def forward(m, x):
        h = torch.tanh(m.layer(x))
        if bool((x[:, 0] > 5).any()):
            h = torch.where(x[:, :1] > 5, torch.tanh(m.layer(h)), h)
        return m.out(h)

    return Net(forward, layer=nn.Linear(6, 6), out=nn.Linear(6, 2))


def experts():
    """Sends each sample to one of two layers."""

    def forward(m, x):
        out, mask = x.new_zeros(len(x), 3), x[:, 0] > 0
        out[mask], out[~mask] = m.a(x[mask]), m.b(x[~mask])
        return out

    return Net(forward, a=nn.Linear(6, 3), b=nn.Linear(6, 3))


def tokens_first():
    """Hands its layer (tokens, samples, features)."""
    return Net(lambda m, x: m.layer(x.transpose(0, 1))[0], layer=nn.Linear(5, 3))


def one_at_a_time(inner):
    """Branches on values see one sample."""
    return Net(lambda m, x: torch.cat([m.inner(x[i : i + 1]) for i in range(len(x))]), inner=inner)


def branching(x):
    """vmap cannot batch this."""
    return x * (2.0 if float(x.detach().sum()) > 0 else 1.0)


def reused():
    layer = nn.Linear(6, 6, bias=False)
    return nn.Sequential(layer, nn.ReLU(), layer)


def changed_padding(padding, dilation):
    model = conv(4, 6, 3)()
    model[0].padding, model[0].dilation = padding, dilation  # some segmentation networks are made this way
    return model


def blank_first(x):
    return torch.cat([torch.zeros_like(x[:1]), x[1:]])


def with_large(x, row):
    x[row, 0] = 9.0
    return x


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (twice, blank_first(torch.randn(6, 6))),
        (reused, blank_first(torch.randn(6, 6))),
        (experts, torch.randn(9, 6)),
        (experts, torch.randn(9, 6).abs()),
        (tokens_first, torch.randn(3, 3, 5)),
        (tokens_first, torch.randn(4, 3, 5)),
        (tokens_first, torch.randn(7, 3, 5)),
        (two_names, torch.randn(6, 5)),
        (lambda: changed_padding((2, 2), (2, 2)), torch.randn(5, 4, 8, 8)),
        (lambda: changed_padding([0, 0], (1, 1)), torch.randn(5, 4, 8, 8)),
        (
            lambda: nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten()),
            torch.arange(40).view(8, 5) % 9 // 2,
        ),
        (lambda: nn.Linear(6, 2), torch.randn(1, 6)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 2)), torch.randn(5, 6)),
        (deeper, with_large(torch.randn(70, 6), 6)),  # not in the trial
        (deeper, with_large(torch.randn(70, 6), 65)),  # not in the first piece either
        (deeper, with_large(torch.randn(70, 6), 66)),  # in the trial of the second piece
        (lambda: one_at_a_time(nn.Sequential(scale(6), apply(branching), nn.Linear(6, 2))), torch.randn(5, 6)),
    ],
)
def test_what_the_trial_could_overlook(make, x):
    torch.manual_seed(0)
    model = make().double().eval()
    check(model, x.double() if x.is_floating_point() else x, rtol=1e-9, atol=1e-9)


def sorting(by_expert):
    """Its first layer sees samples in another order: by expert, or by number."""

    def forward(m, x):
        order = (x[:, 0] > 0).long().argsort(stable=True) if by_expert else x[:, 0].argsort()
        return m.last(torch.tanh(m.first(x[order]))[order.argsort()])

    return Net(forward, first=nn.Linear(5, 6), last=nn.Linear(6, 3))


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_samples_in_another_order(by_expert, seed):
    torch.manual_seed(seed)
    check(sorting(by_expert).double(), torch.randn(20, 5).double())


def test_samples_that_are_sorted_later():
    """Not in the first piece, and in y but not in x."""
    torch.manual_seed(0)
    model, x = sorting(True).double(), torch.randn(130, 5).double()
    x[:64, 0] = -x[:64, 0].abs()
    exact = by_autograd(model, x)
    torch.testing.assert_close(empirical_ntk(model, x), exact)
    torch.testing.assert_close(empirical_ntk(model, x[:40], x[64:100]), exact[:40, 64:100])


def token_rows():
    """Layers that get other numbers of rows than samples: tokens of all samples, and a table."""

    def forward(m, x):
        tokens = torch.tanh(m.tokens(x.reshape(-1, 4))).view(*x.shape[:2], 6)
        return m.head(torch.tanh(tokens + m.positions(torch.ones(7, 2)).mean(0)).mean(1))

    return Net(forward, tokens=nn.Linear(4, 6), positions=nn.Linear(2, 6), head=nn.Linear(6, 3))


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_layers_that_are_given_other_numbers_of_rows(n, length):
    torch.manual_seed(0)
    model, x = token_rows(), torch.randn(n, length, 4)
    check(model, x, **SINGLE)
    if length > 1:
        assert verified(model, x) == {"head.weight", "head.bias"}


class OldFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def awkward(what):
    """What torch.func cannot do, between two layers and a free scalar parameter."""

    def forward(m, x):
        h = torch.tanh(m.first(x)) * m.gain
        if what == "function":
            h = OldFunction.apply(h)
        elif what == "checkpoint":
            h = checkpoint(torch.sin, h, use_reentrant=False)
        elif what == "count":
            m.calls += 1
        elif what == "reassign":
            m.calls = m.calls + h.detach().mean()
            m.kept = h
        elif what == "numpy":
            h = h * float(x.numpy().shape[1])
        elif what == "energy":
            inner = h.detach().requires_grad_()
            h = h * torch.autograd.grad((inner**3).sum(), inner)[0]
        elif what == "force":
            (h,) = torch.autograd.grad((h**3).sum(), h, create_graph=True)
        return m.last(h)

    free = {"gain": torch.tensor(0.7), "unused": torch.ones(2)}
    model = Net(forward, first=nn.Linear(5, 6), last=nn.Linear(6, 3), kept=None, **free)
    model.register_buffer("calls", torch.zeros(()))
    return model


@pytest.mark.parametrize("what", ["plain", "function", "checkpoint", "count", "reassign", "numpy", "energy", "force"])
def test_models_that_torch_func_cannot_take(what):
    """The kernel equals that of autograd, and the model is restored."""
    torch.manual_seed(0)
    model, x = awkward(what).double().eval(), torch.randn(9, 5).double()
    exact = by_autograd(model, x)
    model.calls = torch.zeros(()).double()
    model.kept, calls = None, model.calls
    for _ in range(2):
        torch.testing.assert_close(empirical_ntk(model, x), exact)
        assert model.calls is calls
        assert float(calls) == 0
        assert model.kept is None
    model(x)
    torch.save(model.state_dict(), BytesIO())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_models():
    torch.manual_seed(0)
    inner, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 5).double()
    torch.testing.assert_close(empirical_ntk(torch.jit.script(inner), x), by_autograd(inner, x))


def test_lazy_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)).eval()
    x = torch.randn(6, 8)
    K = empirical_ntk(model, x)
    torch.testing.assert_close(K, by_autograd(model, x), **SINGLE)


def test_weights_that_a_model_has_stored_elsewhere():
    """torch.func would not see them."""
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
    model, x = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 2)).double().eval(), torch.randn(9, 8).double()
    exact = by_autograd(model, x)
    with nn.utils.parametrize.cached():
        torch.testing.assert_close(empirical_ntk(model, x), exact)


def test_models_that_do_not_take_samples_with_gradients():
    def picky(x):
        assert not x.requires_grad
        return x

    x = torch.randn(5, 6)
    torch.testing.assert_close(empirical_ntk(nn.Sequential(apply(picky), nn.Linear(6, 3)), x), x @ x.T + 1)


def test_a_model_minus_itself_is_not_random():
    """Its outputs are rounding and nothing else."""
    torch.manual_seed(0)
    now = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), pool())

    then = deepcopy(now).requires_grad_(False)
    model = Net(lambda m, x: m.now(x) - m.then(x), now=now, then=then)
    x = torch.randn(70, 3, 9, 9)
    torch.testing.assert_close(empirical_ntk(model, x), empirical_ntk(now, x), **SINGLE)


class Strict(torch.autograd.Function):
    """Checks for nan in the backward pass."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        if torch.isnan(g).any():
            raise ValueError("not a number")
        return g


@pytest.mark.parametrize("anomalies", [False, True])
@pytest.mark.parametrize(
    ("function", "sample"),
    [
        (torch.tanh, 7),
        (torch.tanh, 69),  # not in the first piece
        (lambda z: z - z.mean(0), 7),
        (lambda z: z + torch.randn_like(z), 7),
        (lambda z: z + torch.randn_like(z), 9),  # in the trial
        (lambda z: Strict.apply(z).sqrt(), 7),
        (lambda z: Strict.apply(z).sqrt(), 9),
        (lambda z: 1 / F.relu(z), 9),
    ],
)
def test_outputs_that_are_not_finite_are_named_first(function, sample, anomalies):
    """Whatever else is wrong with the model, with rules and without."""
    torch.manual_seed(0)
    x = torch.rand(max(20, sample + 1), 6)
    x[sample] = torch.nan
    for layer in (nn.Linear(6, 20), scale(6), reused()):
        model = nn.Sequential(layer, apply(function))
        with torch.autograd.set_detect_anomaly(anomalies), pytest.raises(InputError, match="output must be finite"):
            empirical_ntk(model, x)


def test_rules_are_tried_once_and_after_the_graph_is_gone(monkeypatch):
    """While the graph lives, torch makes gradients of the trial wait for its stream."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(150, 6)
    forward, passes, tried, seen = Capture._forward, Capture._passes, Capture._try_rules, []

    def node():
        return torch.autograd.graph.get_gradient_edge(model[0].weight).node

    def marked(self, x):
        out = forward(self, x)
        node().metadata["mark"] = True
        return out

    def watched(self, x):
        out = passes(self, x)
        seen.append("kept" if "mark" in node().metadata else "gone")
        return out

    monkeypatch.setattr(Capture, "_forward", marked)
    monkeypatch.setattr(Capture, "_passes", watched)
    monkeypatch.setattr(Capture, "_try_rules", lambda self, x: (seen.append("tried"), tried(self, x))[1])
    empirical_ntk(model, x, memory=2e5)
    assert seen.count("tried") == 1
    assert seen.count("gone") > 2
    assert "kept" not in seen


def wide():
    big = torch.ones(4, 50, 50)
    return Net(lambda m, x: (m.layer(x)[:, :, None, None] * big).tanh().exp().tanh().sum((2, 3)), layer=nn.Linear(4, 4))


def with_constants():
    last = nn.utils.parametrizations.weight_norm(nn.Linear(512, 512))
    model = Net(lambda m, x: m.last(torch.relu(m.first(x) @ m.R)), first=nn.Linear(4, 512), last=last)
    model.register_buffer("R", torch.randn(512, 512))
    return model


def test_memory_per_sample():
    """Counts what is kept between layers, and no constants."""
    assert Capture(wide(), mean, torch.randn(5, 4)).sample_bytes >= 3 * 4 * 2500 * 4
    assert Capture(with_constants(), mean, torch.randn(9, 4)).sample_bytes < 1e5
