"""One forward pass, and one backward pass to the outputs of layers: all per-sample gradients are made from these.

Layers with a rule (`rules.RULES`) give factored gradients. A trial on two samples compares them with autograd.
Parameters whose rule is wrong (used twice, tied, used by functions, samples not first) and those of all other modules
get their gradients from vmap(grad), so the result is always complete.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call, grad, vmap

from stairwise.checks import InputError
from stairwise.kernel.precision import float32_products
from stairwise.ntk import trial
from stairwise.ntk.factors import AbstractFactor, Direct
from stairwise.ntk.patches import patches_bytes
from stairwise.ntk.rules import RULES, factors
from stairwise.ntk.state import restored
from stairwise.ntk.trial import Call, Gradients, Pass

if TYPE_CHECKING:
    from stairwise.ntk.fast.second_stream import SecondStream

__all__ = ["Capture", "RulesChanged", "Scalar", "check_output"]

Scalar = Callable[[Tensor], Tensor]  # outputs (N, d) → (N,)
PROBE = 4  # the first pass has 5 rows, one twice, so that the batch size rarely equals a weight dimension
PIECE = 64  # samples per pass on a CPU, whose caches are small (1.15 ×), and of vmap, which keeps much


class RulesChanged(Exception):
    """Fewer parameters are covered by rules than was assumed. The caller must start again."""


@dataclass(frozen=True, eq=False)
class _Recorded(Pass):
    """A forward pass with its graph: scalars (N,), and where the outputs of the calls are in it."""

    scalars: Tensor
    edges: list[GradientEdge]

    def without_graph(self) -> Pass:
        """While the graph lives, torch makes gradients of a second one wait for the stream of the first."""
        return Pass(self.outputs, self.calls, self.finite, self.done)


class Capture:
    """Per-sample gradients of a network, by parameter.

    Arguments:
        model, scalar: the gradients are those of scalar(model(x)), (N,).
        samples: a few of them are passed through the model, to see which layers are called.
        convolutions: makes a context for passes with channels-last images; dropped if the model cannot take it.
        second_stream: makes the stream on which trials run.

    Attributes:
        by_rule: names of parameters whose gradients come from rules. An assumption until the first trial.
        sample_bytes: estimated memory for the factors of one sample.
    """

    def __init__(
        self,
        model: nn.Module,
        scalar: Scalar,
        samples: Tensor,
        convolutions: Callable[[], AbstractContextManager] | None = None,
        second_stream: "type[SecondStream] | None" = None,
    ) -> None:
        self.model, self.scalar = model, scalar
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise InputError("model", "must have trainable parameters", 0, "set requires_grad on some")
        trial.check_mode(model)
        self.aliases = _aliases(model)
        self.modules = {
            name: module
            for name, module in model.named_modules()
            if type(module) in RULES and any(p.requires_grad for p in module.parameters(recurse=False))
        }
        self.verified, self.one_by_one = False, False
        self.stream = second_stream(samples.device) if second_stream else None
        self.by_rule, self.sample_bytes = self._probe(torch.cat([samples[:PROBE], samples[:1]]))
        self.convolutions = convolutions if samples.ndim == 4 and self.by_rule else None

    def factors(self, x: Tensor) -> dict[str, AbstractFactor]:
        """Gradients of all samples, by name of parameter."""
        if x.is_cuda or len(x) <= PIECE:
            return self._factors(x)
        parts = [self._factors(piece) for piece in x.split(PIECE)]
        return {name: factor.joined([part[name] for part in parts]) for name, factor in parts[0].items()}

    def _factors(self, x: Tensor) -> dict[str, AbstractFactor]:
        by_rule: dict[str, AbstractFactor] = {}
        if self.by_rule:
            batch, b = self._passes(x)
            self._verify(x, batch)
            every = self._by_rules(batch.calls, b, len(x))
            by_rule = {name: factor for name, factor in every.items() if name in self.by_rule}
            if by_rule.keys() != self.by_rule:  # the model treats these samples differently from those of the trial
                self.by_rule &= by_rule.keys()
                raise RulesChanged
        else:
            for piece in x.split(PIECE):
                outputs = self.model(piece)
                finite = torch.isfinite(self._scalars(outputs, len(piece))).all()
                self._verify(piece, Pass(outputs.detach(), [], finite, self._mark()))
        others = [name for name in self.parameters if name not in self.by_rule]
        return by_rule | (self._by_vmap(x, others) if others else {})

    # --- passes

    def _passes(self, x: Tensor) -> tuple[Pass, Gradients]:
        """Forward pass, and gradients at the outputs of its calls."""
        if self.convolutions is not None:
            try:
                return self._by_products(x)
            except InputError:
                raise
            except Exception as error:  # the model may `view` images, or compute a part again, or anything else
                self._leave_to_torch(next(iter(str(error).splitlines()), type(error).__name__))
        return self._backward(self._forward(x))

    def _by_products(self, x: Tensor) -> tuple[Pass, Gradients]:
        assert self.convolutions is not None
        with self.convolutions():
            recorded = self._forward(x.contiguous(memory_format=torch.channels_last))
        return self._backward(recorded)

    def _leave_to_torch(self, why: str) -> None:
        words = f"this model's convolutions are left to torch, which is slower: {why}"
        warnings.warn(words, RuntimeWarning, stacklevel=3)
        self.convolutions = None

    def _forward(self, x: Tensor) -> _Recorded:
        calls: list[Call] = []
        edges: list[GradientEdge] = []

        def hook(name: str) -> Callable[..., None]:
            def record(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
                if output.requires_grad and inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim:
                    calls.append((name, inputs[0].detach()))
                    # unlike the output, the edge stays right when an in-place activation overwrites it
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
        return _Recorded(outputs.detach(), calls, finite, self._mark(), scalars, edges)

    def _backward(self, recorded: _Recorded) -> tuple[Pass, Gradients]:
        try:
            b = torch.autograd.grad(recorded.scalars.sum(), recorded.edges, allow_unused=True)
        except Exception:
            trial.check_finite(recorded.finite)  # name that first, because the model may have raised because of it
            raise
        return recorded.without_graph(), b

    def _scalars(self, output: Any, n: int) -> Tensor:
        scalars = self.scalar(check_output(output, n))
        if not isinstance(scalars, Tensor) or scalars.shape != (n,):
            raise InputError("output", f"must give one number per sample, shape ({n},) here", _described(scalars))
        if torch.is_grad_enabled() and not scalars.requires_grad:
            raise InputError("output", "must give numbers that can be differentiated", None, "do not detach them")
        return scalars

    def _probe(self, x: Tensor) -> tuple[set[str], float]:
        """Parameters of modules that are given one row per sample, and the memory that one sample takes."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        constant = {p.data_ptr() for p in tensors if not nn.parameter.is_lazy(p)}
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            # a tensor whose length is no multiple of the batch size does not grow with it
            if tensor.ndim and len(tensor) % len(x) == 0 and tensor.data_ptr() not in constant:
                saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor.detach()  # the tensor itself would keep the graph alive for good

        try:
            with saved_tensors_hooks(count, lambda tensor: tensor):
                recorded = self._forward(x)
        except Exception:  # the model may differentiate something itself, which these hooks do not allow
            saved.clear()
            recorded = self._forward(x)
        trial.check_finite(recorded.finite)
        kept = sum(2.0 * given.numel() * given.element_size() for _, given in recorded.calls)  # inputs and gradients
        largest = max((patches_bytes(self.modules[name], given) for name, given in recorded.calls), default=0.0)
        per_sample = max(kept + 2 * largest, float(sum(saved.values()))) / len(x)
        called = {name for name, given in recorded.calls if len(given) == len(x)}
        return {name for name in self.parameters if name.rpartition(".")[0] in called}, per_sample

    # --- gradients

    def _by_rules(self, calls: list[Call], b: Gradients, n: int) -> dict[str, AbstractFactor]:
        """Factors of modules that were called once, with one row per sample; b are the gradients at their outputs."""
        times = Counter(name for name, _ in calls)
        by_name: dict[str, AbstractFactor] = {}
        for (name, given), g in zip(calls, b, strict=True):
            if times[name] > 1 or g is None or len(given) != n or len(g) != n:
                continue
            if given.is_floating_point() and given.dtype != g.dtype:  # the model changes precision within
                continue
            try:
                own = factors(self.modules[name], trial.at_least_single(given), trial.at_least_single(g.detach()))
            except (RuntimeError, ValueError):  # an unusual module: no rule
                continue
            for key, factor in own.items():
                full = f"{name}.{key}" if name else key
                if full in self.parameters:  # the second name of a shared parameter is not
                    by_name[full] = factor
        return by_name

    def _by_vmap(self, x: Tensor, names: list[str]) -> dict[str, AbstractFactor]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap batches some functions by a loop
            parts = [self._gradients(piece, names) for piece in x.split(PIECE)]
        return {name: Direct(torch.cat([part[name] for part in parts])) for name in names}

    def _gradients(self, x: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Gradients (n, size) by vmap(grad), or one by one if something in the model cannot be batched."""
        chosen = {name: self.parameters[name].detach() for name in names}
        gradients: dict[str, Tensor] = {}
        try:
            with restored(self.model):  # the model must not keep tensors of vmap's
                if not self.one_by_one:
                    gradients = vmap(grad(self._functional), in_dims=(None, 0))(chosen, x)
        except RuntimeError:
            pass
        if not gradients:
            each = [self._one_gradient(sample, names) for sample in x]
            gradients = {name: torch.stack([one[name] for one in each]) for name in names}
        return {name: g.detach().reshape(len(x), -1) for name, g in gradients.items()}

    def _functional(self, parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        everywhere = {alias: values for name, values in parameters.items() for alias in self.aliases[name]}
        # tie_weights=True would restore the weights of a module that has two names as plain tensors
        out = functional_call(self.model, everywhere, (sample.unsqueeze(0),), tie_weights=False)
        return self.scalar(out)[0]

    def _one_gradient(self, sample: Tensor, names: list[str]) -> dict[str, Tensor]:
        used = [self.parameters[name] for name in names]
        scalars = self.scalar(self.model(sample.unsqueeze(0)))
        # retain_graph: the model may compute weights once and keep them
        out = torch.autograd.grad(scalars[0], used, allow_unused=True, retain_graph=True)
        return {name: _dense(g, p) for name, p, g in zip(names, used, out, strict=True)}

    # --- the trial

    def _mark(self) -> Any:
        return None if self.stream is None else self.stream.mark()

    def _verify(self, x: Tensor, batch: Pass) -> None:
        """Pass two samples of x alone and compare with their pass within the batch. With the first batch, also compare
        rules with autograd, and passes with other convolutions with plain ones."""
        rows = slice((len(x) - 1) // 2, None, max(1, len(x) // 2))  # one in the middle, and the last
        with nullcontext() if self.stream is None else self.stream.entered(after=batch.done):
            try:
                with float32_products(tf32=False):  # rounding must not look like rules that fail
                    alone, right, same = self._alone(x[rows].clone())
            except Exception:
                trial.check_finite(batch.finite)  # name that first, because the failure may come from it
                raise
            trial.check_finite(batch.finite)
            if same:
                in_place = trial.check_rows(batch, alone, rows)
                right &= {name for name in self.parameters if name.rpartition(".")[0] in in_place}
        if not same:
            self._leave_to_torch("as products they give other gradients")
        self.verified = True
        if not (same and self.by_rule <= right):
            self.by_rule &= right
            raise RulesChanged

    def _alone(self, samples: Tensor) -> tuple[Pass, set[str], bool]:
        """A plain pass, parameters whose rules are right, and whether passes with other convolutions agree with it."""
        if self.verified:
            return self._forward(samples), set(self.by_rule), True
        alone, b, right = self._try_rules(samples)
        if self.convolutions is None:
            return alone, right, True
        try:
            other, other_b = self._by_products(samples)
        except Exception:  # it works with many samples and not with two
            return alone, right, False
        return alone, right, trial.agree(other.calls, other_b, alone.calls, b)

    def _try_rules(self, samples: Tensor) -> tuple[Pass, Gradients, set[str]]:
        """A plain pass, gradients at the outputs of its calls, and parameters whose rules agree with autograd."""
        x, recorded = self._forward_with_gradients_of(samples)
        again = self.model(x.clone()).detach()
        into: list[Any] = [*recorded.edges, *self.parameters.values(), *([x] if x.requires_grad else [])]
        each = [torch.autograd.grad(s, into, allow_unused=True, retain_graph=True) for s in recorded.scalars]
        calls, last = len(recorded.edges), len(recorded.edges) + len(self.parameters)
        b = [_sum([out[k] for out in each]) for k in range(calls)]
        exact = {
            name: torch.stack([_dense(out[k], p).flatten() for out in each])
            for k, (name, p) in enumerate(self.parameters.items(), calls)
        }
        at_samples = [_dense(out[last], x) for out in each] if x.requires_grad else []
        by_rule = self._by_rules(recorded.calls, b, len(samples))
        right = trial.right_rules(by_rule, exact, recorded.outputs, again, at_samples)
        rest = [name for name, g in exact.items() if name not in right & self.by_rule and g.numel()]
        by_vmap = self._by_vmap(samples, rest) if rest else {}
        # they do not agree if the model has stored weights elsewhere, too
        self.one_by_one = any(
            float((by_vmap[name].gradients() - exact[name]).norm()) > trial.SAME * float(exact[name].norm())
            for name in rest
        )
        return recorded.without_graph(), b, right

    def _forward_with_gradients_of(self, samples: Tensor) -> tuple[Tensor, _Recorded]:
        """A forward pass, and its samples, which get gradients if the model allows it."""
        if samples.is_floating_point():
            x = samples.clone().requires_grad_()
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True")
                    return x, self._forward(x.clone())  # a clone, because the model may write to it
            except Exception:  # it may use numpy; if it fails for another reason, it fails again below
                pass
        return samples, self._forward(samples.clone())


def check_output(output: Any, n: int) -> Tensor:
    """The model's output, if it is (n, d)."""
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != n:
        raise InputError("the model's output", "must be 2-D, (samples, d)", _described(output), "wrap the model")
    return output


def _described(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by the first: several modules may share one."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(p), []).append(f"{prefix}.{key}" if prefix else key)
    return {name: names[id(p)] for name, p in model.named_parameters()}


def _dense(g: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if g is None else g.to_dense()


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [g for g in gradients if g is not None]
    return torch.stack(present).sum(0) if present else None
