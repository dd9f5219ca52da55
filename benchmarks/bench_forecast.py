"""How good are forecasts of steps, do they contradict each other, and how long do they take?

    python benchmarks/bench_forecast.py [runs.npz …] [--every 1] [--level 1]

Each file holds runs as pairs of arrays, NAME_t (T,) and NAME_lam (T, d) (or NAME.times and NAME.spectra, as in
docs/results/staircases.npz, which is the default). Spectra of C have the plateau 1 (`--level 1`, the default for names
that begin with barlow); those of covariances are followed relative to their typical variance (`--level none`, the
default for others), for the truth as for the forecast. For every run:

  asked     steps that are forecast when their mode has reached a hundredth of its plateau, from the records until then
  error     median of |forecast − step| / time left; infinite where the mode was not forecast
  hold      80 % intervals that contain the step
  disjoint  pairs of intervals for the same mode from one record to the next, and ten records apart, that do not overlap
  next      the same for the first step that is expected
  all       80 % intervals that contain the step, over all records and modes

Runs whose names begin with the same word (their loss) are pooled below. `--every` takes each k-th record for
the last three columns. The last line is JSON, with the milliseconds of a call on simulated spectra.
"""

import argparse
import json
import re
from pathlib import Path
from time import perf_counter

import numpy as np

import stairwise as sw
from stairwise.archives import load_arrays
from stairwise.staircase.growth import relative

STORED = Path(__file__).parents[1] / "docs" / "results" / "staircases.npz"
EARLY = 0.01
APART = 10


def runs_of(arrays):
    """{name: (t, lam)} of the arrays of a file."""
    found = {}
    for ending, other in (("_t", "_lam"), (".times", ".spectra")):
        for key in arrays:
            name = key.removesuffix(ending)
            if key.endswith(ending) and name + other in arrays:
                found[name] = arrays[key].astype(float), arrays[name + other].astype(float)
    return found


def half_times(t, lam, steps):
    """When the mode of each step first passes half of its plateau, linear between records."""
    first = [int(np.argmax(lam[:, mode] > level / 2)) for mode, level in zip(steps.modes, steps.levels, strict=True)]
    around = zip(steps.modes, steps.levels, first, strict=True)
    return np.array([np.interp(level / 2, lam[[i - 1, i], mode], t[[i - 1, i]]) for mode, level, i in around])


def score(t, lam, level=1.0, fitted=True):
    """Relative errors of forecasts at a hundredth of the plateau, and whether the intervals hold the step.

    A step is where `detect_steps` places it or, if not `fitted`, where the mode passes half of its plateau.
    """
    lam = lam if level is not None else relative(lam)
    steps = sw.detect_steps(t, lam)
    times = steps.times if fitted else half_times(t, lam, steps)
    errors, inside = [], []
    for step, mode, plateau in zip(times, steps.modes, steps.levels, strict=True):
        low = np.flatnonzero((lam[:, mode] < EARLY * plateau) & (t < step))
        if len(low) and low[-1] >= 10 and t[low[-1] + 1] < step:
            end = low[-1] + 2
            ahead = sw.forecast_steps(t[:end], lam[:end], level=level)
            which = np.flatnonzero(ahead.modes == mode)
            errors.append(abs(ahead.times[which[0]] - step) / (step - t[end - 1]) if len(which) else np.inf)
            inside.append(len(which) > 0 and bool(ahead.low[which[0]] <= step <= ahead.high[which[0]]))
    return errors, inside


def replay(t, lam, level=1.0, every=1):
    """Shares of intervals that contradict one another, and of those that hold, forecast record by record."""
    lam = lam if level is not None else relative(lam)
    steps = sw.detect_steps(t, lam)
    true = dict(zip(steps.modes.tolist(), steps.times, strict=True))
    forecasts, inside = [], []
    for end in range(10, len(t) + 1, every):
        ahead = sw.forecast_steps(t[:end], lam[:end], level=level)
        modes = ahead.modes.tolist()
        spans = {m: (lo, hi) for m, lo, hi in zip(modes, ahead.low, ahead.high, strict=True)}
        forecasts.append((spans, modes[int(np.argmin(ahead.times))] if modes else None))
        inside += [spans[m][0] <= true[m] <= spans[m][1] for m in spans if true.get(m, -np.inf) > ahead.now]
    return {
        "disjoint": disjoint(forecasts, 1),
        f"disjoint {APART}": disjoint(forecasts, APART),
        "next": disjoint(forecasts, 1, only_next=True),
        f"next {APART}": disjoint(forecasts, APART, only_next=True),
        "all": float(np.mean(inside)) if inside else np.nan,
    }


def disjoint(forecasts, apart, only_next=False):
    """Share of intervals of the same mode, so many records apart, that do not overlap."""
    pairs = [
        (first[mode], then[mode])
        for (first, _), (then, next_one) in zip(forecasts, forecasts[apart:], strict=False)
        for mode in then.keys() & first.keys()
        if not only_next or mode == next_one
    ]
    return float(np.mean([a[1] < b[0] or b[1] < a[0] for a, b in pairs])) if pairs else np.nan


def milliseconds(d, records=300, rounds=9):
    """Best time of one call: d modes of unequal rates with noise of 3 %, half of which have taken their steps."""
    rng = np.random.default_rng(0)
    t = np.linspace(0, 1, records)
    lam = 1 / (1 + 1e6 * np.exp(-np.outer(t, np.geomspace(60, 3, d))))
    lam = -np.sort(-lam * np.exp(0.03 * rng.standard_normal(lam.shape)), axis=1)
    times = []
    for _ in range(rounds):
        started = perf_counter()
        sw.forecast_steps(t, lam)
        times.append(perf_counter() - started)
    return 1e3 * min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[STORED])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--level", help="plateau before the first step; none: unknown, as for covariances")
    options = parser.parse_args()
    pools, summary = {}, {}
    print(f"{'run':<28} asked  error   hold  disjoint 1, {APART}    next 1, {APART}     all")
    for name, (t, lam) in ((n, r) for file in options.files for n, r in runs_of(load_arrays(file)).items()):
        given = options.level or ("1" if name.startswith("barlow") else "none")
        level = None if given == "none" else float(given)
        errors, inside = score(t, lam, level)
        shares = replay(t, lam, level, options.every)
        for key, values in zip(("errors", "inside"), (errors, inside), strict=True):
            pools.setdefault(re.split("[-._ ]", name)[0], {}).setdefault(key, []).extend(values)
        columns = "  ".join(f"{100 * v:5.1f} %" for v in shares.values())
        print(f"{name:<28} {row(errors, inside)}  {columns}", flush=True)
        summary[name] = {"asked": len(errors), "error": median(errors), "hold": mean(inside), **shares}
    for name, pool in pools.items():
        print(f"{'all ' + name:<28} {row(**pool)}")
    summary["milliseconds"] = {f"300 x {d}": round(milliseconds(d), 1) for d in (64, 512)}
    print(json.dumps(summary))


def row(errors, inside):
    return f"{len(errors):5d}  {100 * median(errors):4.0f} %  {100 * mean(inside):3.0f} %"


def median(values):
    return float(np.median(values)) if values else np.nan


def mean(values):
    return float(np.mean(values)) if values else np.nan


if __name__ == "__main__":
    main()
