"""The trial, and nothing else, runs on the second stream, after the forward pass; real streams: tests/test_gpu.py."""

from contextlib import contextmanager

import torch
from torch import nn

from stairwise.ntk.capture import Capture
from tests.ntk.zoo import Net, mean


def test_only_the_trial_is_on_the_second_stream():
    seen = []

    class Stream:
        def __init__(self, device):
            self.marks = 0

        def mark(self):
            self.marks += 1
            return self.marks

        @contextmanager
        def entered(self, after):
            seen.append(f"after {after}")
            yield
            seen.append("end")

    model = Net(lambda m, x: (seen.append(len(x)), m.layer(x))[1], layer=nn.Linear(6, 3))
    x = torch.randn(9, 6)
    capture = Capture(model, mean, x, second_stream=Stream)
    capture.factors(x)
    assert seen == [5, 9, "after 2", 2, 2, "end"]  # the trial calls the model twice
    capture.factors(x)
    assert seen[6:] == [9, "after 4", 2, "end"]
