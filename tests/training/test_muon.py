"""`sw.Muon`, compared with torch's optimizers, with the optimizer of recipes and with itself after a detour."""

import io
import math
import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

import stairwise as sw
from benchmarks.bench_muon_angle import SPEEDRUN, law, noise, predicted, stored_runs
from stairwise.checks import InputError
from stairwise.training.muon import Muon, _gradients
from stairwise.training.newton_schulz import SCALINGS
from stairwise.training.optimizer import FlatOptimizer
from stairwise.training.vectors import joined, same_memory
from tests.two_processes import run_two


def net(channels_last=False):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 2, bias=False)
    )
    return network.to(memory_format=torch.channels_last) if channels_last else network


def matrices():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 4, bias=False), nn.Linear(4, 4, bias=False))


def descend(network, optimizer, steps=6, shape=(3, 4, 4), begin=0):
    """Take steps on random batches, the same for the same numbers of steps; parameters at the end."""
    for i in range(begin, begin + steps):
        x = torch.randn(8, *shape, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        (network(x) - 1).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in network.parameters()]


def same(found, expected, **tolerance):
    return all(torch.allclose(a, b, **tolerance) for a, b in zip(found, expected, strict=True))


# compared with others


def by_random_gradients(network, optimizer, steps=6):
    """Parameters after steps along random gradients, the same every time."""
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for p in network.parameters():
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.step()
    return [p.detach().clone() for p in network.parameters()]


@pytest.mark.parametrize(("scaling", "theirs"), [("keller", "original"), ("moonshot", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torchs_for_matrices(scaling, theirs, nesterov):
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    a, b, before = matrices(), matrices(), matrices()
    found = by_random_gradients(a, Muon(a.parameters(), scaling=scaling, dtype=torch.bfloat16, **options))
    expected = by_random_gradients(b, torch.optim.Muon(b.parameters(), adjust_lr_fn=theirs, **options))
    for x, y, start in zip(found, expected, before.parameters(), strict=True):
        assert (x - y).norm() < 3e-3 * (y - start).norm()  # sums before the iteration may round to another bfloat16


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_the_optimizer_of_recipes(channels_last, decay):
    a, b = net(channels_last), net(channels_last)
    flat = FlatOptimizer(b, "muon", momentum=0.95, weight_decay=decay)
    flat.lr.fill_(0.05)
    found = descend(a, Muon(a.parameters(), lr=0.05, weight_decay=decay))
    assert same(found, descend(b, flat), atol=2e-6)


def test_the_memory_format_of_filters_does_not_matter():
    a, b = net(), net(channels_last=True)
    assert same(descend(a, Muon(a.parameters())), descend(b, Muon(b.parameters())), atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_rest_is_torchs_sgd_and_adamw(decay):
    for rule, options, theirs in (
        ("sgd", {"momentum": 0.9}, torch.optim.SGD),
        ("adamw", {"betas": (0.8, 0.99), "eps": 1e-6}, torch.optim.AdamW),
    ):
        a, b = net(), net()
        group = {"params": a.parameters(), "rule": rule, "lr": 0.01, "weight_decay": decay, **options}
        expected = by_random_gradients(b, theirs(b.parameters(), lr=0.01, weight_decay=decay, **options))
        assert same(by_random_gradients(a, Muon([group])), expected, atol=1e-6), rule


def test_one_after_the_other_is_the_same():
    for rest in ("sgd", "adamw"):
        a, b = net(), net()
        together, apart = Muon(a.parameters(), rest=rest), Muon(b.parameters(), rest=rest, foreach=False)
        assert same(descend(a, together), descend(b, apart), atol=1e-6)


def momenta(optimizer):
    group = next(group for group in optimizer.param_groups if group["rule"] == "muon")
    return [optimizer.state[p]["momentum_buffer"] for p in group["params"]]


def test_momenta_lie_one_after_the_other():
    network = net()
    optimizer = Muon(network.parameters())
    descend(network, optimizer, 1)
    found = momenta(optimizer)
    ends = [v.data_ptr() + v.numel() * v.element_size() for v in found]
    assert [v.data_ptr() for v in found[1:]] == ends[:-1]


LAYOUTS = ("apart", "joint", "backwards", "expanded", "negated")


def laid_out(network, layout, seed):
    """Give a network gradients, whose values do not depend on how they lie in memory; that of the last is constant."""
    flat = FlatOptimizer(network)  # makes gradients joint, with matrices first
    flat.gradient.normal_(generator=torch.Generator().manual_seed(seed))
    last = network[-1].weight
    last.grad.fill_(0.5)
    if layout == "apart":
        for p in network.parameters():
            p.grad = p.grad.clone()
    if layout == "backwards":
        memory, start = torch.zeros_like(flat.gradient), 0
        for p in reversed(list(network.parameters())):
            view = memory[start : start + p.numel()].as_strided(p.shape, p.stride(), start)
            p.grad, start = view.copy_(p.grad), start + p.numel()
    if layout == "expanded":
        last.grad = torch.full((1, 1), 0.5).expand(last.shape)
    if layout == "negated":
        last.grad = torch._neg_view(last.grad.neg_())


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_may_lie_anywhere_and_are_left_as_they_are(foreach):
    found = []
    for layout in LAYOUTS:
        network = net(channels_last=True)
        optimizer = Muon(network.parameters(), foreach=foreach)
        for step in range(3):
            laid_out(network, layout, step)
            before = [p.grad.clone() for p in network.parameters()]
            optimizer.step()
            assert all(torch.equal(p.grad, g) for p, g in zip(network.parameters(), before, strict=True))
        found.append([p.detach().clone() for p in network.parameters()])
    assert all(same(found[0], other, rtol=0, atol=0) for other in found[1:])


def test_joint_gradients_are_not_copied():
    network = net(channels_last=True)
    matrices = [p for p in network.parameters() if p.ndim > 1]
    for layout in LAYOUTS:
        laid_out(network, layout, 0)
        assert same_memory(_gradients(matrices, "muon"), matrices[0].grad) == (layout == "joint")


def test_only_what_is_one_memory_is_joined():
    values = torch.arange(8.0)
    assert len(joined([values[:3], values[3:]])) == 1
    assert len(joined([values[3:], values[:3]])) == 2
    assert len(joined([values[:4], values.view(torch.int32)[4:]])) == 2
    array = values.numpy()
    assert len(joined([torch.from_numpy(array[:4]), torch.from_numpy(array)[4:]])) == 2, "the first ends at 4"


@pytest.mark.parametrize("channels_last", [False, True])
def test_loaded_momenta_may_lie_anywhere(channels_last):
    a, b = net(channels_last), net(channels_last)
    ours, other = Muon(a.parameters()), Muon(b.parameters())
    descend(a, ours, 2)
    saved = ours.state_dict()
    saved["state"] = {k: {name: x.contiguous().clone() for name, x in s.items()} for k, s in saved["state"].items()}
    b.load_state_dict(a.state_dict())
    other.load_state_dict(saved)
    assert same(descend(b, other, 3), descend(a, ours, 3), rtol=0, atol=0)
    for v, w, p in zip(momenta(ours), momenta(other), (p for p in a.parameters() if p.ndim > 1), strict=True):
        assert torch.equal(v, w)
        assert v.stride() == w.stride() == p.stride()


@pytest.mark.parametrize("missing", [(0,), (3,), (5,), (0, 5), (0, 3)])
def test_gradients_may_come_and_go(missing):
    """Momenta stay where they are, because recordings refer to them."""
    found = []
    for foreach in (True, False):
        network = net()
        optimizer, places = Muon(network.parameters(), foreach=foreach, weight_decay=0.1), set()
        for i in range(6):
            network.zero_grad()
            torch.manual_seed(i)
            network(torch.randn(4, 3, 4, 4)).square().mean().backward()
            for layer in missing if i % 2 else ():
                network[layer].weight.grad = None
            optimizer.step()
            places.add(tuple(v.data_ptr() for v in momenta(optimizer)))
        assert len(places) == 1
        found.append([p.detach().clone() for p in network.parameters()])
    assert same(*found, atol=1e-6)


def test_copies_and_pickles_do_not_bring_along_the_momenta_of_others():
    network = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    optimizer = Muon(network.parameters())
    descend(network, optimizer, 1, shape=(32,))
    size = 4 * sum(p.numel() for p in network.parameters())
    assert len(pickle.dumps(optimizer)) < 2.5 * size  # parameters and momenta
    for other in (deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert all(v.untyped_storage().nbytes() == 4 * v.numel() for v in momenta(other))
        assert same(momenta(other), momenta(optimizer), rtol=0, atol=0)


def test_models_may_change_their_number_format_between_steps():
    network = net().double()
    optimizer = Muon(network.parameters())
    descend(network.float(), optimizer, 1)
    network.double()
    network(torch.randn(4, 3, 4, 4, dtype=torch.float64)).square().mean().backward()
    before = [p.detach().clone() for p in network.parameters()]
    optimizer.step()
    for p, old in zip(network.parameters(), before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)
    assert all(v.dtype == torch.float64 for v in momenta(optimizer))


def test_a_start_that_is_not_finite_leaves_no_half_state():
    network = net()
    optimizer = Muon(network.parameters())
    weight = network[3].weight.detach().clone()
    network[3].weight.data.fill_(math.inf)
    with pytest.raises(InputError, match="finite at the start"):
        descend(network, optimizer, 1)
    network[3].weight.data.copy_(weight)
    other = net()
    assert same(descend(network, optimizer, 1), descend(other, Muon(other.parameters()), 1), rtol=0, atol=0)


# groups


def rules(optimizer):
    return [
        (group["rule"], len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    ]


def test_groups_are_divided_by_axes():
    assert rules(Muon(net().parameters(), weight_decay=0.1)) == [("muon", 3, 0.02, 0.1), ("sgd", 4, 0.02, 0.0)]
    assert rules(Muon(net().parameters(), rest="adamw"))[1] == ("adamw", 4, 1e-3, 0.0)
    assert rules(Muon(net().parameters(), rest_lr=0.3))[1] == ("sgd", 4, 0.3, 0.0)
    network = net()
    groups = [
        {"params": network[0].parameters(), "lr": 0.05},
        {"params": [network[1].weight, network[1].bias], "lr": 0.1, "weight_decay": 0.2},
        {"params": network[3].weight, "rule": "adamw", "lr": 0.3, "weight_decay": 0.4},
        {"params": []},
    ]
    optimizer = Muon(groups, rest_lr=0.01, weight_decay=0.5)
    assert rules(optimizer) == [
        ("muon", 1, 0.05, 0.5),
        ("sgd", 1, 0.01, 0.0),
        ("sgd", 2, 0.1, 0.2),
        ("adamw", 1, 0.3, 0.4),
        ("muon", 0, 0.02, 0.5),
    ]
    network(torch.randn(8, 3, 4, 4)).sum().backward()
    optimizer.step()  # with an empty group, and network[5], which is in no group


def test_named_parameters():
    optimizer = Muon(net().named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "3.weight", "5.weight"]


def test_only_1d_parameters():
    norm = nn.BatchNorm1d(3)
    optimizer = Muon(norm.parameters(), lr=0.5)
    assert [group["rule"] for group in optimizer.param_groups] == ["sgd"]
    before = norm.bias.detach().clone()
    norm(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    assert torch.allclose(norm.bias, before - 0.5 * 8)


def test_shapes_of_all_kinds():
    parameters = [
        nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (2, 3, 5), (2, 3, 2, 2, 2), (), (0, 4), (1, 1))
    ]
    parameters.append(nn.Parameter(torch.randn(4, 6).mT))
    parameters.append(nn.Parameter(torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)))
    before = [p.detach().clone() for p in parameters]
    optimizer = Muon(parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.randn(p.shape)  # contiguous, also where the parameter is not
    optimizer.step()
    for p, old in zip(parameters, before, strict=True):
        if p.ndim > 1 and p.numel():
            assert (p - old).norm().item() == pytest.approx(0.1 * old.norm().item(), rel=1e-5)
            step, o = (old - p.detach()).flatten(1), torch.linalg.svd(p.grad.flatten(1), full_matrices=False)
            assert nn.functional.cosine_similarity(step.flatten(), (o[0] @ o[2]).flatten(), dim=0) > 0.9


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_the_iteration_in_float64(scaling, weights, rest):
    found = []
    for dtype in (torch.float64, torch.float32):
        network = net().to(weights)
        optimizer = Muon(network.parameters(), lr=0.01, scaling=scaling, dtype=dtype, rest=rest)
        for i in range(3):
            random = torch.Generator().manual_seed(i)
            for p in network.parameters():
                p.grad = torch.randn(p.shape, generator=random).to(weights)
            optimizer.step()
        found.append([p.detach().clone() for p in network.parameters()])
    assert same(*found, rtol=1e-4, atol=1e-5)
    assert {p.dtype for p in found[0]} == {weights}


# state


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_round_bit_by_bit(rest, dtype):
    shape = (6,)
    network = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).to(dtype)

    def steps(network, optimizer, begin):
        for i in range(begin, begin + 3):
            x = torch.randn(8, *shape, generator=torch.Generator().manual_seed(i)).to(dtype)
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()

    optimizer = Muon(network.parameters(), rest=rest, lr=0.05)
    steps(network, optimizer, 0)
    stored = io.BytesIO()
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    stored.seek(0)
    state = torch.load(stored, weights_only=True)
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).to(dtype)
    other.load_state_dict(state["network"])
    again = Muon(other.parameters(), rest=rest, lr=0.9)
    again.load_state_dict(state["optimizer"])
    steps(network, optimizer, 3)
    steps(other, again, 3)
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), other.parameters(), strict=True))
    assert again.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("to_channels_last", [True, False])
def test_state_of_another_memory_format(to_channels_last):
    network, other = net(not to_channels_last), net(to_channels_last)
    optimizer, again = Muon(network.parameters()), Muon(other.parameters())
    descend(network, optimizer, 2)
    other.load_state_dict(network.state_dict())
    again.load_state_dict(deepcopy(optimizer.state_dict()))  # torch shares the tensors
    expected = descend(network, optimizer, 3, begin=2)
    assert same(descend(other, again, 3, begin=2), expected, atol=1e-5)
    network.to(memory_format=torch.channels_last)
    other.to(memory_format=torch.contiguous_format)
    expected = descend(network, optimizer, 3, begin=5)
    assert same(descend(other, again, 3, begin=5), expected, atol=2e-5)
    for p, q in zip(network.parameters(), other.parameters(), strict=True):
        v, u = optimizer.state[p]["momentum_buffer"], again.state[q]["momentum_buffer"]
        assert torch.allclose(v, u, atol=1e-5)


def test_copies_go_on():
    network = net()
    optimizer = Muon(network.parameters())
    descend(network, optimizer, 2)
    twin, twins = deepcopy((network, optimizer))
    assert same(descend(network, optimizer, begin=2), descend(twin, twins, begin=2), rtol=0, atol=0)


def test_parameters_without_gradients_stay():
    network = net()
    optimizer = Muon(network.parameters())
    network[0].requires_grad_(False)
    before = network[0].weight.clone()
    descend(network, optimizer, 2)
    assert torch.equal(network[0].weight, before)
    assert network[0].weight not in optimizer.state
    Muon(net().parameters()).step()  # no gradient at all


# in loops


def test_schedulers():
    for lr in (0.04, torch.tensor(0.04)):
        network = net()
        optimizer = Muon(network.parameters(), lr=lr, rest_lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
        for i in range(3):
            before = network[3].weight.detach().clone()
            start = optimizer.state[network[3].weight].get("length", before.norm())
            descend(network, optimizer, 1, begin=i)
            moved = (network[3].weight - before).norm() / start
            assert moved.item() == pytest.approx(0.04 / (i + 1), rel=1e-4)
            assert optimizer.param_groups[1]["lr"] == pytest.approx(0.1 / (i + 1))
            schedule.step()


def test_closures():
    network = matrices()
    optimizer = Muon(network.parameters())

    def closure():
        optimizer.zero_grad()
        loss = network(torch.ones(2, 6)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert closure().item() < first.item()


def test_a_gradient_scaler_skips():
    network = matrices()
    optimizer, scaler = Muon(network.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in network.parameters()]
    for value in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((network(torch.ones(2, 6)) * value).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same(network.parameters(), before) == (value == math.inf)
    assert scaler.get_scale() == 2.0


TWO = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stairwise as sw
from stairwise.distributed import rank
from tests.training.test_muon import matrices
from tests.two_processes import leave
dist.init_process_group("gloo")
network = matrices()
model = DistributedDataParallel(network)
optimizer = sw.Muon(network.parameters(), lr=0.05)
for i in range(5):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).chunk(2)[rank()]
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
torch.save(network.state_dict(), f"{sys.argv[1]}/{rank()}.pt")
leave()
"""


def test_two_processes_train_like_one(tmp_path):
    assert run_two("-c", TWO, str(tmp_path)) == [0, 0]
    first, second = (torch.load(tmp_path / f"{r}.pt").values() for r in range(2))
    assert same(first, second, rtol=0, atol=0)
    alone = matrices()
    assert same(first, descend(alone, sw.Muon(alone.parameters(), lr=0.05), 5, shape=(6,)), atol=1e-6)


# bad input


def broken_gradients(network, value):
    for p in network.parameters():
        p.grad = torch.randn(p.shape)
    network[3].bias.grad[1] = value


@pytest.mark.parametrize("options", [{}, {"rest": "adamw"}, {"scaling": "fixed"}, {"scaling": "keller"}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_not_finite_change_nothing(value, options, first):
    network = net()
    optimizer = Muon(network.parameters(), weight_decay=0.1, **options)
    if not first:
        descend(network, optimizer, 2)
    before = [p.detach().clone() for p in network.parameters()]
    states = deepcopy(dict(enumerate(optimizer.state.values())))
    for _ in range(2):
        broken_gradients(network, value)
        optimizer.step()
    assert optimizer.skipped == 2
    assert same(network.parameters(), before, rtol=0, atol=0)
    for i, state in states.items():
        for name, tensor in list(optimizer.state.values())[i].items():
            assert torch.equal(tensor, state[name]), name
    twin = net()
    healthy = Muon(twin.parameters(), weight_decay=0.1, **options)
    expected = descend(twin, healthy, 4 if not first else 2)
    assert same(descend(network, optimizer, 2, begin=0 if first else 2), expected, atol=1e-6)
    assert optimizer.skipped == 2


def test_weights_of_zeros_move():
    layer = nn.Linear(4, 9, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = Muon(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.randn(9, 4)
    optimizer.step()
    assert layer.weight.norm().item() == pytest.approx(0.1 * 2)  # as if it had four orthonormal columns


@pytest.mark.parametrize("scaling", ["relative", "fixed", "keller", "moonshot"])
def test_zero_weights_with_zero_gradients(scaling):
    layer = nn.Linear(4, 9, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = Muon(layer.parameters(), scaling=scaling)
    layer.weight.grad = torch.zeros(9, 4)
    optimizer.step()
    assert layer.weight.abs().max() == 0


def vicreg_losses(lr, scaling="relative", steps=400, current=False):
    """Losses of a small network with batch norm, at a constant learning rate; and the number of skipped steps.
    `current`: steps are relative to the present length of the weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32, bias=False), nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False)]
    norms = [part for _ in range(2) for part in (nn.BatchNorm1d(32), nn.ReLU())]
    network = nn.Sequential(layers[0], *norms[:2], layers[1], *norms[2:], layers[2])
    optimizer, losses = Muon(network.parameters(), lr=lr, scaling=scaling), []
    data = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        views = [x + 0.2 * torch.randn(64, 16, generator=data) for _ in "ab"]
        optimizer.zero_grad()
        loss = sw.losses.vicreg(network(views[0]), network(views[1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for layer in layers if current else ():
            optimizer.state[layer.weight]["length"].copy_(layer.weight.detach().norm())
    assert all(torch.isfinite(p).all() for p in network.parameters())
    return losses, optimizer.skipped


@pytest.mark.parametrize("scaling", ["relative", "fixed"])
@pytest.mark.parametrize("lr", [0.02, 0.1])
def test_large_constant_steps_do_not_diverge(scaling, lr):
    losses, skipped = vicreg_losses(lr, scaling)
    assert sum(losses[-20:]) / 20 < 0.7 * losses[0]
    assert skipped == 0


@pytest.mark.filterwarnings("ignore:vicreg:stairwise.checks.RunWarning")  # the embeddings may overflow
def test_steps_relative_to_the_present_length_would_diverge():
    """So the length at the start is the right one: w grows, then its steps, then w."""
    losses, skipped = vicreg_losses(0.1, current=True)
    assert skipped
    assert losses[-1] > 1e6 or not math.isfinite(losses[-1])


@pytest.mark.filterwarnings("ignore:vicreg:stairwise.checks.RunWarning")  # the embeddings may overflow
@pytest.mark.parametrize("scaling", ["relative", "fixed"])
def test_the_largest_step_leaves_finite_weights(scaling):
    vicreg_losses(1.0, scaling, 100)


@pytest.mark.parametrize("lr", [math.nan, 1.5, -1.0])
@pytest.mark.parametrize("which", [0, 1])
def test_a_learning_rate_that_leaves_its_range_in_a_tensor_skips(lr, which):
    network = net()
    rates = [torch.tensor(0.02), torch.tensor(0.1)]
    optimizer = Muon(network.parameters(), lr=rates[0], rest_lr=rates[1])
    before = descend(network, optimizer, 1)
    rates[which].fill_(lr if lr != 1.5 or not which else 1e7)
    assert same(descend(network, optimizer, 2), before, rtol=0, atol=0)
    assert optimizer.skipped == 2
    rates[which].fill_(0.01)
    assert not same(descend(network, optimizer, 1), before)
    assert optimizer.skipped == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 1.5}, "lr must be at most 1, the length of the weights .* begin with 0.02"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"lr": -0.1}, "lr must be at least 0"),
        ({"lr": torch.ones(2)}, "lr must have one element"),
        ({"lr": torch.tensor(1.5)}, "lr must be at most 1, the length"),
        ({"lr": torch.tensor(math.nan)}, "lr must be finite"),
        ({"rest_lr": torch.tensor(-1.0)}, "rest_lr must be at least 0"),
        ({"rest_lr": torch.ones(2)}, "rest_lr must have one element"),
        ({"rest_lr": 1e9}, "rest_lr must be at most 1e.06"),
        ({"rest_lr": "fast"}, "rest_lr must be a number"),
        ({"momentum": 1.0}, "momentum must be less than 1"),
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be less than 1"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, "0.999")}, "betas must be a number"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"weight_decay": 51.0}, "lr × weight_decay must be at most 1 .got 1.02.: weight_decay at most 50"),
        ({"rest": "adamw", "eps": 0.0}, "eps must be at least 1e-30"),
        ({"rest": "adamw", "eps": 1e-46}, "eps must be at least 1e-30"),
        ({"rest": "adamw", "eps": 1e-9, "betas": (0.9, 0.8)}, "eps must be at least 1e-08"),
        ({"eps": -1.0}, "eps must be at least 0"),
        ({"scaling": "relativ"}, "did you mean 'relative'"),
        ({"rest": "muon"}, "rest is unknown"),
        ({"steps": 0}, "steps must be"),
        ({"dtype": torch.float16}, "dtype must be"),
        ({"nesterov": 1}, "nesterov must be True or False"),
        ({"foreach": None}, "foreach must be True or False"),
    ],
)
def test_bad_options(options, says):
    with pytest.raises(InputError, match=says):
        Muon(net().parameters(), **options)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([], "params must not be empty"),
        ({nn.Parameter(torch.ones(2, 2))}, "params must be an ordered collection"),
        (3, "params must be an ordered collection"),
        (["weight"], "params must hold tensors"),
        ([{"lr": 0.1}], "group must hold params"),
        ([{"params": [nn.Parameter(torch.ones(2))]}, nn.Parameter(torch.ones(2))], "must be all groups or all param"),
        (
            [{"params": [nn.Parameter(torch.ones(2))], "rule": "sgd", "lr": 1.0, "weight_decay": 10.0}],
            "lr × weight_decay must be at most 1",
        ),
        ([{"params": [nn.Parameter(torch.ones(2))], "rule": "muon"}], r"shape \(2,\) must have two or more axes"),
        ([{"params": [nn.Parameter(torch.ones(2))], "rule": "lion"}], "rule is unknown"),
        ([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], "float32, float64 or bfloat16 .got torch.complex64"),
        ([nn.Parameter(torch.ones(2, 2, dtype=torch.float16))], "keep float32 weights"),
        ([nn.Parameter(torch.ones(2, 3, 4).permute(0, 2, 1).expand(2, 4, 3)[:, ::2])], "contiguous or channels-last"),
    ],
)
def test_bad_parameters(params, says):
    with pytest.raises(InputError, match=says):
        Muon(params)


def test_what_shows_only_in_a_step():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Muon(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match=r"gradient of the parameter of shape \(5, 3\) must not be sparse"):
        optimizer.step()
    network = net()
    optimizer = Muon(network.parameters())
    optimizer.param_groups[0]["lr"] = 2.0  # by a scheduler, for example
    with pytest.raises(InputError, match="lr must be at most 1"):
        descend(network, optimizer, 1)
    for name, value, says in (
        ("weight_decay", math.nan, "weight_decay must be finite"),
        ("weight_decay", 60.0, "lr × weight_decay must be at most 1"),
        ("momentum", 1.5, "momentum must be less than 1"),
        ("betas", (2, 2), "betas must be less than 1"),
        ("eps", math.nan, "eps must be finite"),
        ("scaling", "foo", "scaling is unknown"),
    ):
        network = net()
        optimizer = Muon(network.parameters())
        optimizer.param_groups[0][name] = value
        before = [p.detach().clone() for p in network.parameters()]
        with pytest.raises(InputError, match=says):
            descend(network, optimizer, 1)
        assert same(network.parameters(), before, rtol=0, atol=0)


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("which", "value", "says"),
    [
        ("3.weight", math.nan, r"weights of shape \(.*\) must be finite at the start"),
        ("3.weight", 1e20, r"of a length below 1e\+18 .got length .* in float32"),
        ("0.bias", math.inf, r"parameter of shape \(\d,?\) must be finite at the start"),
    ],
)
def test_weights_that_are_not_usable_at_the_start_are_named_and_nothing_moves(which, value, says, rest):
    network = net()
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        parameters[which].fill_(value)
    before = [p.detach().clone() for p in network.parameters()]
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    optimizer = Muon(network.parameters(), rest=rest)
    with pytest.raises(InputError, match=says):
        optimizer.step()
    assert not optimizer.state
    assert optimizer.skipped == 0
    assert all(torch.equal(p.nan_to_num(), q.nan_to_num()) for p, q in zip(network.parameters(), before, strict=True))


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-30), ((0.9, 0.0), 1e-8)])
def test_weights_stay_finite_with_the_least_eps_and_the_largest_rate(betas, eps):
    p = nn.Parameter(torch.ones(3))
    optimizer = Muon([p], rest="adamw", rest_lr=1e6, betas=betas, eps=eps)
    for gradient in ([5e17, 0.0, 1e-30], [0.0, 1e-23, 0.0], [0.0, 0.0, 0.0], [-5e17, 1e-38, 5e17]):
        p.grad = torch.tensor(gradient)
        optimizer.step()
        assert p.isfinite().all()
    assert optimizer.skipped == 0


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_the_strongest_decay_leaves_finite_weights(rest, rate):
    network = net()
    groups = [{"params": [p], "weight_decay": 2.0} for p in network.parameters()]
    optimizer = Muon(groups, lr=rate, rest=rest)
    assert all(p.isfinite().all() and p.abs().max() < 1e3 for p in descend(network, optimizer, 400))
    assert optimizer.skipped == 0


def test_a_tensor_of_the_rate_may_not_outgrow_the_decay():
    network, lr = net(), torch.tensor(0.1)
    optimizer = Muon(network.parameters(), lr=lr, rest_lr=0.1, weight_decay=10.0)
    before = descend(network, optimizer, 1)
    lr.fill_(0.11)
    assert same(descend(network, optimizer, 1), before, rtol=0, atol=0)
    assert optimizer.skipped == 1
    with pytest.raises(InputError, match="lr × weight_decay must be at most 1"):
        Muon(network.parameters(), lr=lr, weight_decay=10.0)


@pytest.mark.parametrize(
    "other", [lambda ps: torch.optim.SGD(ps, lr=0.1), lambda ps: torch.optim.AdamW(ps), lambda ps: torch.optim.Muon(ps)]
)
def test_a_state_of_another_optimizer_is_refused(other):
    weights = [nn.Parameter(torch.eye(3))]
    theirs = other(weights)
    weights[0].grad = torch.ones(3, 3)
    theirs.step()
    with pytest.raises(InputError, match="state_dict must be that of"):
        Muon(weights).load_state_dict(theirs.state_dict())


def test_a_damaged_state_is_refused():
    network = net()
    optimizer = Muon(network.parameters(), rest="adamw")
    before = descend(network, optimizer, 1)
    whole = deepcopy(optimizer.state_dict())
    damages = {
        "momentum_buffer": lambda x: x.fill_(math.nan),
        "length": lambda x: x.fill_(-1.0),
        "exp_avg_sq": lambda x: x.fill_(-1.0),
        "exp_avg": lambda x: x.resize_(0),
        "step": lambda x: x.fill_(math.inf),
    }
    for name, damage in damages.items():
        loaded = deepcopy(whole)
        state = next(state for state in loaded["state"].values() if name in state)
        damage(state[name])
        with pytest.raises(InputError, match=rf"state of the parameter of shape .*, {name}, must"):
            optimizer.load_state_dict(loaded)
        del state[name]
        with pytest.raises(InputError, match=rf"state of the parameter of shape .* must hold the tensor {name}"):
            optimizer.load_state_dict(loaded)
    for nothing in (None, {}, {"state": {}, "param_groups": [3, 3]}, whole | {"state": None}):
        with pytest.raises(InputError, match="state_dict must be that of"):
            optimizer.load_state_dict(nothing)
    assert same(network.parameters(), before, rtol=0, atol=0)
    optimizer.load_state_dict(whole)  # nothing that was refused has left a trace
    descend(network, optimizer, 1)


def test_states_that_are_not_refused():
    """One without a setting that came later, one of before the first step, and one that a hook converts."""
    network = net()
    optimizer = Muon(network.parameters(), momentum=0.5)
    fresh = deepcopy(optimizer.state_dict())
    descend(network, optimizer, 1)
    older = deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        del group["nesterov"]
    for state in (fresh, older):
        other = Muon(net().parameters())
        other.load_state_dict(state)
        assert [group["nesterov"] for group in other.param_groups] == [True, True]
    theirs = torch.optim.SGD(network.parameters()).state_dict()
    other = Muon(net().parameters())
    other.register_load_state_dict_pre_hook(
        lambda _, given: older if given["param_groups"][0].get("dampening") == 0 else None
    )
    other.load_state_dict(theirs)
    assert [group["momentum"] for group in other.param_groups] == [0.5, 0.5]


def test_a_compiled_step_is_a_step():
    networks = [net(), net()]
    for network, compiled in zip(networks, (False, True), strict=True):
        optimizer = Muon(network.parameters(), rest="adamw")
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        network(torch.ones(2, 3, 4, 4)).square().sum().backward()
        step()
    assert same(*(network.parameters() for network in networks), rtol=0, atol=0)


# growth of weights


@pytest.mark.parametrize("momentum", [0.9, 0.95])
def test_noise_makes_weights_grow_by_the_law(momentum):
    """Of wide matrices, whose polar factors are nearly the matrices themselves."""
    assert noise((32, 1024), momentum, 600) == pytest.approx(law(momentum), rel=0.1)


def test_weight_decay_ends_the_growth():
    lr, decay = 0.01, 0.1
    settled = predicted([lr] * 20_000, decay, 0.9)
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(32, 1024))
    optimizer, start, lengths = sw.Muon([w], lr=lr, momentum=0.9, weight_decay=decay), w.detach().norm(), []
    for _ in range(3000):
        w.grad = torch.randn(w.shape)
        optimizer.step()
        lengths.append(float(w.detach().norm() / start))
    assert sum(lengths[1500:]) / 1500 == pytest.approx(settled, rel=0.05)


def test_lengths_of_stored_runs_follow_the_law_and_are_on_the_page():
    page = SPEEDRUN.with_suffix(".md").read_text(encoding="utf-8")
    found = list(stored_runs(SPEEDRUN))
    assert len(found) >= 8
    for name, length, expected in found:
        assert 0.85 < length / expected < 1, name
        assert f"{length:.2f}" in page, name
        assert f"{expected:.2f}" in page, name
