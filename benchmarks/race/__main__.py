"""Run, continue or merge the race; see `benchmarks/race/plan.py` for its rules.

    python -m benchmarks.race --plan                               what would be run, and how long it may take
    python -m benchmarks.race --minutes 9 --store FILE             run what comes next, stop in time
    python -m benchmarks.race --queue --minutes 9                  run what left.py still wants, beside the race itself
    python -m benchmarks.race --merge FILE …                       take results of other machines into the store

Every run is stored when it is done; the same command continues. `--data-file` reads images from files instead of the
package's own datasets; several files are joined.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.race.entrants import LOSSES, METHODS, RACED
from benchmarks.race.images import RaceImages, named_images, read_images
from benchmarks.race.jobs import MUON_COST, OVERHEAD, STEPS_PER_SECOND, run_here, run_jobs, run_teams, seconds_of
from benchmarks.race.left import QUEUE, queue
from benchmarks.race.plan import STAGES, Race, Rules
from benchmarks.race.store import Store
from stairwise.checks import InputError

STORE = Path("docs/results/race.jsonl")
TINY = {
    **{"encoder_options": {"stem": "small", "width": 4}, "batch": 32, "d": 8, "hidden": [16], "held_out": 64},
    **{"probe_images": 100, "precision": "float32"},
}


def main() -> None:
    options = _options()
    store = Store(options.store)
    if options.merge:
        print(f"{store.merge(options.merge)} results in {store.path}")
        return
    rules = _rules(options)
    if options.plan and options.queue:
        print(_plan_of_queue(rules, store, options.jobs == 1 and not options.shared))
        return
    if options.plan:
        print(_plan(rules, store))
        return
    deadline = time.monotonic() + 60 * options.minutes
    images = _images(options)
    rules = replace(rules, data=_name(images, options.data))
    parts = [own for _, own in queue(rules, images.elsewhere is not None)] if options.queue else [rules]
    if not parts:
        remedy = "use --data-file; python -m benchmarks.race.images --side 32 makes images smaller"
        raise InputError("--queue", "has parts for cifar10 and stl10 at 32 px only", rules.data, remedy)
    if options.team > 1:
        if not run_teams(rules, store, images, deadline, options.device, options.team):
            raise SystemExit(3)
    elif options.jobs == 1:
        run_here(parts, store, images, deadline, options.device, alone=not options.shared)
    else:
        run_jobs(parts, store, images, deadline, options.device, options.jobs)
    results = store.results()
    left = {run for own in parts for run in Race(own, results).pending()}
    print(f"{len(results)} results in {store.path}; {len(left)} runs can be started next", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--merge", type=Path, nargs="+", help="files of results to take in")
    parser.add_argument(
        "--plan", action="store_true", help="print the runs that come next and an estimate of their time"
    )
    parser.add_argument("--queue", action="store_true", help="the parts of left.py, one after the other")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run that would not end in this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once; their seconds are not compared")
    parser.add_argument("--shared", action="store_true", help="other programs use the machine: no seconds, no clocks")
    parser.add_argument("--team", type=int, default=1, help="runs at once in one graph; their seconds are not compared")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images")
    parser.add_argument(
        "--transfer-file", type=Path, help="images of another dataset, on which final runs are probed too"
    )
    parser.add_argument("--most", type=int, default=0, help="use only so many images of each split")
    parser.add_argument("--losses", nargs="+", default=list(RACED), choices=list(LOSSES))
    parser.add_argument("--methods", nargs="+", default=list(Rules().methods), choices=list(METHODS))
    parser.add_argument(
        "--start", default="standard", choices=("standard", "small"), help="scale of the initial weights"
    )
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, help="run only these")
    parser.add_argument("--length", type=int, default=Rules.length, help="L, steps of a baseline")
    parser.add_argument("--trial", type=int, default=0, help="steps of a trial; default 2 L/9")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a narrow network, to try the script")
    options = parser.parse_args()
    if options.queue and options.team > 1:
        parser.error("--team cannot be used with --queue: use --jobs")
    own = ("losses", "methods", "start", "stages", "seeds")
    if options.queue and any(getattr(options, name) != parser.get_default(name) for name in own):
        parser.error(f"--{', --'.join(own)} cannot be used with --queue: its parts have their own")
    return options


def _rules(options: argparse.Namespace) -> Rules:
    return Rules(
        length=options.length,
        trial=options.trial or max(1, options.length * 2 // 9),
        seeds=options.seeds,
        data=options.data,
        losses=tuple(options.losses),
        methods=tuple(options.methods),
        start=options.start,
        changes=TINY if options.tiny else {},
        stages=tuple(options.stages),
    )


def _images(options: argparse.Namespace) -> RaceImages:
    if options.data_file:
        images = read_images(options.data_file, options.data, options.most)
    else:
        images = named_images(options.data, options.most)
    if options.transfer_file:
        images = replace(images, elsewhere=read_images([options.transfer_file], most=options.most))
    return images


def _name(images: RaceImages, name: str) -> str:
    """The dataset, with the number of training images if these are not all of CIFAR-10 or STL-10, and their side if it
    is not 32 pixels."""
    side = images.pixels.shape[1]
    sized = name if side == 32 else f"{name}({side} px)"
    return sized if images.training == {"cifar10": 50_000, "stl10": 5_000}.get(name) else f"{sized}[{images.training}]"


def _plan(rules: Rules, store: Store) -> str:
    """Pending runs per stage; runs that depend on others are counted as the rules will make them."""
    results = store.results()
    pending = Race(rules, results).pending()
    lines = [
        f"{run.stage:<6}{run.loss:<14}{run.method:<8}lr {run.lr:<8g}{run.steps:>6} steps  seed {run.seed}"
        for run in pending
    ]
    total = sum(seconds_of(run, results) for run in pending)
    lines.append(f"{len(pending)} runs can start now, about {total / 60:.0f} minutes one after the other")
    L, n, k = rules.length, rules.seeds, len(rules.losses)
    speed = STEPS_PER_SECOND
    stages = {
        "tune": k * sum(len(METHODS[m].rates) * (OVERHEAD + rules.trial * _cost(m) / speed) for m in rules.methods),
        "long": k * (3 * (OVERHEAD + L / speed) + 2 * (OVERHEAD + L / 3 * MUON_COST / speed)),
        "final, best baseline": k * n * (OVERHEAD + L / speed),
        "final, Muon L/3 and L/2": k * n * (2 * OVERHEAD + 5 / 6 * L * MUON_COST / speed),
        "final, Muon L/4 and L": k * n * (2 * OVERHEAD + 5 / 4 * L * MUON_COST / speed),
        "final, other baselines": k * n * (len(rules.baselines) - 1) * (OVERHEAD + L / speed),
    }
    lines += [f"whole race: {name:<26}{seconds / 60:>6.1f} min" for name, seconds in stages.items()]
    wanted = {run.key(rules.changes): run for run in Race(rules, results).wanted()}
    stored = sum(seconds_of(run, results) for key, run in wanted.items() if key in results) / 60
    bar = sum(list(stages.values())[:4]) / 60
    return "\n".join(
        [
            *lines,
            f"whole race: {sum(stages.values()) / 60:.1f} min one run after the other; stored: {stored:.1f} min",
            f"to the first verdict (four lines): {bar:.1f} min, with what is stored",
        ]
    )


def _plan_of_queue(rules: Rules, store: Store, alone: bool) -> str:
    """Parts of the queue, of all datasets: runs that can start now, and the sum of their minutes, each alone or beside
    others; runs that depend on these are not counted."""
    results, lines = store.results(), []
    datasets = dict.fromkeys(part.data for part in QUEUE)
    for part, own in (found for data in datasets for found in queue(replace(rules, data=data), transfer=True)):
        pending = Race(own, results).pending()
        minutes = sum(seconds_of(run, results, alone) for run in pending) / 60
        lines.append(f"{part.name:<36}{len(pending):>4} runs can start now, {minutes:>5.1f} min")
    return "\n".join(lines)


def _cost(method: str) -> float:
    return MUON_COST if method.startswith("muon") else 1.0


if __name__ == "__main__":
    main()
