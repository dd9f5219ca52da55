"""One forward and one backward pass to the outputs of layers: what all per-sample gradients are made of.

Layers with a rule (`rules.RULES`) give factored gradients. A trial on a few samples compares them with autograd;
parameters for which they are not the whole story (used twice, tied, used by functions, samples not first) and
parameters of all other modules get their per-sample gradients from vmap(grad), so the result is always complete. On a
GPU convolutions may be computed as products; the trial compares that, too.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call, grad, vmap

from stairwise.checks import InputError
from stairwise.ntk.compare import SAME, apart, at_least_single, differences, errors
from stairwise.ntk.factors import AbstractFactor, Direct, patches_bytes
from stairwise.ntk.guards import products_in, unchanged, watched
from stairwise.ntk.products import ConvolutionsByProducts
from stairwise.ntk.rules import RULES, factors

__all__ = ["Capture", "RulesChanged", "Scalar"]

Call = tuple[str, Tensor]  # name of the module, its input
Scalar = Callable[[Tensor], Tensor]  # outputs (N, d) → (N,)
TRIAL = 4  # samples of a first pass, and one of them again: few sizes of weights are multiples of five
PIECE = 64  # samples a pass on a CPU, whose caches are small, and of vmap, which keeps much
AGREE, AGREE_DOUBLE = 1e-3, 1e-9  # of the largest gradient, in single and double precision
# of the size of a layer's gradients: rounding that turns a unit on or off makes those of one sample jump; wrong ones
# are wrong in all samples
JUMP = 0.5
MIXES = "must treat samples one by one: its output for one depends on the others"
RANDOM = 0.1  # of the outputs, by which a second call may differ


class RulesChanged(Exception):
    """Fewer parameters are covered by rules than was thought: begin again."""


@dataclass(frozen=True, eq=False)
class _Pass:
    """Outputs (N, d) and calls of modules with rules, without a graph; whether the scalars are finite; and on a GPU
    an event: all of that is there."""

    outputs: Tensor
    calls: list[Call]
    finite: Tensor
    done: torch.cuda.Event | None


@dataclass(frozen=True, eq=False)
class _Forward(_Pass):
    """And the graph: scalars (N,), and where the outputs of the calls are."""

    scalars: Tensor
    edges: list[GradientEdge]


class Capture:
    """Per-sample gradients of a network, by parameter.

    Arguments:
        model, scalar: the gradients are those of scalar(model(x)), (N,).
        trial: samples, of which a few are passed through.
        by_products: compute convolutions as matrix products, images in channels-last layout, if the model can take it.

    Attributes:
        by_rule: names of parameters whose gradients come from rules; the others' come from vmap(grad). A supposition
            until the first samples have been passed through.
        sample_bytes: memory for the factors of one sample, about.
    """

    def __init__(self, model: nn.Module, scalar: Scalar, trial: Tensor, by_products: bool = False) -> None:
        self.model, self.scalar = model, scalar
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise InputError("model", "must have trainable parameters", 0, "set requires_grad on some")
        _check_mode(model)
        self.aliases = _aliases(model)
        self.modules = {
            name: module
            for name, module in model.named_modules()
            if type(module) in RULES and any(p.requires_grad for p in module.parameters(recurse=False))
        }
        self.verified, self.one_by_one, self.sample_bytes = False, False, 0.0
        self.changed = watched(model) if trial.is_cuda else lambda: False
        self.by_products = by_products and trial.ndim == 4
        self.by_rule = self._called(torch.cat([trial[:TRIAL], trial[:1]]))
        self.by_products = self.by_products and bool(self.by_rule)

    def _verify(self, x: Tensor, forward: _Pass) -> None:
        """Try two samples of x alone, whose pass within the batch is given: whether layers, and the model, make the
        same of them. With the first batch also: rules against autograd, and passes by products against plain ones. Best
        done while a GPU is busy: this is mostly Python's time, and in a stream of its own it does not wait for that,
        unless the model keeps something in its forward pass for the next."""
        rows = slice((len(x) - 1) // 2, None, max(1, len(x) // 2))  # one in the middle, and the last
        try:
            with _beside(forward if self.changed() else None, x.device):
                alone, right, by_products = self._alone(x[rows].clone())
        except Exception:
            with _beside(forward, x.device):
                _check_finite(forward.finite)  # rather that than what came of it
            raise
        with _beside(forward, x.device):
            _check_finite(forward.finite)
            if by_products == self.by_products:  # else the batch was passed through wrongly
                right -= self._displaced(forward, alone, rows)
        changed = not self.by_rule <= right or by_products != self.by_products
        if by_products != self.by_products:
            self._leave_to_torch("as products they give other gradients")
        self.verified = True
        if changed:
            self.by_rule &= right
            raise RulesChanged

    def _alone(self, trial: Tensor) -> tuple[_Pass, set[str], bool]:
        """A plain pass, parameters whose rules are right, and whether passes by products are."""
        with products_in("float32"):  # faster ones would look like rules that fail
            if self.verified:
                return self._forward(trial), set(self.by_rule), self.by_products
            alone, b, right = self._tried(trial)
            return alone, right, self.by_products and self._products_agree(trial, alone.calls, b)

    def factors(self, x: Tensor) -> dict[str, AbstractFactor]:
        """Gradients of all samples, by name of parameter."""
        if x.is_cuda or len(x) <= PIECE:
            return self._factors(x)
        parts = [self._factors(piece) for piece in x.split(PIECE)]
        return {name: factor.joined([part[name] for part in parts]) for name, factor in parts[0].items()}

    def _factors(self, x: Tensor) -> dict[str, AbstractFactor]:
        found: dict[str, AbstractFactor] = {}
        if self.by_rule:
            forward, b = self._passes(x)
            self._verify(x, forward)
            found = {name: f for name, f in self._by_rules(forward.calls, b, len(x)).items() if name in self.by_rule}
            if found.keys() != self.by_rule:  # these samples are treated in another way than those of the trial
                self.by_rule &= found.keys()
                raise RulesChanged
        else:
            for piece in x.split(PIECE):
                outputs = self.model(piece)
                finite = torch.isfinite(self._scalars(outputs, len(piece))).all()
                self._verify(piece, _Pass(outputs.detach(), [], finite, _now(piece.device)))
        others = [name for name in self.parameters if name not in self.by_rule]
        return found | (self._by_vmap(x, others) if others else {})

    def _by_rules(self, calls: list[Call], b: Sequence[Tensor | None], n: int) -> dict[str, AbstractFactor]:
        """Factors of modules that were called once, with one row a sample; b are the gradients at their outputs."""
        times = Counter(name for name, _ in calls)
        found: dict[str, AbstractFactor] = {}
        for (name, given), g in zip(calls, b, strict=True):
            if times[name] > 1 or g is None or len(given) != n or len(g) != n:
                continue
            if given.is_floating_point() and given.dtype != g.dtype:  # mixed precision within
                continue
            try:
                own = factors(self.modules[name], at_least_single(given), at_least_single(g.detach()))
            except (RuntimeError, ValueError):  # an unusual module: no rule
                continue
            for key, factor in own.items():
                full = f"{name}.{key}" if name else key
                if full in self.parameters:  # a second name of a shared parameter is not
                    found[full] = factor
        return found

    def _forward(self, x: Tensor) -> _Forward:
        calls: list[Call] = []
        edges: list[GradientEdge] = []

        def hook(name: str) -> Callable[..., None]:
            def record(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
                if output.requires_grad and inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim:
                    calls.append((name, inputs[0].detach()))
                    # the edge stays right when an in-place activation overwrites the output
                    edges.append(get_gradient_edge(output))

            return record

        hooks = [module.register_forward_hook(hook(name)) for name, module in self.modules.items()]
        try:
            outputs = self.model(x)
            scalars = self._scalars(outputs, len(x))
        finally:
            for one in hooks:
                one.remove()
        finite = torch.isfinite(scalars.detach()).all()
        return _Forward(outputs.detach(), calls, finite, _now(x.device), scalars, edges)

    def _passes(self, x: Tensor) -> tuple[_Pass, Sequence[Tensor | None]]:
        """Forward pass and gradients at the outputs of its calls; by products, if the model can take it."""
        if self.by_products:
            try:
                return self._by_products(x)
            except InputError:
                raise
            except Exception as error:  # it may `view` images in another way, or compute some of it again, or anything
                self._leave_to_torch(next(iter(str(error).splitlines()), type(error).__name__))
        return self._backward(self._forward(x))

    def _leave_to_torch(self, why: str) -> None:
        words = f"this model's convolutions are left to torch, which is slower: {why}"
        warnings.warn(words, RuntimeWarning, stacklevel=3)
        self.by_products = False

    def _by_products(self, x: Tensor) -> tuple[_Pass, Sequence[Tensor | None]]:
        with ConvolutionsByProducts():
            forward = self._forward(x.contiguous(memory_format=torch.channels_last))
        return self._backward(forward)

    def _backward(self, forward: _Forward) -> tuple[_Pass, Sequence[Tensor | None]]:
        """Without the graph, which ends here: while it lives, torch would make gradients of a second one wait for the
        stream of the first."""
        try:
            b = torch.autograd.grad(forward.scalars.sum(), forward.edges, allow_unused=True)
        except Exception:
            _check_finite(forward.finite)  # a model may look at that on the way back
            raise
        return _Pass(forward.outputs, forward.calls, forward.finite, forward.done), b

    def _displaced(self, batch: _Pass, alone: _Pass, rows: slice) -> set[str]:
        """Parameters of modules to which these rows of the samples did not come as when they were alone: in another
        order, or their number matters."""
        by_name = dict(alone.calls)
        pairs = {name: (given[rows], by_name[name]) for name, given in batch.calls if name in by_name}
        names = [name for name, (one, other) in pairs.items() if one.shape == other.shape]
        ones, others = zip((batch.outputs[rows], alone.outputs), *(pairs[name] for name in names), strict=True)
        if ones[0].shape != others[0].shape or not bool(alone.finite):
            raise InputError("model", MIXES, None, "its output must not depend on their number")
        least = torch.zeros(len(ones), 1, device=batch.outputs.device)
        if alone.calls and alone.calls[-1][1].is_floating_point():
            # outputs that cancel are rounding, in units of what they come from
            least[0] = 1e-4 * at_least_single(alone.calls[-1][1]).norm()
        of_outputs, *shares = apart(ones, others, least).tolist()
        if of_outputs > 1:
            raise InputError("model", MIXES, None, "take out what is summed or normalized over the batch")
        same = {name for name, share in zip(names, shares, strict=True) if share <= 1}
        return {name for name in self.parameters if name.rpartition(".")[0] not in same}

    def _products_agree(self, trial: Tensor, plain: list[Call], plain_b: Sequence[Tensor | None]) -> bool:
        """Whether inputs and gradients of the trial by products are those of plain passes, but for rounding."""
        try:
            found, b = self._by_products(trial)
        except Exception:  # with so few samples it cannot do what it could with more
            return False
        calls = found.calls
        if [(name, given.shape) for name, given in calls] != [(name, given.shape) for name, given in plain]:
            return False
        if [g is None for g in b] != [g is None for g in plain_b]:
            return False
        pairs = [(one[1], other[1]) for one, other in zip(calls, plain, strict=True)]
        pairs += [(g, h) for g, h in zip(b, plain_b, strict=True) if g is not None and h is not None]
        shares = differences(*zip(*pairs, strict=True)).tolist() if pairs else []
        same = all(most <= SAME for _, most in shares[: len(calls)])
        return same and all(least <= SAME and most <= JUMP for least, most in shares[len(calls) :])

    def _scalars(self, output: Any, n: int) -> Tensor:
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != n:
            found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise InputError("the model's output", "must be 2-D, (samples, d)", found, "wrap the model")
        scalars = self.scalar(output)
        if not isinstance(scalars, Tensor) or scalars.shape != (n,):
            found = f"shape {tuple(scalars.shape)}" if isinstance(scalars, Tensor) else type(scalars).__name__
            raise InputError("output", f"must give one number a sample, shape ({n},) here", found)
        if torch.is_grad_enabled() and not scalars.requires_grad:
            raise InputError("output", "must give numbers that can be differentiated", None, "do not detach them")
        return scalars

    def _tried(self, trial: Tensor) -> tuple[_Pass, list[Tensor | None], set[str]]:
        """A plain pass, gradients at the outputs of its calls, and the parameters whose gradients the rules give
        rightly: each sample has all of its own of autograd's, the others nothing; and it has some."""
        x, forward = self._from_samples(trial)
        calls, edges, used = forward.calls, forward.edges, list(self.parameters.values())
        again = self.model(x.clone()).detach()  # of x: it may matter what gets gradients
        b: list[Tensor | None] = [None] * len(edges)
        wholes: dict[str, list[Tensor]] = {name: [] for name in self.parameters}
        right, names, elsewhere, tables = set(self.parameters), list[str](), [], []
        for i, scalar in enumerate(forward.scalars):
            given = [*edges, *used, *([x] if x.requires_grad else [])]
            out = torch.autograd.grad(scalar, given, allow_unused=True, retain_graph=True)
            if x.requires_grad and (g := out[-1]) is not None:
                elsewhere.append(errors([g.reshape(len(g), -1)], [g[i].flatten()], i))
            b = [_sum(one, other) for one, other in zip(b, out[: len(edges)], strict=True)]
            found = self._by_rules(calls, out[: len(edges)], len(trial))
            pairs = []
            for name, whole in zip(self.parameters, out[len(edges) : len(edges) + len(used)], strict=True):
                gradients = _gradients(found[name]) if name in found and whole is not None else None
                if gradients is None or gradients.shape[1:] != (whole.numel(),) or not whole.numel():
                    right.discard(name)
                else:
                    names.append(name)
                    pairs.append((gradients, whole.to_dense().flatten()))
                wholes[name].append(torch.zeros_like(self.parameters[name]) if whole is None else whole.to_dense())
            if pairs:
                tables.append(errors([one for one, _ in pairs], [other for _, other in pairs], i))
        # the device is asked once
        (_, most), *measured = torch.cat([differences([again], [forward.outputs]), *elsewhere, *tables]).tolist()
        _check_alone(most, measured[: len(elsewhere)])
        moved = set[str]()
        for name, (off, size) in zip(names, measured[len(elsewhere) :], strict=True):
            tolerance = AGREE_DOUBLE if self.parameters[name].dtype == torch.float64 else AGREE
            if not off <= tolerance * (size + 1e-30):  # not a number, perhaps
                right.discard(name)
            if size > 0:
                moved.add(name)
        right &= moved
        rest = [name for name in self.parameters if name not in right or name not in self.by_rule]
        self.one_by_one = not self._functional(trial, {name: torch.stack(wholes[name]) for name in rest})
        return _Pass(forward.outputs, calls, forward.finite, forward.done), b, right

    def _functional(self, trial: Tensor, wholes: dict[str, Tensor]) -> bool:
        """Whether vmap(grad) gives what autograd does: not of weights that the model has stored elsewhere, too."""
        wholes = {name: whole for name, whole in wholes.items() if whole.numel()}
        if not wholes:
            return True
        found = self._by_vmap(trial, list(wholes))
        flat = [found[name].gradients().reshape(1, -1) for name in wholes]
        sizes = errors(flat, [whole.flatten() for whole in wholes.values()], 0)
        return all(off <= SAME * size for off, size in sizes.tolist())

    def _from_samples(self, trial: Tensor) -> tuple[Tensor, _Forward]:
        """A forward pass, and the samples it began with, which get gradients, if the model can take that."""
        if trial.is_floating_point():
            x = trial.clone().requires_grad_()
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")
                    return x, self._forward(x.clone())  # a model may write to what it is given
            except Exception:  # it may look at numbers in numpy, say; if it is something else, that comes again
                pass
        return trial, self._forward(trial.clone())

    def _called(self, x: Tensor) -> set[str]:
        """Parameters of modules that are given one row a sample at another number of samples too: rows that are
        something else may be as many by chance."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        constant = {p.data_ptr() for p in tensors if not nn.parameter.is_lazy(p)}
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            # what has other rows is the same for any number of samples
            if tensor.ndim and len(tensor) % len(x) == 0 and tensor.data_ptr() not in constant:
                saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor.detach()  # the tensor itself would keep the graph alive for good

        try:
            with saved_tensors_hooks(count, lambda tensor: tensor):
                forward = self._forward(x)
        except Exception:  # the model may differentiate something itself
            saved.clear()
            forward = self._forward(x)
        _check_finite(forward.finite)  # and so what the caller has launched is done, which the trial does not wait for
        self.sample_bytes = max(_memory(self.modules, forward.calls), float(sum(saved.values()))) / len(x)
        known = {name for name, given in forward.calls if len(given) == len(x)}
        return {name for name in self.parameters if name.rpartition(".")[0] in known}

    def _by_vmap(self, x: Tensor, names: list[str]) -> dict[str, AbstractFactor]:
        chosen = {name: self.parameters[name].detach() for name in names}

        def one(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            everywhere = {alias: values for name, values in parameters.items() for alias in self.aliases[name]}
            # torch would put the weights of a module that has two names back wrongly
            out = functional_call(self.model, everywhere, (sample.unsqueeze(0),), tie_weights=False)
            return self.scalar(out)[0]

        def plain(sample: Tensor) -> dict[str, Tensor]:
            used = [self.parameters[name] for name in names]
            scalars = self.scalar(self.model(sample.unsqueeze(0)))
            # weights may be computed once and kept
            found = torch.autograd.grad(scalars[0], used, allow_unused=True, retain_graph=True)
            pairs = zip(names, used, found, strict=True)
            return {name: torch.zeros_like(p) if g is None else g.to_dense() for name, p, g in pairs}

        def some(samples: Tensor) -> dict[str, Tensor]:
            try:
                with unchanged(self.model):  # tensors of vmap's that it keeps would be of no use
                    found = {} if self.one_by_one else vmap(grad(one), in_dims=(None, 0))(chosen, samples)
            except RuntimeError:  # something in the model cannot be batched
                found = {}
            if not found:
                each = [plain(sample) for sample in samples]
                found = {name: torch.stack([g[name] for g in each]) for name in names}
            return {name: g.detach().reshape(len(samples), -1) for name, g in found.items()}

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # some functions are batched by a loop
            parts = [some(piece) for piece in x.split(PIECE)]
        return {name: Direct(torch.cat([part[name] for part in parts])) for name in names}


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of parameters that several modules share, by the first."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(p), []).append(f"{prefix}.{key}" if prefix else key)
    return {name: names[id(p)] for name, p in model.named_parameters()}


def _gradients(factor: AbstractFactor) -> Tensor | None:
    try:
        return factor.gradients()
    except RuntimeError:  # shapes that no rule expects
        return None


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: each keeps memory of its own. Its small kernels go first, or each would wait for large ones."""
    return torch.cuda.Stream(device, priority=-1)


def _now(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def _beside(forward: _Pass | None, device: torch.device) -> Iterator[None]:
    """In a stream of its own, which waits for this forward pass and for nothing else."""
    if device.type != "cuda":
        yield
        return
    stream = _second_stream(device)
    if forward is not None and forward.done is not None:
        stream.wait_event(forward.done)
    with torch.cuda.stream(stream), warnings.catch_warnings():
        # a graph of the user's that is still alive belongs to another stream: torch waits for it
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        yield


def _check_finite(finite: Tensor) -> None:
    """Waits for the device."""
    if not bool(finite):
        raise InputError("the model's output", "must be finite", None, "check the weights and the inputs")


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


def _check_alone(differs: float, others: list[list[float]]) -> None:
    """Refuse a model whose outputs differ between two calls, or depend on other samples: the gradients of a sample's
    output there, and at itself."""
    if differs > RANDOM:
        rule = "must give the same outputs twice: it draws random numbers, or counts its calls"
        raise InputError("model", rule, f"outputs that differ by {differs:.0%}", "model.eval(), if it was not")
    if any(elsewhere > AGREE * own for elsewhere, own in others):
        raise InputError("model", MIXES, None, "take out what is summed or normalized over the batch")


def _memory(modules: dict[str, nn.Module], calls: list[Call]) -> float:
    """Bytes for inputs and gradients of all calls, and for the patches of the largest, twice."""
    kept = sum(2.0 * given.numel() * given.element_size() for _, given in calls)
    return kept + 2 * max((patches_bytes(modules[name], given) for name, given in calls), default=0.0)


def _check_mode(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                "model",
                "must be in evaluation mode: in training mode batch norm mixes samples, which then have no gradient "
                "of their own",
                name,
                "model.eval()",
            )
        share = getattr(module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0.0)
        if isinstance(share, float) and share > 0:
            raise InputError(
                "model", "must be in evaluation mode: dropout draws other weights each time", name, "model.eval()"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise InputError(
                "model", "must not have batch norm without running statistics", name, "track_running_stats=True"
            )
