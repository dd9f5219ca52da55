"""Which tensors of a call are two views of the same samples: arguments of a loss, or outputs of a projector."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stairwise.checks import InputError

Pair = tuple[Tensor, Tensor]
Views = int | Callable[..., Any] | None

LABELLED = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiMarginLoss,
)  # they compare predictions with labels

UNSURE = 4  # from so many tensors of one shape on, any two may be z: SimSiam has predictions and targets of two views

# what a call of a loss shows
PAIR = "two views, both trained"
KEY = "two tensors, one of them without gradient: a query and a momentum key, or a prediction and its target"
SEVERAL = "views in a list, in one tensor, or as tokens"
UNPAIRED = "embeddings of different numbers of samples"
NOTHING = "no two views"


class Lines(NamedTuple):
    """What a warning tells the user to write.

    Attributes:
        projector: if the loss does not show z.
        function: if z is part of what the loss gets.
        by_hand: if no module shows two views.
    """

    projector: str = (
        "attach(projector=model.projection_head, …), with the module whose output is z, or watch.update(z_a, z_b)"
    )
    function: str = "attach(loss=criterion, views=…)"
    by_hand: str = "watch.update(z_a, z_b)"


class Seen(NamedTuple):
    """What a call of the loss shows: the pair, which of the cases above, and what is unusual about it."""

    pair: Pair | None
    case: str
    unusual: str = ""


def pooled(x: Any) -> Tensor:
    """Average over positions: (N, channels, height, width) or (N, tokens, features) → (N, features)."""
    if not isinstance(x, Tensor):
        raise InputError("h", "must be a torch tensor", type(x).__name__, "use torch.as_tensor")
    return x.flatten(2).mean(dim=2) if x.ndim > 3 else x.mean(dim=1) if x.ndim == 3 else x


def representation(output: Any) -> Tensor | None:
    """h in the output of a backbone, (N, features): a tensor, the first of several, or what transformers return."""
    output = getattr(output, "last_hidden_state", output)
    if isinstance(output, list | tuple) and output:
        output = output[0]
    return pooled(output) if isinstance(output, Tensor) and output.ndim > 1 else None


def value_of_loss(output: Any) -> Tensor | None:
    """The value of the loss in what its module returns: a tensor, the entry "loss" of a dict, or else the first number
    with a gradient in a dict or tuple.

    >>> import torch
    >>> z = torch.ones(2, requires_grad=True)
    >>> value_of_loss({"accuracy": torch.tensor(0.5), "total": z.sum()}), value_of_loss(([], "no tensor"))
    (tensor(2., grad_fn=<SumBackward0>), None)
    """
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    if isinstance(output, Tensor):
        return output
    found = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return next((x for x in found if isinstance(x, Tensor) and x.numel() == 1 and x.requires_grad), None)


def views_of_loss(loss: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], views: Views, joined: bool) -> Seen:
    """Find the two views among the arguments of a loss.

    >>> import torch
    >>> z = torch.ones(4, 2, requires_grad=True)
    >>> views_of_loss(nn.MSELoss(), (z, z), {}, None, False).case
    'two views, both trained'
    >>> views_of_loss(nn.CrossEntropyLoss(), (z, torch.zeros(4).long()), {}, None, False).unusual
    'CrossEntropyLoss compares predictions with labels'
    """
    if callable(views):
        return chosen(views(args, kwargs))
    given = [x if isinstance(x, Tensor) else _listed(x) for x in (*args, *kwargs.values())]
    given = [x for x in given if isinstance(x, Tensor) or x]
    name = type(loss).__name__
    if isinstance(loss, LABELLED):
        return Seen(None, NOTHING, f"{name} compares predictions with labels")
    if not given:
        return Seen(None, NOTHING, f"{name} is called without tensors")
    if not isinstance(given[0], Tensor):
        return _of_lists(name, [x for x in given if not isinstance(x, Tensor)], views)
    tensors = [x for x in given if isinstance(x, Tensor)]
    if len(tensors) > 1 and tensors[0].shape == tensors[1].shape and tensors[1].is_floating_point():
        return _of_several(loss, tensors) or _of_two(loss, tensors[0], tensors[1])
    return _of_one(name, tensors, views, joined)


def chosen(pair: Any) -> Seen:
    """What a function of the user has chosen: (z_a, z_b), or None."""
    if pair is None:
        return Seen(None, NOTHING)
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(z, Tensor) for z in pair):
        raise InputError("views", "must return (z_a, z_b) or None", type(pair).__name__)
    return Seen((pair[0], pair[1]), SEVERAL)


def views_of_output(output: Any, views: Views, joined: bool) -> list[Tensor]:
    """The views in one output of a projector: one, or all of them if they are joined or `views` finds them."""
    if callable(views):
        pair = chosen(views(output)).pair
        return [] if pair is None else list(pair)
    if not isinstance(output, Tensor):
        remedy = "hook another module, or give views= a function of the output that returns (z_a, z_b)"
        raise InputError("projector", "must return a tensor", type(output).__name__, remedy)
    return split(pooled(output), views) if joined else [pooled(output)]


def split(z: Tensor, views: int | None) -> list[Tensor]:
    """Views that were joined, (views · N, d), first views first."""
    number = views or 2
    if len(z) % number:
        remedy = "leave joined out, or set views= to the number of views"
        raise InputError("joined", f"needs a number of rows that {number} divides", len(z), remedy)
    return list(z.chunk(number))


def _listed(x: Any) -> list[Tensor]:
    """Views in a list; of tuples the first tensors, as in VICRegL, where (z, z of positions) is a view."""
    if not isinstance(x, list | tuple):
        return []
    first = [z[0] if isinstance(z, list | tuple) and z else z for z in x]
    return first if all(isinstance(z, Tensor) for z in first) else []


def _of_lists(name: str, lists: list[Any], views: int | None) -> Seen:
    """Lists of views; where there are two, as in DINO, the one that is trained."""
    trained = [x for x in lists if any(z.requires_grad for z in x)] or lists
    if len(trained[0]) < 2:
        return Seen(None, NOTHING, f"{name} gets a list of one tensor")
    a, b = pooled(trained[0][0]), pooled(trained[0][1])
    if a.shape != b.shape or a.ndim != 2:
        return Seen(None, NOTHING, f"{name} gets a list of tensors of different shapes")
    several, number = len(trained) > 1, len(trained[0])
    more = f"{name} gets {'several lists' if several else f'a list of {number} views'}, and the first two are recorded"
    return Seen((a, b), SEVERAL, more if (several or number > 2) and views is None else "")


def _of_several(loss: nn.Module, tensors: list[Tensor]) -> Seen | None:
    """Four embeddings in one call, such as two predictions and two targets: which of them are z cannot be known."""
    alike = [x for x in tensors if x.shape == tensors[0].shape and x.is_floating_point() and x.ndim == 2]
    if len(alike) < UNSURE:
        return None
    return Seen(
        None, NOTHING, f"{type(loss).__name__} gets {len(alike)} tensors of one shape, of which any two may be z"
    )


def _of_two(loss: nn.Module, a: Tensor, b: Tensor) -> Seen:
    name, trained_alike = type(loss).__name__, a.requires_grad == b.requires_grad
    if a.ndim < 2:
        return Seen(None, NOTHING, f"{name} gets vectors")
    if trained_alike and not a.requires_grad and torch.is_grad_enabled():
        case = PAIR if a.ndim == 2 else SEVERAL
        return Seen((pooled(a), pooled(b)), case, f"{name} gets tensors without a gradient, which may be inputs")
    if trained_alike:
        unusual = f"{name} gets tensors of shape {tuple(a.shape)}, which are averaged over positions"
        return Seen((a, b), PAIR) if a.ndim == 2 else Seen((pooled(a), pooled(b)), SEVERAL, unusual)
    if a.ndim > 2 or type(loss).__module__.startswith("torch.nn"):
        return Seen(None, NOTHING, f"{name} compares predictions with targets, which have no gradient")
    return Seen((a, b), KEY)


def _of_one(name: str, tensors: list[Tensor], views: int | None, joined: bool) -> Seen:
    z, number = tensors[0], views or 2
    if joined and z.ndim == 2:
        parts = split(z, views)
        return Seen((parts[0], parts[1]), SEVERAL)
    if z.ndim == 3 and z.shape[0] == number:
        return Seen((z[0], z[1]), SEVERAL)
    if z.ndim == 3 and z.shape[1] == number:
        return Seen((z[:, 0], z[:, 1]), SEVERAL)
    if z.ndim == 3:
        return Seen(
            None, NOTHING, f"{name} gets one tensor of shape {tuple(z.shape)}: set views= to the number of views"
        )
    if len(tensors) == 1:
        return Seen(None, NOTHING, f"{name} gets one tensor: if both views are joined in it, set joined=True")
    shapes = " and ".join(str(tuple(x.shape)) for x in tensors[:2])
    case = UNPAIRED if all(x.ndim == 2 and x.shape[1] == z.shape[1] for x in tensors[:2]) else NOTHING
    return Seen(None, case, f"{name} gets tensors of shapes {shapes}, which are not two views")


def looks_like_labels(x: Tensor) -> bool:
    """Whether rows are probabilities, or zeros and ones (waits for the device)."""
    near = max(1e-3, 4 * torch.finfo(x.dtype).eps) if x.is_floating_point() else 0.0
    x = x.detach().float()
    shares = (x >= 0).all() and ((x.sum(dim=1) - 1).abs() <= near).all()
    return bool(shares or (((x == 0) | (x == 1)).all() and (x == 1).any()))


def check_pair(name: str, a: Tensor, b: Tensor) -> None:
    """Refuse what cannot be embeddings of two views, `name`_a and `name`_b."""
    for view, given in (("a", a), ("b", b)):
        if not isinstance(given, Tensor):
            kind = type(given).__name__
            raise InputError(f"{name}_{view}", "must be a torch tensor", kind, "use torch.as_tensor")
        if given.is_complex() or given.layout != torch.strided or given.is_meta:
            kind = f"{given.dtype}, {given.layout}, {given.device}"
            raise InputError(f"{name}_{view}", "must be a dense tensor of real numbers", kind)
    if a.ndim != 2 or a.shape != b.shape:
        got, remedy = f"{tuple(a.shape)}, {tuple(b.shape)}", "average tokens over positions" if a.ndim > 2 else ""
        raise InputError(f"{name}_a and {name}_b", "must be 2-D and of the same shape", got, remedy)
