"""Import torchvision next to a torch without CUDA; `python -m … SCRIPT` runs a script after that.

PyPI's torchvision is built for CUDA. Next to a torch without CUDA its operators cannot be loaded, and its import fails,
as does that of every library that imports it: Lightning, lightly, timm, transformers. Nothing here detects objects, so
it is enough to declare the two operators that are asked for.
"""

import runpy
import sys

import torch

_operators = []  # they exist as long as this does


def import_torchvision() -> None:
    """Import it; if its operators are missing, declare them first."""
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _operators.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _operators[0].define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        import torchvision  # noqa: F401


if __name__ == "__main__":
    import_torchvision()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
