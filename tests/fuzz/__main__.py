"""`python -m tests.fuzz --n 10000`: hostile commands and calls, real command lines, faults; prints a tally."""

import argparse
import json
import select
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.outcome import BAD, PATIENCE, SECONDS

SILENCE = 2 * PATIENCE * SECONDS  # without a line, after which a worker is in native code for good


def worked(kind: str, seed: int, n: int) -> Iterator[dict[str, Any]]:
    """Outcomes of up to n cases, tried in one process; fewer if it crashes or hangs in native code."""
    command = [sys.executable, "-m", "tests.fuzz.worker", kind, str(seed), str(n)]
    under_way, ended = None, "crash"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as worker:
        assert worker.stdout is not None
        while True:
            if not select.select([worker.stdout], [], [], SILENCE)[0]:
                ended = "hang"
                worker.kill()
                break
            line = worker.stdout.readline()
            if not line:
                break
            entry = json.loads(line)
            under_way = None if "kind" in entry else entry["case"]
            if "kind" in entry:
                yield entry
    if under_way is not None or worker.returncode:
        yield {"case": under_way, "kind": ended, "detail": f"exit code {worker.returncode}", "seconds": 0.0}


def tried(kind: str, seed: int, n: int) -> tuple[dict[str, Any], list[str]]:
    """Number of outcomes of each kind and the slowest case, and what failed, once per reason."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    slowest: dict[str, Any] = {"seconds": 0.0}
    while (done := counts.total()) < n:
        for entry in worked(kind, seed, n - done):
            counts[entry["kind"]] += 1
            slowest = max(slowest, entry, key=lambda one: one["seconds"])
            if entry["kind"] in BAD:
                taken = f"{entry['seconds']:.1f} s, {entry.get('processor', 0):.1f} s of processor time"
                reason = f"{entry['kind']}: {taken if entry['kind'] == 'hang' else entry['detail']}"
                if reason[-90:] not in failures:
                    failures[reason[-90:]] = f"{kind} seed {seed}: {_text(entry['case'])}\n    {reason}"
                    print(failures[reason[-90:]], file=sys.stderr, flush=True)
            if counts.total() % 250 == 0:
                print(f"{kind}: {counts.total()} of {n}: {dict(counts)}", file=sys.stderr, flush=True)
        seed += n  # the worker has died: the remaining cases are new ones
        if counts.total() == done:
            raise RuntimeError(f"the worker for {kind} does not start")
    kept = {name: round(slowest.get(name, 0.0), 1) for name in ("seconds", "processor")}
    return {**counts, "slowest": {**kept, "case": _text(slowest.get("case"))[:200]}}, list(failures.values())


def _text(case: Any) -> str:
    return case if isinstance(case, str) else "stairwise " + shlex.join(case or [])


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--n", type=int, default=1000, help="commands and calls, a fifth of them commands")
    options.add_argument("--lines", type=int, default=200, help="real command lines")
    options.add_argument("--faults", type=int, default=200, help="kills, interrupts and injected errors")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    wanted = {"calls": chosen.n - chosen.n // 5, "lines": chosen.n // 5, "real lines": chosen.lines}
    tally, failures = {}, []
    for kind, n in wanted.items():
        tally[kind], failed = tried(kind, chosen.seed, n) if n else ({}, [])
        failures += failed
    if chosen.faults:
        from tests.fuzz.faults import trials

        with tempfile.TemporaryDirectory() as folder:
            tally["faults"] = trials(chosen.faults, chosen.seed, Path(folder))
        problems = tally["faults"].pop("problems")
        failures += [f"faults seed {p['seed']} {p['faults']}: {p['problem']}\n    {p['detail']}" for p in problems]
    print("\n".join(failures))
    print(json.dumps(tally, ensure_ascii=False))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
