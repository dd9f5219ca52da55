"""Settings and truth of runs whose curves are not all stored: `python -m benchmarks.corpus.known FILE.npz TARGET.npz`.

The tenth part has 1816 runs, the eleventh 1683; their curves would take 10 MB each. What was true and what was said at
every record are kept of all, and the curves of every fourth run, so that these can be replayed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.corpus.store import CorpusRun, read
from benchmarks.corpus.truth import Truth, truth
from stairwise.staircase.advice import STATES

BITS = {state: 1 << k for k, state in enumerate(STATES)}


def save(runs: list[CorpusRun], target: Path) -> None:
    """Store settings and truth of all runs."""
    known = [truth(run) for run in runs]
    arrays = {"settings": np.array([json.dumps(run.settings) for run in runs])}
    arrays["kind"] = np.array([one.kind for one in known])
    for name in ("real", "finished", "doubtful"):
        values = [getattr(one, name) for one in known]
        arrays[name] = np.array([-1 if value is None else value for value in values])
    codes = [[sum(BITS[state] for state in states or ()) for states in one.states] for one in known]
    arrays["states"] = np.array(codes, dtype=np.uint8)
    arrays["later"] = np.array([one.later for one in known])
    np.savez_compressed(target, **arrays)


def load(path: Path) -> list[tuple[dict[str, Any], Truth]]:
    """Settings and truth of all runs."""
    with np.load(path) as stored:
        columns = {name: stored[name] for name in stored.files}
    found = []
    for k, text in enumerate(columns["settings"]):
        states = [frozenset(s for s, bit in BITS.items() if code & bit) or None for code in columns["states"][k]]
        finished, doubtful = (int(v) if (v := columns[name][k]) >= 0 else None for name in ("finished", "doubtful"))
        kind, real, later = str(columns["kind"][k]), int(columns["real"][k]), columns["later"][k]
        found.append((json.loads(str(text)), Truth(kind, states, real, finished, later, doubtful)))
    return found


def complete(runs: list[CorpusRun], path: Path) -> tuple[list[CorpusRun], list[Truth]]:
    """All runs of a part and what is known of them; those whose curves are not among `runs` have no records."""
    curves = {run.name: run for run in runs}
    found = load(path)
    every = [curves.get(str(chosen["name"]), CorpusRun(chosen, {}, np.zeros((0, 1)))) for chosen, _ in found]
    return every, [known for _, known in found]


if __name__ == "__main__":
    save(read(Path(sys.argv[1])), Path(sys.argv[2]))
