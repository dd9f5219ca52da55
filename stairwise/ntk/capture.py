"""One forward and one backward pass to the outputs of layers: what all per-sample gradients are made of.

Layers with a rule (`factors.RULES`) give factored gradients. A trial on a few samples compares them with autograd;
parameters for which they are not the whole story (used twice, tied, used by functions, samples not first) and
parameters of all other modules get their per-sample gradients from vmap(grad), so the result is always complete. On a
GPU convolutions may be computed as products; the trial compares that, too.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap

from stairwise.checks import InputError
from stairwise.ntk.factors import RULES, AbstractFactor, Direct, factors, patches_bytes
from stairwise.ntk.products import ConvolutionsByProducts

__all__ = ["Capture", "RulesChanged", "Scalar", "products_in"]

Call = tuple[str, Tensor]  # name of the module, its input
Scalar = Callable[[Tensor], Tensor]  # outputs (N, d) → (N,)
TRIAL = 2  # samples
PIECE = 64  # samples a pass on a CPU, whose caches are small, and of vmap, which keeps much
AGREE, AGREE_DOUBLE = 1e-3, 1e-9  # of the largest gradient, in single and double precision
# of the size of a layer's inputs and gradients. Rounding that turns a unit on or off makes the gradients of one sample
# jump; wrong ones are wrong in all samples
SAME, JUMP = 0.03, 0.5


class RulesChanged(Exception):
    """Fewer parameters are covered by rules than was thought: begin again."""


class Capture:
    """Per-sample gradients of a network, by parameter.

    Arguments:
        model, scalar: the gradients are those of scalar(model(x)), (N,).
        trial: samples, of which a few are tried.
        by_products: compute convolutions as matrix products, images in channels-last layout, if the model can take it.

    Attributes:
        by_rule: names of parameters whose gradients come from rules; the others' come from vmap(grad). Until `verify`
            has been called, a supposition.
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
        self.trial, self.verified, self.sample_bytes = trial[:TRIAL], False, 0.0
        self.by_products = by_products and trial.ndim == 4
        self.forward_done: torch.cuda.Event | None = None
        self.by_rule = self._called(torch.cat([trial[:TRIAL], trial[:1]]))

    def verify(self) -> None:
        """Compare rules with autograd, and passes by products with plain ones, once. Best done while a GPU is busy:
        this is mostly Python's time, and in a stream of its own it does not wait for the rest."""
        if not self.verified:
            with products_in("float32"), self._beside():  # faster ones would look like rules that fail
                calls, b, right = self._tried()
                by_products = self.by_products and self._products_agree(calls, b)
            self.verified, changed = True, not self.by_rule <= right or by_products != self.by_products
            if by_products != self.by_products:
                self._leave_to_torch("as products they give other gradients")
            if changed:
                self.by_rule &= right
                raise RulesChanged

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """In a stream of its own, which waits for the last forward pass and for nothing else."""
        if not self.trial.is_cuda:
            yield
            return
        stream = _second_stream(self.trial.device)
        if self.forward_done is not None:  # a model may keep something in its forward pass for the next
            stream.wait_event(self.forward_done)
        with torch.cuda.stream(stream), warnings.catch_warnings():
            # a graph of the user's that is still alive belongs to another stream: torch waits for it
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
            yield

    def factors(self, x: Tensor) -> dict[str, AbstractFactor]:
        """Gradients of all samples, by name of parameter."""
        if x.is_cuda or len(x) <= PIECE:
            return self._factors(x)
        parts = [self._factors(piece) for piece in x.split(PIECE)]
        return {name: factor.joined([part[name] for part in parts]) for name, factor in parts[0].items()}

    def _factors(self, x: Tensor) -> dict[str, AbstractFactor]:
        found: dict[str, AbstractFactor] = {}
        if self.by_rule:
            calls, b = self._passes(x)
            self.verify()
            found = {name: f for name, f in self._by_rules(calls, b, len(x)).items() if name in self.by_rule}
            if found.keys() != self.by_rule:  # these samples are treated in another way than those of the trial
                self.by_rule &= found.keys()
                raise RulesChanged
        else:
            with torch.no_grad():
                _check_finite(torch.isfinite(self._scalars(self.model(x), len(x))).all())
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
                own = factors(self.modules[name], _at_least_single(given), _at_least_single(g.detach()))
            except (RuntimeError, ValueError):  # an unusual module: no rule
                continue
            for key, factor in own.items():
                full = f"{name}.{key}" if name else key
                if full in self.parameters:  # a second name of a shared parameter is not
                    found[full] = factor
        return found

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Call], list[GradientEdge]]:
        """Scalars (N,) and, for each call of a module with a rule: its name, its input, and where its output is."""
        calls: list[Call] = []
        edges: list[GradientEdge] = []

        def hook(name: str) -> Callable[..., None]:
            def record(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
                if output.requires_grad and inputs:
                    # the edge stays right when an in-place activation overwrites the output
                    calls.append((name, inputs[0].detach()))
                    edges.append(get_gradient_edge(output))

            return record

        hooks = [module.register_forward_hook(hook(name)) for name, module in self.modules.items()]
        try:
            with torch.enable_grad():
                scalars = self._scalars(self.model(x), len(x))
        finally:
            for one in hooks:
                one.remove()
        return scalars, calls, edges

    def _passes(self, x: Tensor) -> tuple[list[Call], Sequence[Tensor | None]]:
        """Calls of modules with rules and the gradients at their outputs; by products, if the model can take it."""
        if self.by_products:
            try:
                return self._by_products(x)
            except InputError:
                raise
            except Exception as error:  # it may `view` images in another way, or compute some of it again, or anything
                self._leave_to_torch(next(iter(str(error).splitlines()), type(error).__name__))
        return self._backward(*self._forward(x))

    def _leave_to_torch(self, why: str) -> None:
        words = f"this model's convolutions are left to torch, which is slower: {why}"
        warnings.warn(words, RuntimeWarning, stacklevel=3)
        self.by_products = False

    def _by_products(self, x: Tensor) -> tuple[list[Call], Sequence[Tensor | None]]:
        with ConvolutionsByProducts():
            scalars, calls, edges = self._forward(x.contiguous(memory_format=torch.channels_last))
        return self._backward(scalars, calls, edges)

    def _backward(
        self, scalars: Tensor, calls: list[Call], edges: list[GradientEdge]
    ) -> tuple[list[Call], Sequence[Tensor | None]]:
        """Calls, and gradients at their outputs. The graph ends here: while it lives, torch would make gradients of a
        second one wait for the stream of the first."""
        finite = torch.isfinite(scalars).all()
        if scalars.is_cuda:
            self.forward_done = torch.cuda.current_stream(scalars.device).record_event()
        try:
            b = torch.autograd.grad(scalars.sum(), edges, allow_unused=True)
        finally:
            with self._beside():  # waits for the forward pass, not for all that was launched since
                _check_finite(finite)
        return calls, b

    def _products_agree(self, plain_calls: list[Call], plain_b: Sequence[Tensor | None]) -> bool:
        """Whether inputs and gradients of the trial by products are those of plain passes, but for rounding."""
        try:
            calls, b = self._by_products(self.trial)
        except Exception:  # with so few samples it cannot do what it could with more
            return False
        if [(name, given.shape) for name, given in calls] != [(name, given.shape) for name, given in plain_calls]:
            return False
        if [g is None for g in b] != [g is None for g in plain_b]:
            return False
        inputs = [_differences(one[1], other[1]) for one, other in zip(calls, plain_calls, strict=True)]
        gradients = [_differences(g, h) for g, h in zip(b, plain_b, strict=True) if g is not None and h is not None]
        same = all(most <= SAME for _, most in _numbers(inputs))
        return same and all(least <= SAME and most <= JUMP for least, most in _numbers(gradients))

    def _scalars(self, output: Any, n: int) -> Tensor:
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != n:
            found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise InputError("the model's output", "must be 2-D, (samples, d)", found, "wrap the model")
        scalars = self.scalar(output)
        if scalars.shape != (n,):
            raise InputError("output", "must give one number a sample", f"shape {tuple(scalars.shape)}")
        return scalars

    def _tried(self) -> tuple[list[Call], list[Tensor | None], set[str]]:
        """Calls, gradients at their outputs, and the parameters whose gradients the rules give rightly: each sample has
        all of its own of autograd's, the others nothing; and it has some."""
        n, used = len(self.trial), list(self.parameters.values())
        scalars, calls, edges = self._forward(self.trial)
        b: list[Tensor | None] = [None] * len(edges)
        right, moved, sizes = set(self.parameters), set[str](), dict[tuple[int, str], list[Tensor]]()
        for i in range(n):
            out = torch.autograd.grad(scalars[i], [*edges, *used], allow_unused=True, retain_graph=True)
            b = [_sum(one, other) for one, other in zip(b, out[: len(edges)], strict=True)]
            found = self._by_rules(calls, out[: len(edges)], n)
            for name, whole in zip(self.parameters, out[len(edges) :], strict=True):
                gradients = _gradients(found[name]) if name in found and whole is not None else None
                if gradients is None or gradients.shape[1:] != (whole.numel(),):
                    right.discard(name)
                else:
                    sizes[i, name] = _sizes(gradients, whole.to_dense().flatten(), i)
        for (_, name), (off, size) in zip(sizes, _numbers(sizes.values()), strict=True):
            tolerance = AGREE_DOUBLE if self.parameters[name].dtype == torch.float64 else AGREE
            if not off <= tolerance * (size + 1e-30):  # not a number, perhaps
                right.discard(name)
            if size > 0:
                moved.add(name)
        return calls, b, right & moved

    def _called(self, x: Tensor) -> set[str]:
        """Parameters of modules that are given one row a sample at another number of samples too: rows that are
        something else may be as many by chance."""
        scalars, calls, _ = self._forward(x)
        _check_finite(torch.isfinite(scalars).all())
        self.sample_bytes = _memory(self.modules, calls) / len(x)
        known = {name for name, given in calls if len(given) == len(x)}
        return {name for name in self.parameters if name.rpartition(".")[0] in known}

    def _by_vmap(self, x: Tensor, names: list[str]) -> dict[str, AbstractFactor]:
        chosen = {name: self.parameters[name].detach() for name in names}

        def one(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            everywhere = {alias: values for name, values in parameters.items() for alias in self.aliases[name]}
            # torch would put the weights of a module that has two names back wrongly
            out = functional_call(self.model, everywhere, (sample.unsqueeze(0),), tie_weights=False)
            return self.scalar(out)[0]

        def some(samples: Tensor) -> dict[str, Tensor]:
            try:
                found = vmap(grad(one), in_dims=(None, 0))(chosen, samples)
            except RuntimeError:  # something in the model cannot be batched: one by one
                each = [grad(one)(chosen, sample) for sample in samples]
                found = {name: torch.stack([g[name] for g in each]) for name in names}
            return {name: g.detach().flatten(1) for name, g in found.items()}

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # some functions are batched by a loop
            parts = [some(piece) for piece in x.split(PIECE)]
        return {name: Direct(torch.cat([part[name] for part in parts])) for name in names}


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Float32 products are exact to rounding unless TF32 was asked for, whatever the user's settings."""
    fast = precision == "tf32"
    matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv


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


def _check_finite(finite: Tensor) -> None:
    """Waits for the device."""
    if not bool(finite):
        raise InputError("the model's output", "must be finite", None, "check the weights and the inputs")


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


def _sizes(found: Tensor, whole: Tensor, i: int) -> list[Tensor]:
    """Largest error of gradients (n, size) by rules, where sample i has all of autograd's (size,) and the others have
    nothing; and the largest element."""
    off = found.clone()
    off[i] -= whole
    return [_largest(off), _largest(whole)]


def _differences(one: Tensor, other: Tensor) -> list[Tensor]:
    """Of the rows of one and of the other, relative to these: the smallest and the largest."""
    if not one.is_floating_point() or not one.numel():
        return [(one != other).any().float()] * 2
    off, size = ((v.reshape(len(v), -1)).norm(dim=1) for v in (one - other, other))
    share = off / size.clamp_min(1e-30)
    return [share.amin(), share.amax()]


def _numbers(rows: Collection[Sequence[Tensor]]) -> list[list[float]]:
    """Rows of scalars; the device is asked once."""
    flat = [x for row in rows for x in row]
    return torch.stack(flat).double().view(len(rows), -1).tolist() if flat else []


def _largest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, ord=torch.inf) if x.numel() else x.new_zeros(())


def _memory(modules: dict[str, nn.Module], calls: list[Call]) -> float:
    """Bytes for inputs and gradients of all calls, and for the patches of the largest, twice."""
    kept = sum(2.0 * given.numel() * given.element_size() for _, given in calls)
    return kept + 2 * max((patches_bytes(modules[name], given) for name, given in calls), default=0.0)


def _at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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
