"""Replay the corpus, and write the tables of docs/results/corpus.md: `python -m benchmarks.corpus.page`.

Each table stands between two comments, `<!-- name -->` and `<!-- end -->`; the words around them are written by hand.
What is said at every record is stored in docs/results/corpus_words.npz, so that a test need not replay all runs. Of the
last parts not all curves are stored: `--curves PART=FILE.npz` names a file that has them. Without it the stored words
are kept if those that can be replayed do not differ; if they do, rules have changed, and the others are left out. The
numbers that docs/staircase.md quotes are written, too.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.corpus.known import complete
from benchmarks.corpus.methods import FAULTS
from benchmarks.corpus.score import LAST, PARTS, PROMISES, STORED, STRICTER, TRUTHS, Score, replay, resampled, score
from benchmarks.corpus.store import CorpusRun, read
from benchmarks.corpus.truth import Truth, truth
from stairwise.staircase import redundancy
from stairwise.staircase.advice import STATES
from stairwise.staircase.growth import Rest

PAGE, WORDS = STORED / "corpus.md", STORED / "corpus_words.npz"
QUOTES = STORED.parent / "staircase.md"
GOALS = ("at least 90 %", "at most 1 %", "at most 1 %", "at least 95 %", "at least 80 %")
QUANTILES = (0.05, 0.5, 0.95)
PRICED = {"barlow_twins_norm": redundancy.of_barlow_twins, "vicreg": redundancy.of_vicreg}
LABELS = {
    "barlow_twins": "Barlow Twins without batch norm, λ = 1",
    "barlow_twins_norm": "Barlow Twins, usual form",
    "simclr": "SimCLR",
    "vicreg": "VICReg",
    "spectral": "spectral contrastive",
    "byol": "BYOL",
    "simsiam": "SimSiam",
    "dino": "like DINO",
    "cifar10": "CIFAR-10",
    "stl10": "STL-10",
    "leaves": "disks",
    "clouds": "random fields",
    "strokes": "writing",
    "closeups": "details of photographs",
    "mlp": "MLP",
    "resnet": "ResNet",
    "vit": "ViT",
    "cnn": "convolutions without normalization",
    "mixer": "Mixer",
    "shallow": "one hidden layer",
    "recurrent": "recurrent",
    "patches": "bag of patches",
    "gated": "gated",
}


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """Rows as a table, the first of them its head.

    >>> print(markdown([["", "first"], ["runs", 3]]))
    | | first |
    |---|---|
    | runs | 3 |
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines[0] = lines[0].replace("|  |", "| |")
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def results(scores: Mapping[str, Score]) -> str:
    """The promised shares, the last part first."""
    parts = list(scores)[::-1]
    rows: list[list[object]] = [["", "goal", *parts]]
    for (label, name), goal in zip(PROMISES.items(), GOALS, strict=True):
        rows.append([label, goal, *(_cell(scores[part], name) for part in parts)])
    return markdown(rows)


def verdict(total: Score) -> str:
    """Which goals are met, and which of their intervals carry the claim."""
    lines = []
    for (label, name), goal in zip(PROMISES.items(), GOALS, strict=True):
        share, bound = getattr(total, name), float(re.findall(r"\d+", goal)[0]) / 100
        sign = -1 if "most" in goal else 1
        worst, best = sorted(sign * end for end in share.interval)
        if sign * share.value >= sign * bound:
            words = "met; its interval " + ("carries the claim" if worst >= sign * bound else "reaches beyond the goal")
        else:
            words = "missed; its interval " + ("includes the goal" if best >= sign * bound else "excludes the goal")
        lines.append(f"- {label}, {goal}: {words}")
    return "\n".join(lines)


def by_run(total: Score) -> str:
    """Wider intervals of the shares of records, whose runs are drawn again as a whole."""
    labels = {name: label for label, name in PROMISES.items()}
    ends = {name: resampled(runs) for name, runs in total.by_run.items()}
    return "\n".join(f"- {labels[name]}: {100 * low:.1f} to {100 * high:.1f} %" for name, (low, high) in ends.items())


def stricter(scores: Mapping[str, Score]) -> str:
    """Shares without a goal."""
    parts = list(scores)[::-1]
    rows = [[label, *(_cell(scores[part], name) for part in parts)] for label, name in STRICTER.items()]
    return markdown([["", *parts], *rows])


def _cell(total: Score, name: str) -> str:
    share = getattr(total, name)
    low, high = share.interval
    return f"{100 * share.value:.1f} % ({share.hits} of {share.total}; {100 * low:.1f} to {100 * high:.1f} %)"


def delays(scores: Mapping[str, Score]) -> str:
    """How long it takes until a collapse is named, and how long false alarms last."""
    parts = list(scores)[::-1]
    late = [scores[part].delays for part in parts]
    return markdown(
        [
            ["", *parts],
            ["records until a collapse is named, median", *(f"{np.median(one):.0f}" for one in late)],
            ["records until a collapse is named, 95 % of runs", *(f"{np.quantile(one, 0.95):.0f}" for one in late)],
            [
                "records of a false alarm, per healthy run",
                *(f"{np.mean(scores[part].alarms):.3f}" for part in parts),
            ],
        ]
    )


def matrix(total: Score) -> str:
    """What was true in rows, what was said in columns."""
    rows: list[list[object]] = [["true ↓ said →", *STATES]]
    for label in (*STATES, "several are right"):
        counts = [total.confusion[label, word] for word in STATES]
        if sum(counts):
            rows.append([label, *counts])
    return markdown(rows)


def wrong(total: Score) -> str:
    """Runs that went wrong."""
    return "\n".join(f"- {note}" for note in sorted(total.notes))


def charges(runs: Iterable[CorpusRun]) -> str:
    """What share of its charge for redundancy a loss pays, where few dimensions hold the variance."""
    found: dict[tuple[str, bool], list[list[float]]] = {
        (loss, missing): [] for loss in PRICED for missing in (False, True)
    }
    for run in runs:
        if run.settings["loss"] in PRICED and len(run.lam) and np.isfinite(run.lam).all():
            with np.errstate(invalid="ignore", over="ignore"):  # scalars of runs that diverge
                paid = _paid(run)
            for missing, shares in paid.items():
                found[run.settings["loss"], missing].append(shares)
    rows: list[list[object]] = [["", "runs", "records", "5 % of records below", "median", "5 % above"]]
    for (loss, missing), some in found.items():
        values = [value for one in some for value in one]
        middle = np.quantile(values, QUANTILES).round(2) + 0.0  # no negative zeros
        label = f"{LABELS[loss]}, {'without its term' if missing else 'healthy'}"
        rows.append([label, sum(map(bool, some)), len(values), *(f"{x:.2f}" for x in middle)])
    return markdown(rows)


def _paid(run: CorpusRun) -> dict[bool, list[float]]:
    """(loss − first part)/charge at the records at which it can be seen, before and after the term is taken away."""
    rest, signs, d = Rest.of(run.lam), run.signs(), run.settings["d"]
    of = PRICED[run.settings["loss"]]
    first, charge = of(signs, d, np.maximum(redundancy.participation(run.lam, rest), 1.0))
    seen = redundancy.few(run.lam, rest) & (charge >= redundancy.SEEN[list(PRICED).index(run.settings["loss"])] * first)
    n, fault = len(run.lam), run.settings["fault"]
    since = np.arange(n) >= (run.settings["fault_at"] * n if fault else n)
    paid = {False: seen & ~since}
    if FAULTS.get(fault) == "dimensional":
        paid[True] = seen & since
    return {missing: list((signs.loss - first)[some] / charge[some]) for missing, some in paid.items()}


def numbers(runs: Mapping[str, Sequence[CorpusRun]], truths: Mapping[str, Sequence[Truth]]) -> str:
    """How many runs there are of each kind."""
    parts = list(runs)
    rows: list[list[object]] = [["", *parts], ["**runs**", *(len(runs[part]) for part in parts)]]
    for key in ("loss", "data", "architecture", "scenario"):
        found = [Counter(run.settings[key] for run in runs[part]) for part in parts]
        names = dict.fromkeys(name for one in found for name in one)
        order = [name for name in LABELS if name in names] + sorted(set(names) - set(LABELS))
        rows += [[f"{key}: {LABELS.get(name, name)}", *(one[name] for one in found)] for name in order]
    rows.append(["normalized z", *(sum(run.settings.get("unit", False) for run in runs[part]) for part in parts)])
    kinds = [Counter(known.kind for known in truths[part]) for part in parts]
    rows += [[f"truth: {kind}", *(one[kind] for one in kinds)] for kind in sorted(set().union(*kinds))]
    return markdown(rows)


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The page with its tables replaced.

    >>> filled("a <!-- x -->\\nold\\n<!-- end --> b", {"x": "new"})
    'a <!-- x -->\\nnew\\n<!-- end --> b'
    """
    for name, table in tables.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"the page has {count} places for the table {name}")
    return text


def all_tables(
    runs: Mapping[str, Sequence[CorpusRun]], truths: Mapping[str, Sequence[Truth]], scores: Mapping[str, Score]
) -> dict[str, str]:
    """All tables of the page by name."""
    last = scores[LAST]
    tables = {"results": results(scores), "delays": delays(scores), "matrix": matrix(last), "wrong": wrong(last)}
    tables |= {"verdict": verdict(last), "by run": by_run(last)}
    tables |= {"charges": charges(run for part in runs.values() for run in part)}
    return tables | {"stricter": stricter(scores), "numbers": numbers(runs, truths)}


def everything(files: Mapping[str, Path] = PARTS) -> tuple[dict[str, list[CorpusRun]], dict[str, list[Truth]]]:
    """All runs, and what was true of them, by part; runs without stored curves have no records."""
    runs, truths = {}, {}
    for part, path in files.items():
        if part in TRUTHS:
            runs[part], truths[part] = complete(read(path), TRUTHS[part])
        else:
            runs[part] = read(path)
            truths[part] = [truth(run) for run in runs[part]]
    return runs, truths


def letters(states: Sequence[str]) -> str:
    """States as the numbers that they have in `STATES`.

    >>> letters(["not started", "learning"]), spelled("01")
    ('01', ['not started', 'learning'])
    """
    return "".join(str(STATES.index(state)) for state in states)


def spelled(numbers: str) -> list[str]:
    return [STATES[int(number)] for number in numbers]


def stored_words() -> dict[str, list[list[str]]]:
    """What was said at every record of all runs, by part."""
    with np.load(WORDS) as stored:
        return {part: [spelled(str(numbers)) for numbers in stored[part]] for part in stored.files}


def save_words(said: Mapping[str, Sequence[Sequence[str]]]) -> None:
    np.savez_compressed(WORDS, **{part: np.array([letters(words) for words in some]) for part, some in said.items()})


def kept(replayed: Sequence[Sequence[str]], stored: Sequence[Sequence[str]] | None) -> list[Sequence[str]]:
    """What was replayed, and what is stored of runs that have no records, unless the stored words are of other rules.

    >>> kept([["learning"], []], [["learning"], ["waiting"]])
    [['learning'], ['waiting']]
    >>> kept([["finished"], []], [["learning"], ["waiting"]])
    [['finished'], []]
    """
    if stored is None or any(words and words != before for words, before in zip(replayed, stored, strict=True)):
        return list(replayed)
    return [words or before for words, before in zip(replayed, stored, strict=True)]


def quoted(total: Score) -> str:
    """The shares of the last part in a paragraph."""
    part = {name: f"{100 * getattr(total, name).value:.1f} % of" for name in (PROMISES | STRICTER).values()}
    low, high = (100 * end for end in total.accused.interval)
    accused = f"({total.accused.hits} of {total.accused.total}; {low:.1f} to {high:.1f} % with 95 % certainty)"
    return (
        f"On {sum(total.kinds.values())} of these trainings, with the present rules, the state is right at "
        f'{part["right"]} the records, "finished" is said at {part["wrong_stops"]} the records after which more came, '
        f"{part['accused']} healthy runs are at some record accused of collapse {accused}, {part['named']} collapses "
        f"are named within a tenth of the run, and {part['finished']} finishes within a fifth.\n"
        f"Counted more strictly: where only one state is right, it is said at {part['alone']} the records; "
        f"{part['kept']} collapses are named in time and in nine of ten later records; {part['ends']} collapsed runs "
        "end with that word ([counts, intervals and what went wrong](results/corpus.md))."
    )


def _file(text: str) -> tuple[str, Path]:
    part, _, path = text.partition("=")
    return part, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    about = "PART=FILE.npz, a file of all runs of a part; may be repeated"
    parser.add_argument("--curves", type=_file, action="append", default=[], help=about)
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    choice = parser.parse_args()
    runs, truths = everything(PARTS | dict(choice.curves))
    with get_context("spawn").Pool(choice.workers) as pool:
        replayed = {part: pool.map(replay, some, chunksize=8) for part, some in runs.items()}
    before = stored_words() if WORDS.exists() else {}
    said = {part: kept(words, before.get(part)) for part, words in replayed.items()}
    save_words(said)
    for part, some in said.items():
        if missing := sum(not words for words in some):
            print(f"{part}: rules have changed; {missing} of {len(some)} runs are left out, whose curves are not here")
    scores = {part: score(some, said[part], truths[part]) for part, some in runs.items()}
    for path, tables in (
        (PAGE, all_tables(everything()[0], truths, scores)),
        (QUOTES, {"states": quoted(scores[LAST])}),
    ):
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
