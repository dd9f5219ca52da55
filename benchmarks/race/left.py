"""The rest of the table, in order of importance: what the race has not run yet, for any minutes that are left.

    python -m benchmarks.race --queue --plan              what is pending, and how long it may take
    python -m benchmarks.race --queue --minutes 5         run what comes first
    python -m benchmarks.race --queue --jobs 4            in several processes, which then leave out the clocks
    python -m benchmarks.race --queue --data stl10 --data-file SMALL.npz      the part with other images, of 32 px

Each part is a race of its own, with its own rules; results merge by key with all others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.race.entrants import RACED
from benchmarks.race.plan import FIRST, Rules

APPENDIX = ("plain", "sharpened", "flat", "smoothed", "fourth_power", "hinged")


@dataclass(frozen=True)
class Part:
    """`changes` to the rules of the race; `times`: its length relative to the race's; `data`: which images it needs;
    `transfer`: needs those of another dataset too."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    times: int = 1
    transfer: bool = False
    data: str = "cifar10"


TRIALS: dict[str, Any] = {"stages": ("tune",)}
FINALS: dict[str, Any] = {"stages": ("final",)}
SMALL = {"start": "small"}
# Muon's other lengths take time and tell little
SHORT: dict[str, Any] = {"lengths": FIRST}
THIRD: dict[str, Any] = {"lengths": (3,)}
ENDS: dict[str, Any] = {"lengths": (3, 1), "kept": (1, 1)}
QUEUE = (
    Part("S2 to S7, standard start", {"losses": APPENDIX, "methods": ("sgd",)} | TRIALS),
    Part("S1, standard start", {"losses": ("plain",), "methods": ("precondition",)} | TRIALS),
    Part("S2 to S7, small start", {"losses": APPENDIX, "methods": ("sgd",)} | SMALL | TRIALS),
    Part("S1, small start", {"losses": ("plain",), "methods": ("precondition",)} | SMALL | TRIALS),
    Part(
        "FroSSL, LARS and Muon, three seeds", {"losses": ("frossl",), "methods": ("lars", "muon"), "seeds": 3} | SHORT
    ),
    Part("four views", {"losses": RACED, "methods": ("lars, 4 views", "muon, 4 views"), "seeds": 1} | SHORT),
    Part("precondition", {"losses": RACED, "methods": ("precondition",), "seeds": 1}),
    Part("small start", {"methods": ("lars", "muon"), "seeds": 1} | SMALL | SHORT),
    Part("long training", {"losses": ("vicreg",), "methods": ("lars", "muon"), "seeds": 1} | ENDS, times=4),
    Part(
        "long training, Muon with decay",
        {"losses": ("vicreg",), "methods": ("muon, decay",), "seeds": 1} | ENDS,
        times=4,
    ),
    Part("transfer: two more seeds", {"methods": ("lars", "muon"), "seeds": 7} | FINALS | THIRD, transfer=True),
    Part("STL-10, three seeds", {"methods": ("lars", "muon"), "seeds": 3} | ENDS, data="stl10"),
)


def queue(rules: Rules, transfer: bool) -> Iterator[tuple[Part, Rules]]:
    """The parts that can be run with the data of these rules, and their own rules; `transfer`: whether there are images
    of another dataset."""
    for part in QUEUE:
        if rules.data.partition("[")[0] == part.data and (transfer or not part.transfer):
            yield part, replace(rules, length=part.times * rules.length, **part.changes)
