"""Training networks: one loop, and what it needs. The room is also the function: `stairwise.train(recipe)`."""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """`stairwise.train` has to be this package; calling it calls `stairwise.train.loop.train`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from stairwise.train.loop import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
