"""Float16 products where torch cannot mix types, and their range; long sums need a GPU (tests/test_gpu.py)."""

import torch

from stairwise.ntk.fast.half import HalfProducts


def test_products_on_a_cpu():
    torch.manual_seed(0)
    half = HalfProducts()
    x, scale = half.scaled(1e6 * torch.rand(3, 2, 50), headroom=4)
    assert x.dtype == torch.float16
    assert float(x.abs().amax(dim=(1, 2)).min()) > 0.499
    assert scale.shape == (3, 1)
    flat = x.flatten(1)
    exact = flat.double() @ flat.double().T
    torch.testing.assert_close(half.product(flat, flat, 1e9).double(), exact, rtol=1e-5, atol=0)
