"""Which processes of a group are there, asked through the group's store: no collective, so nobody waits in vain.

A collective that one process leaves out aborts or blocks all of them. So processes first count themselves in the store
that the group was started with; the first to see that all are there, or that its patience has ended, decides for all.
"""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stairwise.distributed import world

PATIENCE = 5.0  # seconds to wait for the others
ALL, SOME = b"all", b"some"

_made: Counter[str] = Counter()


class RollCall:
    """Processes that attached the same monitor; `name` is the same in all of them."""

    def __init__(self, name: str) -> None:
        self.name = f"stairwise/{name}/{_made[name]}"
        _made[name] += 1
        self.counted: set[str] = set()
        self.count("attached")

    def count(self, event: str) -> None:
        """Say that this process has reached an event."""
        if world() == 1 or event in self.counted:
            return
        self.counted.add(event)
        store = _store()
        if store is not None and store.add(f"{self.name}/{event}/number", 1) >= world():
            store.compare_set(f"{self.name}/{event}", "", ALL.decode())

    def complete(self, event: str = "attached", patience: float = PATIENCE) -> bool:
        """Whether all processes have reached an event, waiting for them some seconds; all get the same answer."""
        if world() == 1:
            return True
        self.count(event)
        store, key = _store(), f"{self.name}/{event}"
        if store is None:
            return True
        try:
            store.wait([key], timedelta(seconds=patience))
            decision = store.get(key)
        except RuntimeError:  # they did not come
            decision = store.compare_set(key, "", SOME.decode())
        return bool(decision == ALL)


def _store() -> Any:
    """The store of the process group; None if this version of torch does not show it."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return get() if get is not None else None
