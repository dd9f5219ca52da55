r"""Muon for any training loop: matrices and filters move along the polar factor of their momentum, the rest by SGD or
AdamW, in one `torch.optim.Optimizer`. `optimizer = "muon"` in recipes shares its steps (`newton_schulz.descend`)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from stairwise.checks import InputError
from stairwise.training.graph import in_parallel
from stairwise.training.muon_checks import (
    OTHER_STATE,
    SETTINGS,
    SHAPED,
    STATES,
    check_parameter,
    check_settings,
    check_start,
    check_state,
    rate_of,
    rates_in_range,
)
from stairwise.training.newton_schulz import LONGEST, descend, start_lengths
from stairwise.training.rest import move_by_adamw, move_by_sgd
from stairwise.training.vectors import as_matrix, in_order, joined, parts_of, same_memory, shaped

Set = tuple[list[Tensor], Tensor]  # parameters that move together, and their gradients as one vector


class Muon(Optimizer):
    r"""Muon: every matrix moves along the polar factor of its momentum, so all its directions learn at the same speed.

    For a matrix or filter w, viewed as (out, rest), with gradient g and initial value w₀,

        v ← m v + (1 − m) g,    O ≈ polar(m v + (1 − m) g),    w ← (1 − lr · weight_decay) w − lr ‖w₀‖_F O / ‖O‖_F,

    where the polar factor of U S Vᵀ is U Vᵀ, computed by five Newton–Schulz steps for all matrices of similar shape at
    once. So lr is the length of a step relative to the initial weights. A matrix of zeros counts as long as one with
    orthonormal rows. Parameters with fewer than two axes move by momentum SGD, or AdamW, with `rest_lr`.

    A step with a gradient that is not finite (or longer than 1e18), or with a learning rate in a tensor that has left
    its range, changes nothing and is counted in `skipped`. Other settings out of their range are refused, also during
    training, and so is a state that is not finite. Nothing waits for the device if settings other than lr are plain
    numbers, so the step can be recorded in a CUDA graph after one ordinary step; make `lr` a tensor on the device to
    change it afterwards. Under data parallelism (DDP) all processes take the same step; sharded parameters (FSDP) are
    not supported.

    Arguments:
        params: parameters, named parameters or groups, as for other optimizers. A group is divided by the number of
            axes: two or more move by "muon", the others by `rest`; a group with its own `rule` ("muon", "sgd" or
            "adamw") is taken as it is, for example embeddings with `{"params": ..., "rule": "adamw", "lr": 1e-3}`.
        lr: relative step, at most 1, for matrices; a number or a tensor with one element. Times weight_decay it must be
            at most 1, too.
        momentum: m, also of SGD. nesterov: False takes polar(v).
        weight_decay: decoupled, for matrices; the others decay only in groups of their own with a weight_decay. Without
            it, and with noisy gradients, "relative" steps make weights grow, ‖w‖² ≈ ‖w₀‖² (1 + 33 Σ lr²) at momentum
            0.95, so the angle of a step falls. Try 5 to 15 / (lr × steps); tested with ten thousand steps and more.
        scaling: "relative", as above. "fixed": afterwards w ← ‖w₀‖ w / ‖w‖, so that the angle of a step is the present
            lr, for weights that batch norm follows; zeros reach their length in one step. "keller" (w ← w −
            lr max(1, rows/columns)^½ O) and "moonshot" (w ← w − lr 0.2 max(rows, columns)^½ O) are torch.optim.Muon's
            "original" and "match_rms_adamw".
        rest: "sgd" or "adamw".
        rest_lr: its learning rate; None: lr for SGD, 1e-3 for AdamW.
        betas, eps: of AdamW; eps at least 1e-30, and at least 1e-8 if betas[0]² > betas[1].
        steps: of Newton–Schulz.
        dtype: number format of the iteration; None: bfloat16 on GPUs, float32 elsewhere.
        foreach: False handles one parameter after the other, which is slower.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = Muon(layer.parameters(), lr=0.02)
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.eye(3)).square().sum().backward()
    >>> optimizer.step()
    >>> round(((layer.weight - before).norm() / before.norm()).item(), 4)
    0.02
    """

    _skipped: Tensor | None = None
    _checked: Sequence[Any] = ()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scaling: str = "relative",
        rest: str = "sgd",
        rest_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        steps: int = 5,
        dtype: torch.dtype | None = None,
        foreach: bool = True,
    ) -> None:
        params = _listed(params, "params")
        if not params:
            raise InputError("params", "must not be empty", None, "give model.parameters()")
        if len({isinstance(item, dict) for item in params}) > 1:
            raise InputError(
                "params", "must be all groups or all parameters", "both", 'give {"params": [...]} for each'
            )
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        defaults |= {"scaling": scaling, "rest": rest, "rest_lr": rest_lr, "betas": betas, "eps": eps, "steps": steps}
        defaults |= {"dtype": dtype, "foreach": foreach}
        defaults |= {"capturable": True}  # then torch loads the counters of AdamW to the device of their parameters
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without its own `rule` it is divided by the number of axes."""
        if "params" not in param_group:
            raise InputError("group", "must hold params", list(param_group), 'give {"params": [...], "lr": ...}')
        group = {**param_group, "params": _listed(param_group["params"], "params")}
        if group.get("rule") is not None:
            self._add_checked(group)
            return
        matrices = [item for item in group["params"] if _tensor(item).ndim > 1]
        others = [item for item in group["params"] if _tensor(item).ndim <= 1]
        if matrices or not others:
            self._add_checked({**group, "params": matrices, "rule": "muon"})
        if others:
            values = {**self.defaults, **group}
            rest, lr = values["rest"], values["rest_lr"]
            lr = lr if lr is not None else values["lr"] if rest == "sgd" else 1e-3
            own = {"lr": lr, "weight_decay": 0.0} | ({} if matrices else group)
            chosen = values["rest_lr"] is not None and (bool(matrices) or "lr" not in group)
            self._add_checked({**group, **own, "params": others, "rule": rest}, "rest_lr" if chosen else "lr")

    def _add_checked(self, group: dict[str, Any], lr_name: str = "lr") -> None:
        values = {**self.defaults, **group}
        check_settings(values)
        if isinstance(lr := rate_of(values, lr_name), Tensor):
            rate_of({**values, "lr": lr.item()}, lr_name)
        for item in group["params"]:
            check_parameter(_tensor(item), values["rule"])
        super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without this, each momentum would bring along the memory of all."""
        held = super().__getstate__()
        state = {p: {name: x.clone() for name, x in own.items()} for p, own in held["state"].items()}
        return {**held, "state": defaultdict(dict, state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` of another `sw.Muon` returned; a state that cannot be used is refused."""
        try:
            super().load_state_dict(state_dict)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError("state_dict", "must be that of sw.Muon", error, OTHER_STATE) from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called at the end of `load_state_dict`, and by copies."""
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:
            if "rule" not in group:
                raise InputError("state_dict", "must be that of sw.Muon", f"a group with {list(group)}", OTHER_STATE)
            for name, value in defaults.items():
                group.setdefault(name, value)  # settings that are younger than the state
            check_settings(group)
            for p in group["params"]:
                check_state(state["state"].get(p), p, group["rule"])
        super().__setstate__(state)

    @property
    def skipped(self) -> int:
        """Number of steps of this object that were skipped because of a gradient or a learning rate; waits for the
        device."""
        return 0 if self._skipped is None else int(self._skipped)

    @torch._disable_dynamo  # there is nothing to gain: the work is in few products of stacked matrices
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; `closure` computes loss and gradients again and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()]
        if not moving:
            return loss
        first = moving[0].device
        if self._skipped is None:
            _refuse_recording()
            self._skipped = torch.zeros((), device=first)
        work = [(group, [(ps, _gradients(ps, group["rule"])) for ps in _sets(group)]) for group in self.param_groups]
        usable = _usable([gradient for _, sets in work for _, gradient in sets])
        self._check_changes()
        for good in rates_in_range([group for group, sets in work if sets]):
            usable = {device: so_far & good.to(device) for device, so_far in usable.items()}
        sets_of = [(group["rule"], params) for group, sets in work for params, _ in sets]
        new = [(rule, fresh) for rule, params in sets_of if (fresh := [p for p in params if not self.state.get(p)])]
        if new:
            _refuse_recording()
        for act in (check_start, self._begin):  # all are checked before any has a state
            for rule, params in new:
                act(rule, params)
        self._skipped.add_(~usable[first])
        in_parallel([partial(self._move, group, sets, usable) for group, sets in work if sets])
        return loss

    def _check_changes(self) -> None:
        """Check settings that schedulers or users have changed since the last step. Tensors are not read again."""
        now = [group[name] for group in self.param_groups for name in SETTINGS]
        if len(now) != len(self._checked) or any(a is not b for a, b in zip(now, self._checked, strict=True)):
            for group in self.param_groups:
                check_settings(group)
            self._checked = now

    def _move(self, group: dict[str, Any], sets: Sequence[Set], usable: dict[torch.device, Tensor]) -> None:
        """Move the parameters of a group, one set after the other."""
        for params, gradient in sets:
            good = usable[gradient.device]
            users = same_memory(gradient, cast(Tensor, params[0].grad))  # which must not be changed
            gradient = gradient.masked_fill(~good, 0.0) if users else gradient.masked_fill_(~good, 0.0)
            lr = rate_of(group)
            rate = torch.full((), lr, device=good.device) if isinstance(lr, float) else lr.reshape(()).to(good.device)
            rate = torch.where(good, rate.float(), 0.0)
            if group["rule"] == "muon":
                self._move_matrices(group, params, gradient, rate, good)
            else:
                parts = [part.view(p.shape) for part, p in zip(parts_of(gradient, params), params, strict=True)]
                move = move_by_sgd if group["rule"] == "sgd" else move_by_adamw
                move(params, parts, [self.state[p] for p in params], rate, good, group)

    def _begin(self, rule: str, new: list[Tensor]) -> None:
        """Make the state of parameters that have none. Momenta of matrices lie one after the other in memory, so that
        all of them move in a few operations."""
        if rule == "muon":
            lengths = start_lengths([as_matrix(p) for p in new])
            joint = new[0].new_zeros(sum(p.numel() for p in new))
            for p, length, v in zip(new, lengths, parts_of(joint, new), strict=True):
                # torch loads states in the format of the parameter
                self.state[p] = {"momentum_buffer": shaped(v, p), "length": length.to(p.dtype)}
            return
        for p in new:
            self.state[p] = {name: torch.zeros_like(p) for name in STATES[rule] if name in SHAPED}
            if rule == "adamw":
                self.state[p]["step"] = torch.zeros((), device=p.device)

    def _momenta(self, params: list[Tensor]) -> list[Tensor]:
        """Momenta of matrices, each with its axes in the memory order of the parameter.

        One in another order or number format, loaded from another model for example, is copied; otherwise a momentum
        stays where it is, because recordings refer to it."""
        momenta = []
        for p in params:
            v = in_order(self.state[p]["momentum_buffer"], p)
            if not v.is_contiguous() or v.dtype != p.dtype:
                _refuse_recording()
                v = v.to(p.dtype).contiguous()
                self.state[p]["momentum_buffer"] = shaped(v.view(-1), p)
            momenta.append(v)
        return momenta

    def _move_matrices(
        self, group: dict[str, Any], params: list[Tensor], gradient: Tensor, rate: Tensor, usable: Tensor
    ) -> None:
        m, momenta = group["momentum"], self._momenta(params)
        vectors = joined(momenta)
        gradient = gradient.to(momenta[0].dtype)  # a gradient may have a number format of its own
        new = usable.to(gradient.dtype) * (1 - m)
        for v, g in zip(vectors, gradient.split([len(v) for v in vectors]), strict=True):
            v.lerp_(g, new)
            if group["nesterov"]:
                g.lerp_(v, m)
        weights = [as_matrix(p) for p in params]
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["weight_decay"] * rate)
        along = parts_of(gradient, params) if group["nesterov"] else momenta
        updates = [u.view(w.shape) for u, w in zip(along, weights, strict=True)]
        lengths = [self.state[p]["length"] for p in params]
        descend(weights, updates, rate, group["scaling"], lengths, steps=group["steps"], dtype=group["dtype"])


def _refuse_recording() -> None:
    """A recording must not make state, because each replay would make it anew."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise InputError("step", "must be taken once before it is recorded in a CUDA graph", None, "warm up first")


def _sets(group: dict[str, Any]) -> list[list[Tensor]]:
    """Parameters of a group that have gradients, divided into sets that are handled together."""
    sets: dict[Any, list[Tensor]] = {}
    for p in group["params"]:
        if p.grad is not None and p.numel():
            sets.setdefault((p.device, p.dtype) if group["foreach"] else id(p), []).append(p)
    return list(sets.values())


def _gradients(params: Sequence[Tensor], rule: str) -> Tensor:
    """Gradients as one vector; those of matrices are in the memory order of their parameters. Not copied if they
    already lie one after the other, as in this package's training."""
    grads = [_gradient(p).resolve_neg() for p in params]
    if rule == "muon":
        grads = [in_order(g, p) for g, p in zip(grads, params, strict=True)]
    parts = [g.reshape(-1).contiguous() for g in grads]
    return vectors[0] if len(vectors := joined(parts)) == 1 else torch.cat(parts)


def _gradient(p: Tensor) -> Tensor:
    gradient = cast(Tensor, p.grad)
    if gradient.is_sparse:
        what = f"gradient of the parameter of shape {tuple(p.shape)}"
        raise InputError(what, "must not be sparse", gradient.layout, "use torch.nn.Embedding(..., sparse=False)")
    return gradient


def _usable(gradients: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Whether the length of all gradients is finite and below 1e18, as a tensor on each of their devices."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        kind = torch.promote_types(gradient.dtype, torch.float32)
        length = torch.linalg.vector_norm(gradient, dtype=kind).float()
        by_device.setdefault(gradient.device, []).append(length)
    flags = {device: torch.stack(lengths).norm() < LONGEST for device, lengths in by_device.items()}
    if len(flags) > 1:
        first = gradients[0].device
        joint = torch.stack([usable.to(first) for usable in flags.values()]).all()
        flags = {device: joint.to(device) for device in flags}
    return flags


def _tensor(item: Any) -> Tensor:
    """The tensor of a parameter or of a pair (name, parameter)."""
    p = item[1] if isinstance(item, tuple) else item
    if not isinstance(p, Tensor):
        raise InputError("params", "must hold tensors", type(p).__name__, "give model.parameters()")
    return p


def _listed(params: Any, name: str) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, set) or not isinstance(params, Iterable):
        raise InputError(name, "must be an ordered collection", type(params).__name__, "give a list")
    try:
        return list(params)
    except TypeError as error:
        raise InputError(name, "must be an ordered collection", error, "give a list") from None
