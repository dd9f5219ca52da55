"""Whether a GPU may round the factors of float32 products to TF32, with 11 bits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Allow TF32 in float32 products, or forbid it, whatever the caller's settings. CPUs never use it."""
    import torch

    backends: Any = torch.backends
    cudnn, cpu = backends.cudnn, backends.mkldnn
    newer: list[tuple[Any, Any]] = []  # newer versions of torch have one setting per kind of operation
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        parents = [(backends.cuda.matmul, backends), (cudnn.conv, cudnn), (cudnn.rnn, cudnn), (cpu.matmul, cpu)]
        for place, parent in parents:
            value = place.fp32_precision
            newer.append((place, "none" if value == parent.fp32_precision else value))  # "none": inherited, not set
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # the caller has set the newer ones to something that the older cannot express
        older = None
    try:
        if older is None:
            for place, _ in newer:
                place.fp32_precision = "tf32" if tf32 else "ieee"
        else:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            cudnn.allow_tf32 = tf32
        if newer:
            cpu.matmul.fp32_precision = "ieee"
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        for place, before in newer:
            place.fp32_precision = before


def in_float32(call: Callable[P, R]) -> Callable[P, R]:
    """The same function without TF32. torch is not loaded for that."""

    @wraps(call)
    def protected(*args: P.args, **kwargs: P.kwargs) -> R:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return call(*args, **kwargs)
        with float32_products(tf32=False):
            return call(*args, **kwargs)

    return protected
