"""Write the tables and the figures of docs/results/speed.md and speedrun.md from the stored results.

    python -m benchmarks.race.page

Each table stands between two comments, `<!-- name -->` and `<!-- end -->`; the words around them are written by hand.
A table without results says so and holds no numbers.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.corpus.page import filled, markdown
from benchmarks.race import appendix
from benchmarks.race.entrants import BASELINES, LOSSES, METHODS, RACED
from benchmarks.race.figures import FIGURES, METHOD_NAMES, NAMES, draw, draw_spectra, drawn
from benchmarks.race.store import Result, Store
from benchmarks.race.summary import Group, at_equal_modes, groups, seconds_per_step, verdict
from stairwise.figures.style import style
from stairwise.training.recipe import Recipe

RESULTS = Path("docs/results")
PAGES = ("speed.md", "speedrun.md")
OTHER = "stl10"  # beside the dataset of most final runs
NOTHING = "*Not run yet.*"
UNDECIDED = "*Not decided yet: a verdict needs five seeds. Those so far are in the table of final runs.*"
ALT = "Accuracy over views and over seconds for three losses: runs along their way, means of final runs, their spread"
ALT_BESIDE = "Nearest neighbours' accuracy, modes in use and effective rank over views, for three losses"
ALT_SPECTRA = "Variances of the modes at the end, relative to the largest, for three losses: LARS and Muon"
HALF, SECONDS = 0.5, 0.6  # at most this share of views and of seconds


def dataset(results: dict[str, Result]) -> str:
    """The images on which most final runs were made."""
    names = [r["data"] for r in results.values() if r["stage"] == "final"] or [r["data"] for r in results.values()]
    return max(set(names), key=names.count) if names else "cifar10"


def verdict_table(results: dict[str, Result], data: str) -> str:
    rows = []
    for loss in RACED:
        found = verdict(results, data, loss)
        if found is None:
            continue
        best, muon = found.baseline, found.shortest
        row = [NAMES[loss], f"{METHOD_NAMES[best.method]}, {best.steps} updates", f"{best.words()} %"]
        if muon is None or found.views is None:
            rows.append([*row, f"no length up to {found.below.steps if found.below else 0} updates", "", "", "no"])
            continue
        share = "" if found.seconds is None else f"{found.seconds:.2f}"
        kept = found.views <= HALF and (found.seconds or 0.0) <= SECONDS
        word = ("yes" if kept else "no") if found.seconds is not None else f"views: {'yes' if kept else 'no'}"
        rows.append([*row, f"{muon.steps} updates: {muon.words()} %", f"{found.views:.2f}", share, word])
    head = [
        "loss",
        "best baseline",
        "its accuracy",
        "Muon's shortest as good",
        "share of views",
        "of seconds",
        "goal met",
    ]
    if not rows:
        return UNDECIDED if any(run["stage"] == "final" for run in results.values()) else NOTHING
    return markdown([head, *rows])


def finals_table(results: dict[str, Result], data: str, start: str = "standard") -> str:
    rows = []
    for group in sorted((g for g in groups(results.values(), start=start) if g.data == data), key=_order):
        rank, modes = (f"{group.ends(name).mean():.0f}" if len(group.ends(name)) else "" for name in ("rank", "grown"))
        time = seconds_per_step(results, data, group.loss, group.method)
        rows.append(
            [
                *(
                    NAMES.get(group.loss, group.loss),
                    METHOD_NAMES.get(group.method, group.method),
                    f"{group.lr:g}",
                    group.steps,
                ),
                *(f"{group.views / 1e6:.2f} M", len(group.runs), group.words(), group.words("knn"), rank, modes),
                f"{time * group.steps:.1f}" if time else "",
            ]
        )
    head = [
        "loss",
        "method",
        "lr",
        "updates",
        "views",
        "seeds",
        "logistic",
        "kNN",
        "effective rank",
        "modes",
        "seconds",
    ]
    return markdown([head, *rows]) if rows else NOTHING


def lost_table(results: dict[str, Result], data: str) -> str:
    """Muon against the best baseline: accuracy with the same number of modes in use."""
    rows = []
    for loss, slow, muon in compared(results, data):
        same = [f"{n} modes: {100 * a:.1f}, {100 * b:.1f}" for n, a, b in at_equal_modes(slow, muon)]
        rows.append([NAMES[loss], f"{muon.steps}, {slow.steps}", "; ".join(same)])
    head = ["loss", "updates of Muon, of the baseline", "baseline, Muon at equal modes"]
    return markdown([head, *rows]) if rows else NOTHING


def compared(results: dict[str, Result], data: str) -> Iterator[tuple[str, Group, Group]]:
    """The loss, the best baseline and Muon, for each length of Muon: the baseline's is the next that is not shorter."""
    for loss in RACED:
        found = verdict(results, data, loss)
        if found is None:
            continue
        both = [g for g in groups(results.values()) if (g.data, g.loss) == (data, loss)]
        slow = [g for g in both if g.method == found.baseline.method]
        for muon in (g for g in both if g.method == "muon"):
            longer = [g for g in slow if g.steps >= muon.steps]
            yield loss, min(longer, key=lambda g: g.steps, default=found.baseline), muon


def transfer_table(results: dict[str, Result], data: str) -> str:
    """Final runs that were probed on another dataset, too."""
    probed = groups(run for run in results.values() if run["data"] == data and run.get("transfer"))
    rows = [
        [NAMES[g.loss], METHOD_NAMES[g.method], g.steps, len(g.runs), g.words(), g.words("transfer")]
        for g in sorted(probed, key=_order)
    ]
    head = ["loss", "method", "updates", "seeds", "CIFAR-10", "STL-10"]
    return markdown([head, *rows]) if rows else NOTHING


def span_table(path: Path) -> str:
    """Overlaps of the spans that LARS and Muon learn, with predicted spans and with each other; means over the seeds.

    Of runs of one seed the longest counts. Spans of two methods are compared at the smaller k.
    """
    rows, results = [], Store(path).results()
    stored = sorted((r for r in results.values() if not r["diverged"]), key=lambda r: r["steps"])
    for start, loss in product(appendix.STARTS, RACED):
        about = dataset(results), start, loss
        runs = {(r["method"], r["seed"]): r for r in stored if (r["data"], r["start"], r["loss"]) == about}
        seeds = sorted(seed for method, seed in runs if method == "lars" and ("muon", seed) in runs)
        if not seeds:
            continue
        both = [[runs[method, seed] for seed in seeds] for method in ("lars", "muon")]
        rates = ", ".join(f"{of[0]['lr']:g}{'*' * (of[0]['rate_from'] != start)}" for of in both)
        modes = _means(([r["spans"][-1]["k"] for r in of] for of in both), 0)
        k = _means([[r["equal"]["k"] for r in both[0]]], 0)
        overlaps = [
            _means([r["equal"][name] for r in of if name in r["equal"]] for of in both)
            for name in ("theory", "theory_2k", "pca", "theory_measured", "pca_measured")
        ]
        chance = _means([[r["equal"]["chance"] for r in both[0] if "chance" in r["equal"]]])
        across = _means([[o["overlap"] for r in both[1] for o in r["beside"] if o["method"] == "lars"]])
        twice = _means([o["overlap"] for r in of for o in r["beside"] if o["method"] == r["method"]] for of in both)
        rows.append([start, NAMES[loss], rates, len(seeds), modes, k, *overlaps, chance, across, twice])
    head = [
        *("start", "loss", "learning rates", "seeds", "modes in use", "k", "theory", "theory, 2k modes", "kernel PCA"),
        *("theory, measured", "kernel PCA, measured", "chance", "LARS with Muon", "two seeds"),
    ]
    return markdown([head, *rows]) if rows else NOTHING


def _means(lists: Iterable[Sequence[float]], digits: int = 3) -> str:
    """The mean of each list, separated by commas; – for an empty one."""
    return ", ".join(f"{sum(some) / len(some):.{digits}f}" if some else "–" for some in lists)


def trials_table(results: dict[str, Result], data: str) -> str:
    """Accuracy on held-out training images for every learning rate that was tried."""
    rows = []
    for start, loss, method, stage in product(appendix.STARTS, LOSSES, METHODS, ("tune", "long")):
        about = (data, loss, method)
        trials = [g for g in groups(results.values(), stage, start) if (g.data, g.loss, g.method) == about]
        for steps in sorted({g.steps for g in trials}):
            cells = [f"{g.lr:g}: {'diverged' if g.diverged else g.words()}" for g in trials if g.steps == steps]
            rows.append([start, NAMES.get(loss, loss), METHOD_NAMES.get(method, method), steps, "; ".join(cells)])
    head = ["start", "loss", "method", "updates", "learning rate: accuracy in %"]
    return markdown([head, *rows]) if rows else NOTHING


def speedrun_table(runs: dict[str, Result]) -> str:
    """One row per run, those with equal settings together."""
    rows = []
    done = [r for r in runs.values() if not r["held_out"]]
    for goal in sorted({r["goal"] for r in done}):
        about = [r for r in done if r["goal"] == goal]
        for r in sorted(about, key=lambda r: (_per_update(r), r.get("about", ""), r["seed"])):
            met = not r["diverged"] and r["logistic"] >= r["wanted"] and r["seconds"] <= r["limit"]
            scores = [f"{100 * r[n]:.2f}" if n in r else "diverged" for n in ("logistic", "knn")]
            notes = [f"{r['pauses']} pause{'s' * (r['pauses'] > 1)}"] if r.get("pauses") else []
            if not r.get("cold", r["seed"] == 0):  # results from before this was stored: seeds shared a process
                notes.append("warm: not the first run of its process")
            seconds = f"{r['seconds']} ({', '.join(notes)})" if notes else r["seconds"]
            rows.append(
                [
                    *(f"{100 * r['wanted']:.0f} % in {r['limit']} s", _how(r), r["seed"], *scores, seconds, r["start"]),
                    *(f"{r['views'] / 1e6:.1f} M", f"{r['views_per_second']:,}", "yes" if met else "no"),
                ]
            )
    head = [
        "goal",
        "sides of views, norms, decay; views per update",
        "seed",
        "logistic",
        "kNN",
        "seconds",
        "of these to start",
        "views",
        "views/s",
        "met",
    ]
    return markdown([head, *rows]) if rows else NOTHING


def _how(run: Result) -> str:
    """Sides of the views, the engine, weight decay and the views per update of a run of the speedrun."""
    _, brace, text = run.get("about", "").partition("{")
    settings = json.loads(brace + text) if text else {}
    sides = [int(side) for _, side in settings.get("sizes", [])] or [32]
    words = [f"{side} px" for side in sides] + ["fused"] * ("fused" in settings.get("encoder", ""))
    words += ["decay"] * bool(settings.get("weight_decay"))
    return ", ".join(words) + f"; {_per_update(run)}"


def _per_update(run: Result) -> int:
    return int(run["views"] // run["steps"])


def search_table(runs: dict[str, Result]) -> str:
    """The trials of the search, by the settings that not all of them share."""
    trials = [
        (*name.split("/", 2), r) for name, r in runs.items() if name.startswith(("search ", "design ", "change "))
    ]
    settings = [{"loss": Recipe().loss} | json.loads(text) for _, _, text, _ in trials]
    shared = {k: v for k, v in (settings[0] if settings else {}).items() if all(s.get(k) == v for s in settings)}
    rows = []
    for own, (stage, _, _, r) in zip(settings, trials, strict=True):
        words = ", ".join(f"{k} {v}" for k, v in own.items() if k not in shared and not isinstance(v, bool))
        scores = [f"{100 * r[name]:.2f}" if name in r else "" for name in ("logistic", "folded")]
        scores = ["diverged", ""] if r["diverged"] else scores
        rows.append([stage.partition(" ")[2], words, f"{r['views'] / 1e6:.2f} M", *scores])
    return markdown([["seconds", "settings", "views", "held out", "folds"], *rows]) if rows else NOTHING


def parts_table(runs: dict[str, Result]) -> str:
    """Milliseconds per step of the last seed of each goal and engine."""
    rows = {
        (r["goal"], how): [f"{100 * r['wanted']:.0f} %", how, *(r["parts_ms"].get(name, "") for name in _PARTS)]
        for r in sorted(runs.values(), key=lambda r: r.get("seed", 0))
        if not r["held_out"] and "parts_ms" in r
        for how in [_how(r)]
    }
    head = ["goal", "sides of views, norms, decay; views per update", *_PARTS.values()]
    return markdown([head, *(rows[key] for key in sorted(rows))]) if rows else NOTHING


_PARTS = {"step": "all but views", "network": "network", "loss": "loss", "optimizer": "optimizer", "views": "views"}


def engine_table(found: dict[str, Any]) -> str:
    rows = [
        [name, *(f"{values[k]:,.0f}" for k in ("step", "run", "views")), f"{values['optimizer ms']:.2f}"]
        for name, values in found.items()
        if isinstance(values, dict) and "optimizer ms" in values
    ]
    rows += [[name, "", f"{value:,.0f}", "", ""] for name, value in found.items() if isinstance(value, float)]
    return (
        markdown([["variant", "fixed views", "new views", "views alone", "optimizer, ms"], *rows]) if rows else NOTHING
    )


def kernels_table(found: dict[str, Any]) -> str:
    rows = []
    for name, values in found.items():
        if isinstance(values, dict) and "kinds ms" in values:
            kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in values["kinds ms"].items() if ms >= 0.005)
            rows.append(
                [name.removeprefix("kernels of "), f"{values['wall ms']:.2f}", f"{values['no kernel']:.0%}", kinds]
            )
    return (
        markdown([["variant", "ms per update", "time without a kernel", "sum of kernels, ms"], *rows])
        if rows
        else NOTHING
    )


def appendix_table(results: dict[str, Result], data: str, initial: dict[str, Any]) -> str:
    rows = appendix.rows(results, data, initial)
    head = [
        "",
        "idea",
        "theory: sooner from small, from standard start; rate",
        "small start",
        "standard start",
        "largest rate, measured",
        "verdict",
    ]
    return markdown([head, *rows]) if rows else NOTHING


def _order(group: Group) -> tuple[int, int, int]:
    return list(LOSSES).index(group.loss), list(METHODS).index(group.method), group.steps


def baselines_note(results: dict[str, Result], data: str) -> str:
    """Which baselines have no final runs, and how much worse they were than the best one on held-out images."""
    missing = []
    for loss, method in product(RACED, BASELINES):
        found = verdict(results, data, loss)
        if found is None or any((g.data, g.loss, g.method) == (data, loss, method) for g in groups(results.values())):
            continue
        own, best = (_best_trials(results, data, loss, one) for one in (method, found.baseline.method))
        longest = max(own.keys() & best.keys(), default=None)
        words = "" if longest is None else f" ({100 * (own[longest] - best[longest]):+.1f} after {longest} updates)"
        missing.append(f"{METHOD_NAMES[method]} with {NAMES[loss]}{words}")
    if not missing:
        return ""
    about = "No final runs have been made of the following baselines (points against the best one on held-out images)"
    return f"{about}: {', '.join(missing)}."


def _best_trials(results: dict[str, Result], data: str, loss: str, method: str) -> dict[int, float]:
    """The best accuracy on held-out images, by the number of updates."""
    trials = [g for stage in ("tune", "long") for g in groups(results.values(), stage)]
    best: dict[int, float] = {}
    for g in trials:
        if (g.data, g.loss, g.method) == (data, loss, method):
            best[g.steps] = max(best.get(g.steps, 0.0), g.mean())
    return best


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """All tables of the pages by name."""
    results, runs = (Store(folder / name).results() for name in ("race.jsonl", "speedrun.jsonl"))
    files = (folder / name for name in ("engine.json", "engine_large.json", "largest_rate.json"))
    engine, large, initial = (json.loads(stored.read_text()) if stored.is_file() else {} for stored in files)
    data = dataset(results)
    shown = bool(drawn(results, data))
    return {
        **{"verdict": verdict_table(results, data), "baselines": baselines_note(results, data)},
        **{"finals": finals_table(results, data), "trials": trials_table(results, data)},
        **{"speedrun": speedrun_table(runs), "parts": parts_table(runs), "search": search_table(runs)},
        **{"engine": engine_table(engine), "kernels": kernels_table(engine), "large": engine_table(large)},
        "figure": f"![{ALT}](speed.png)" if shown else "",
        "beside": f"![{ALT_BESIDE}](speed_modes.png)" if shown else "",
        "spectra": f"![{ALT_SPECTRA}](speed_spectra.png)" if shown else "",
        **{"small": finals_table(results, data, "small"), "stl": finals_table(results, OTHER)},
        **{"lost": lost_table(results, data), "transfer": transfer_table(results, data)},
        **{"span": span_table(folder / "span.jsonl"), "appendix": appendix_table(results, data, initial)},
    }


def pages() -> dict[Path, str]:
    """The pages with their tables; every table belongs to one of them."""
    left, found = tables(), {}
    for path in (RESULTS / name for name in PAGES):
        text = path.read_text(encoding="utf-8")
        own = {name: left.pop(name) for name in list(left) if f"<!-- {name} -->" in text}
        found[path] = filled(text, own)
    if left:
        raise ValueError(f"no page has a place for {', '.join(left)}")
    return found


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)
    results = Store(RESULTS / "race.jsonl").results()
    made = {name: draw(results, dataset(results), rows) for name, rows in FIGURES.items()}
    for name, figure in {**made, "speed_spectra.png": draw_spectra(results, dataset(results))}.items():
        if figure is not None:
            with style():
                figure.savefig(RESULTS / name)


if __name__ == "__main__":
    main()
