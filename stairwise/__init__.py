"""stairwise: predict, measure and speed up the way self-supervised networks learn, one dimension at a time.

Public names are listed in __init__.pyi; each loads its module when it is first used, so `import stairwise` is light.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _homes() -> dict[str, str]:
    """Public name → module that holds it, from the lines `from MODULE import NAME as NAME` of the stub."""
    lines = (line.split() for line in Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines())
    return {words[5]: words[1] for words in lines if words[:1] == ["from"]}


_HOMES = _homes()
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stairwise' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    home = _HOMES[name]
    if home == __name__ or not hasattr(import_module(home), name):  # the name is a module
        value = import_module(f"{home}.{name}")
    else:
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]
