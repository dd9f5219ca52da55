"""Rules that the zoo does not reach."""

import pytest
import torch
from torch import nn

from stairwise.ntk.rules import factors


@pytest.mark.parametrize("size", [6, 9])  # few positions, and many
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_of_far_means(layout, size):
    """Differences must be taken before sums."""
    torch.manual_seed(0)
    model = nn.BatchNorm2d(3).eval()
    model.running_mean += 1e4
    x = (1e4 + torch.randn(5, 3, size, size)).contiguous(memory_format=layout)
    b = torch.randn(5, 3, size, size).contiguous(memory_format=layout)
    exact = factors(model.double(), x.double(), b.double())["weight"].values
    torch.testing.assert_close(factors(model.float(), x, b)["weight"].values.double(), exact, rtol=1e-5, atol=1e-5)
