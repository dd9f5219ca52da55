"""One pair of views per pass, from the calls of a loss or a projector.

A pass is what happens between two backward passes or updates. Its first two projector outputs are the views, or the
arguments of its first call of the loss. So gradient accumulation (a backward pass per batch) gives a pair for each
batch, and multi-crop (many calls, one backward pass) gives one pair. Of a closure that the optimizer calls repeatedly
(LBFGS) the first pass is used. Calls without gradients, or during a backward pass, are not counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stairwise.monitor.views import (
    KEY,
    NOTHING,
    PAIR,
    UNPAIRED,
    Lines,
    Seen,
    Views,
    looks_like_labels,
    views_of_loss,
    views_of_output,
)

LOSS, PROJECTOR, EITHER, BY_HAND = "loss", "projector", "either", "by hand"


class PairFinder:
    """Watches the calls of each pass, and hands over its pair.

    Arguments:
        source: where z comes from; EITHER is decided after the first pass.
        projectors: names of the projectors that are hooked, by id, in order of preference.
        lines: what warnings tell the user to write.
        take: receives each pair. tell: receives each warning. decided: called when EITHER has been decided.
    """

    def __init__(
        self,
        source: str,
        projectors: dict[int, str],
        views: Views,
        joined: bool,
        lines: Lines,
        take: Callable[[Tensor, Tensor], None],
        tell: Callable[[str], None],
        decided: Callable[[str], None],
    ) -> None:
        self.source, self.projectors, self.views, self.joined, self.lines = source, projectors, views, joined, lines
        self.take, self.tell, self.decided = take, tell, decided
        self.over = False  # a backward pass or an update came since the last call
        self.backwards = False  # any backward pass was seen
        self.stepping, self.passes_in_step = False, 0
        self.labels: bool | None = None
        self._clear()

    def _clear(self) -> None:
        self.begun, self.over, self.repeated = False, False, False
        self.loss_calls, self.hidden_calls, self.hidden_rows = 0, 0, 0
        self.second: Tensor | None = None  # h of the second call of the backbone, if it must wait for z
        self.outputs: dict[int, list[Tensor]] = {}
        self.output_calls: dict[int, int] = {}
        self.held: Seen | None = None  # first call of the loss, if it must wait for the end of the pass
        self.tensors: set[int] = set()  # ids of the first pair
        self.taken = False

    # the pass

    def counts(self) -> bool:
        """Whether a call that happens now belongs to training and to the pass; begins a pass where the last is over."""
        if not torch.is_grad_enabled() or _in_backward():
            return False
        if self.over:
            self.end()
        if not self.begun:
            self.begun = True
            self.passes_in_step += self.stepping
            self.repeated = self.stepping and self.passes_in_step > 1
        return not self.repeated

    def in_pass(self) -> bool:
        """Whether a call has been counted since the last backward pass or update."""
        return self.begun and not self.over

    def watch_backward(self, output: Any) -> None:
        """Note when the backward pass reaches this output."""
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.register_hook(self._backward)

    def _backward(self, _: Tensor) -> None:
        self.over = self.backwards = True

    def before_update(self) -> None:
        self.end()
        self.stepping, self.passes_in_step = True, 0

    def after_update(self) -> None:
        self.end()
        self.stepping = False

    def end(self) -> None:
        """End the pass: hand over what was waiting, and say what was missing."""
        try:
            if self.source == EITHER and (self.loss_calls or self.outputs):
                self._decide()
            elif self.held is not None and self.held.pair is not None:
                self._about_keys()
                self.take(*self.held.pair)
            elif self.source == PROJECTOR and self.views is None and max(self.output_calls.values(), default=0) > 2:
                self._about_more(max(self.output_calls.values()))
            elif self.source == PROJECTOR and self._alone():
                self.tell(
                    "the projector was called once before the backward pass, so there is no pair of views: "
                    "hook the loss, set joined=True if both views go through it as one batch, or call "
                    f"{self.lines.by_hand} once per update"
                )
        finally:
            self._clear()

    # calls

    def hidden(self, output: Any, h: Tensor | None) -> bool:
        """Whether this output of the backbone, one of the first two of a pass, is recorded now: the second one only if
        it has as many rows as the first.

        If views are joined, whether the second call belongs to them is known when z has been seen.
        """
        self.hidden_calls += 1
        if self.hidden_calls == 1:
            self.watch_backward(output)
            self.hidden_rows = 0 if h is None else len(h)
            return True
        if h is None or len(h) != self.hidden_rows:
            return False
        if self.joined:
            self.second = h
            return False
        self.hidden_rows += len(h)
        return True

    def second_hidden(self, rows: int) -> Tensor | None:
        """h of the second call of the backbone, if it waited and belongs to z, whose two views have so many rows.

        Warns if h is of other views than z.
        """
        h, self.second = self.second, None
        if h is not None and self.hidden_rows + len(h) > rows:
            h = None
        self.hidden_rows += 0 if h is None else len(h)
        if self.hidden_rows not in (0, rows // 2, rows):
            self.tell(
                f"the recorded h has {self.hidden_rows} rows per batch and z {rows}, so they are not of the same "
                "views: if that matters, leave backbone= out and use "
                f"{self.lines.by_hand.removesuffix(')')}, h_a, h_b)"
            )
        return h

    def loss_called(self, loss: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], by_call: bool) -> None:
        """A call of the loss. by_call: there is no optimizer, so until a backward pass is seen each call is a pass."""
        if by_call and not self.backwards and self.taken:
            self.end()
            self.counts()
        self.loss_calls += 1
        if self.source not in (LOSS, EITHER) or (self.loss_calls > 1 and callable(self.views)):
            return
        seen = self._recognized(views_of_loss(loss, args, kwargs, self.views, self.joined))
        if self.loss_calls > 1:
            self._called_again(loss, seen)
            return
        self.tensors = {id(z) for z in seen.pair or ()}
        seen = seen._replace(pair=None if seen.pair is None else (seen.pair[0].detach(), seen.pair[1].detach()))
        if self.source == EITHER or seen.case == KEY:
            self.held = seen
        elif seen.pair is not None:
            if seen.unusual:
                self.tell(f"{seen.unusual}: if these are not z, use {self.lines.projector}")
            self._take(*seen.pair)
        elif seen.unusual:
            self.tell(f"z is not recorded, because {seen.unusual}: use {self.lines.projector}")

    def projected(self, projector: nn.Module, output: Any) -> bool:
        """A call of a projector; whether it completed a pair."""
        key = id(projector)
        if self.source not in (PROJECTOR, EITHER) or key not in self.projectors:
            return False
        outputs = self.outputs.setdefault(key, [])
        self.output_calls[key] = self.output_calls.get(key, 0) + 1
        if len(outputs) >= 2:
            return False
        self.watch_backward(output)
        outputs += [z.detach() for z in views_of_output(output, self.views, self.joined)]
        if self.source == EITHER or len(outputs) < 2:
            return False
        self._take(outputs[0], outputs[1])
        return True

    def by_hand(self) -> None:
        """The user hands over embeddings, so nothing that is hooked is z."""
        self.source, self.held = BY_HAND, None

    # judgement

    def _recognized(self, seen: Seen) -> Seen:
        """Soft labels have the shape and the lack of gradient of a momentum key; look once."""
        if seen.case == KEY and seen.pair is not None:
            if self.labels is None:
                self.labels = any(looks_like_labels(z) for z in seen.pair if not z.requires_grad)
            if self.labels:
                return Seen(None, NOTHING, "the loss compares predictions with labels")
        return seen

    def _called_again(self, loss: nn.Module, seen: Seen) -> None:
        first, same = self.held, self.tensors == {id(z) for z in seen.pair or ()}
        if self.source == EITHER or same:
            return
        name = type(loss).__name__
        if first is not None:
            self.held = None
            self.tell(
                f"z is not recorded: {name} is called more than once per update with a tensor that has no gradient, "
                f"so it compares predictions with targets, as in BYOL and SimSiam: use {self.lines.projector}"
            )
        elif self.taken and self.views is None:
            self.tell(
                f"{name} is called more than once per update: the first two views and the mean loss are recorded; "
                f"if these are not z, use {self.lines.projector}"
            )

    def _about_keys(self) -> None:
        self.tell(
            "one argument of the loss has no gradient: recorded are a query and the key of a momentum encoder, as in "
            f"MoCo; if the other argument is a prediction, as in BYOL, use {self.lines.projector}"
        )

    def _about_more(self, calls: int) -> None:
        self.views = 2  # from now on it is known
        self.tell(
            f"the projector is called {calls} times per update: its first two outputs are recorded as the views; "
            "write views=2 if the first two are the global crops (more if there are more), or views= a function of "
            "the output that returns (z_a, z_b) or None"
        )

    def _alone(self) -> bool:
        return any(len(outputs) == 1 for outputs in self.outputs.values())

    def _decide(self) -> None:
        """Choose between loss and projector, by what the first pass showed."""
        seen = self.held or Seen(None, NOTHING, "")
        pairs = {
            key: (self.outputs[key][0], self.outputs[key][1])
            for key in self.projectors
            if len(self.outputs.get(key, ())) >= 2 and self.outputs[key][0].shape == self.outputs[key][1].shape
        }
        sure = seen.case == PAIR and self.loss_calls == 1
        if sure or (not pairs and seen.pair is not None and (seen.case != KEY or self.loss_calls == 1)):
            assert seen.pair is not None
            self.source = LOSS
            self.decided("the arguments of the loss" + (", query and key" if seen.case == KEY else ""))
            self._take(*seen.pair)
        elif pairs:
            key, pair = next(iter(pairs.items()))
            self.source, self.projectors = PROJECTOR, {key: self.projectors[key]}
            self.views = 2 if self.views is None else self.views  # from now on it is known
            calls = self.output_calls[key]
            more = f", the first two of {calls} calls per update" if calls > 2 else ""
            self.decided(f"{self.projectors[key]}{more}")
            self._take(*pair)
        elif seen.unusual or self._alone():
            why = seen.unusual or "the projector is called once per update"
            use = f"{self.lines.by_hand} once per update"
            if seen.case == UNPAIRED:
                use = f"{self.lines.function}, with a function that returns (z_a, z_b), or {use}"
            self.tell(f"z is not recorded, because {why}, and no projector is called for a pair of views: use {use}")

    def _take(self, a: Tensor, b: Tensor) -> None:
        self.taken = True
        self.take(a, b)


def _in_backward() -> bool:
    """Whether a backward pass is running, in which checkpointed modules are called again."""
    task: int = getattr(torch._C, "_current_graph_task_id", lambda: -1)()
    return task != -1
