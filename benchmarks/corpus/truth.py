"""What was true at each record of a run, judged with hindsight from the whole run and from how it was made.

The judge shares no code with `sw.advise`, and it sees the future. Where construction and hindsight disagree (a fault
that did not collapse anything, a learning rate that was large but did no harm), the run is not scored.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.corpus.methods import FAULTS
from benchmarks.corpus.store import CorpusRun

Floats = NDArray[np.float64]
ALIKE = 0.9  # complete collapse: embeddings of different samples have at least this cosine,
APART = 0.1  # and those of one sample are no closer than this;
LOST = 1e-2  # or, if distances are all that the loss sees, the total variance has fallen to this share of its maximum,
GONE = 1e-6  # or, for any loss, to this share
HUGE = 1e10  # a loss above this is as good as infinite
ONE = 0.9  # dimensional collapse: one dimension has this share of the variance,
FEW = (16, 4)  # or d/16 of them, four at most
LOW, HIGH = 0.2, 0.7  # a mode is being learned between these shares of its final level,
SETTLED = 0.9  # and "learning" is right as well until it has reached this share
MATTERS = 0.03  # modes that end below this share of the largest do not count,
PLAINLY = 0.15  # and those above this share plainly do
GROWS = 0.15  # a mode still grows at the end if it gains this much, in log λ, in the last quarter,
COMES = 1.0  # and a lower one is to come if it gains this much
NEAR, FAST = 6, 0.25  # it is plainly being learned if log λ gains this much within so many records on either side;
# where it is slower, "waiting" is right as well
SLACK = 3  # records around a change of state at which both states are right
LATE = 0.2  # share of the run within which "finished" must be said
EARLY = 3  # the first records are too few to tell anything
UNIFORM = 0.92  # a loss over d prototypes that was never below this multiple of ln d has chosen none of them
FELL, BACK = 0.85, 0.98  # training was undone if the loss, fallen to this share of its first value, is back at it
BLIND = 0.1  # nothing of a sample is left in its embedding if views agree this little
CAN_COLLAPSE = ("byol", "simsiam", "dino")  # these have no term that forbids it

Window = tuple[int, int, NDArray[np.bool_], int]  # first record, end, where it is plain, when it has settled


@dataclass(frozen=True, eq=False)
class Truth:
    """For each record the states that are right, or None if not known.

    Attributes:
        kind: "healthy", "idle", "diverged", "collapse" or "unknown".
        real: first record at which the collapse or divergence is real, else the number of records.
        doubtful: first record from which on the embedding looks collapsed, if that is before the fault.
        finished: first record after the last dimension was learned, if it stays so for at least a fifth of the run.
        later: whether another dimension was learned after each record, (T,).
    """

    kind: str
    states: list[frozenset[str] | None]
    real: int
    finished: int | None
    later: NDArray[np.bool_]
    doubtful: int | None = None


def truth(run: CorpusRun) -> Truth:
    """Judge one run."""
    n, scenario = len(run.lam), run.settings["scenario"]
    whole = np.isfinite(run.lam).all(axis=1) & np.isfinite(run.scalars["trace_cov"]) & (run.scalars["loss"] < HUGE)
    no = np.zeros(n, dtype=bool)
    if not whole.all():
        first = int(np.flatnonzero(~whole)[0])
        if whole[first:].any():
            return Truth("unknown", [None] * n, n, None, no)
        return Truth("diverged", [frozenset({"diverged"}) if i >= first else None for i in range(n)], first, None, no)
    if scenario in ("slow", "frozen"):
        return _idle(run, n, no)
    end = int(np.ceil(run.settings["fault_at"] * n)) if run.settings["fault"] else n
    real = _collapse(run)
    may = run.settings["fault"] or run.settings["loss"] in CAN_COLLAPSE or scenario == "large"
    named = (real < n and may) or run.scalars["trace_cov"][-1] <= GONE * run.scalars["trace_cov"].max()
    weak = _one(run) or (_uniform(run, n) and scenario != "large" if named else _blind(run))
    weak |= _undone(run.scalars["loss"])
    if (weak and not run.settings["fault"]) or (not named and (run.settings["fault"] or scenario == "large")):
        return Truth("unknown", [None] * n, n, None, no)
    if named and not run.settings["fault"]:
        end = 0
    states, finished, later = _growth(run, end, n if not named else end)
    if named:
        gone = frozenset({"collapsing", "collapsed"})
        states = [None if i >= real else state for i, state in enumerate(states)]
        states += [gone if i >= real else None for i in range(end, n)]
        doubtful = min(real, end, _looks_collapsed(run, end) if _uniform(run, end) else end)
        return Truth("collapse", states, max(real, end), None, np.concatenate([later, no[end:]]), doubtful)
    return Truth("healthy", states, n, finished, later)


def _undone(loss: Floats) -> bool:
    """Whether all that had been learned was lost again: the loss is back where it began."""
    return bool(loss[0] > 0 and loss.min() <= FELL * loss[0] and loss[-5:].min() >= BACK * loss[0])


def _one(run: CorpusRun) -> bool:
    """Whether one dimension ends with all the variance, under a loss that does not forbid it, or is Barlow Twins with
    few dimensions, for which its usual weight of redundancy reduction, 0.0051, is too small."""
    return run.settings["loss"] in (*CAN_COLLAPSE, "barlow_twins_norm") and bool(_share(run, 1)[-5:].min() >= ONE)


def _blind(run: CorpusRun) -> bool:
    """Whether views of a sample agree no better than different samples do, under a loss that does not forbid it."""
    v = run.scalars
    agreement = (v["positive"] - v["negative"]) / np.maximum(1 - v["negative"], 1e-12)
    return run.settings["loss"] in CAN_COLLAPSE and bool(np.median(agreement[len(agreement) // 2 :]) <= BLIND)


def _uniform(run: CorpusRun, end: int) -> bool:
    """Whether outputs over prototypes are uniform up to a record: they may still differ later, so nobody knows whether
    that is a collapse."""
    loss = run.scalars["loss"][EARLY:end]
    return run.settings["loss"] == "dino" and bool((loss >= UNIFORM * np.log(run.settings["d"])).all())


def _kind(run: CorpusRun) -> str:
    return FAULTS[run.settings["fault"]] if run.settings["fault"] else "complete"


def _share(run: CorpusRun, k: int) -> Floats:
    """Share of the k largest eigenvalues."""
    lam = run.lam.clip(0)
    return np.asarray(lam[:, :k].sum(axis=1) / np.maximum(lam.sum(axis=1), 1e-300))


def _collapse(run: CorpusRun) -> int:
    """First record from which on the embedding is collapsed until the end."""
    holds = np.flatnonzero(~_gone(run))
    return int(holds[-1]) + 1 if len(holds) else 0


def _looks_collapsed(run: CorpusRun, end: int) -> int:
    """First record at which the embedding is collapsed, or `end`."""
    return int(np.flatnonzero(np.append(_gone(run)[:end], True))[0])


def _gone(run: CorpusRun) -> NDArray[np.bool_]:
    """At which records the embedding is collapsed."""
    v = run.scalars
    if _kind(run) == "dimensional":
        return _share(run, max(1, min(run.settings["d"] // FEW[0], FEW[1]))) >= ONE
    alike = (v["negative"] >= ALIKE) & (v["positive"] - v["negative"] <= APART)
    lost = LOST if run.settings["fault"] in ("invariance", "no_variance") else GONE
    return np.asarray(alike | (v["trace_cov"] <= lost * np.maximum.accumulate(v["trace_cov"])))


def _idle(run: CorpusRun, n: int, no: NDArray[np.bool_]) -> Truth:
    """A run that does not move: the leading eigenvalues end where they began."""
    first, last = (np.median(run.lam[part, :5], axis=0) for part in (slice(0, 6), slice(-6, None)))
    moved = np.abs(np.log(np.maximum(last, 1e-300) / np.maximum(first, 1e-300))).max() > 0.3
    if moved:
        return Truth("unknown", [None] * n, n, None, no)
    return Truth("idle", [frozenset({"not started"})] * n, n, None, no)


def _growth(run: CorpusRun, end: int, total: int) -> tuple[list[frozenset[str] | None], int | None, NDArray[np.bool_]]:
    """States of the first `end` records of a healthy run, when it finished, and whether more was learned later."""
    if end < 10:
        return [None] * end, None, np.zeros(end, dtype=bool)
    windows, modes, coming = _windows(run, end)
    label = np.full(end, "waiting", dtype=object)
    last = max((b for _, b, _, _ in windows), default=0)
    first = min((a for a, _, _, _ in windows), default=0)
    # only where no more can be learned do we know that nothing would have come later
    can = run.settings["classes"] - 1 if run.settings["classes"] else run.settings["d"]
    known = run.settings["scenario"] in ("finished", "done") and end == total and modes >= can and not coming
    label[last:] = "finished" if known else "open"
    label[:first] = "before"
    for a, b, _, _ in windows:
        label[a:b] = "slow"
    for a, b, fast, _ in windows:
        label[a:b][fast[a:b]] = "learning"
    nothing = run.level is not None and run.lam[:end, 0] < LOW  # where the plateau is known
    words = {"before": {"not started", "waiting"}, "open": {"waiting", "finished"}, "slow": {"learning", "waiting"}}
    states: list[frozenset[str] | None] = []
    grace = round(LATE * total)
    for i in range(end):
        right = set().union(*(words.get(x, {x}) for x in label[max(0, i - SLACK) : i + SLACK + 1]))
        if label[i] == "finished" and i < last + grace:
            right |= {"waiting"}
        if np.ndim(nothing) and nothing[i]:
            right = {"not started"}
        if any(b <= i < settled for _, b, _, settled in windows):
            right |= {"learning"}
        states.append(frozenset(right))
    later = np.arange(end) < max((a for a, _, _, _ in windows), default=0)
    finished = last if known and total - last >= grace else None
    return states, finished, later


def _windows(run: CorpusRun, end: int) -> tuple[list[Window], int, bool]:
    """For each mode that is learned, the records between `LOW` and `HIGH` of its final level, or the end if it still
    grows there; the number of modes that are plainly learned; and whether lower ones are growing there."""
    lam = np.maximum(run.lam[:end], 0)
    if run.level is None:  # the scale of z drifts; shares do not
        lam = lam / np.maximum(lam.sum(axis=1, keepdims=True), 1e-300)
    padded = np.pad(lam, ((2, 2), (0, 0)), mode="edge")
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5, axis=0), axis=2)
    level = np.median(smooth[-5:], axis=0)
    before = np.median(smooth[-max(6, end // 4) :][:5], axis=0)
    gain = np.log(np.maximum(level, 1e-300) / np.maximum(before, 1e-300))
    matters = (level >= MATTERS * level[0]) & (level > 0)
    windows = []
    for j in np.flatnonzero(matters):
        curve = smooth[:, j] / level[j]
        low = np.flatnonzero(curve < LOW)
        a = int(low[-1]) + 1 if len(low) else 0
        under = np.flatnonzero(curve < HIGH)
        b = end if gain[j] > GROWS else int(under[-1]) + 1 if len(under) else 0
        b = max(b, a + 1) if a else b  # it may have jumped from one record to the next
        if b > a:
            logs = np.log(np.maximum(smooth[:, j], 1e-300))
            near = np.arange(end)
            fast = logs[np.minimum(near + NEAR, end - 1)] - logs[np.maximum(near - NEAR, 0)] >= FAST
            short = np.flatnonzero(curve < SETTLED)
            windows.append((a, min(b, end), fast, int(short[-1]) + 1 if len(short) else b))
    return windows, int((level >= PLAINLY * level[0]).sum()), bool((gain[~matters] > COMES).any())
