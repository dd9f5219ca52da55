"""Tangent-kernel studies of runs: rebuild network and views, measure, and store the result in RUN/ntk."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stairwise.archives import load_arrays
from stairwise.checks import InputError
from stairwise.distributed import choose_device
from stairwise.files import save_json
from stairwise.ntk.coming import PREDICTED, study_coming
from stairwise.ntk.lengths import study_lengths
from stairwise.ntk.study import Drift, Outputs, Tangent, study, study_drift
from stairwise.progress import Progress, silent
from stairwise.provenance import code_digest
from stairwise.runs.folder import CHECKPOINTS, KERNELS, WEIGHTS
from stairwise.runs.reader import Run
from stairwise.training import checkpoint
from stairwise.training.networks import fixed_views, initial_network, kept_networks, load_network

PAIRS = 250  # pairs for the kernel during training, at most
SAMPLED, SAME = 64, 0.05  # pixels that are stored of a tensor of views, and by how much they may differ
CODE = ("ntk", "kernel", "theory", "nets", "data", "training")  # if these change, stored studies are out of date


def study_of(
    run: Run,
    n: int = 1000,
    seed: int = 0,
    device: str = "auto",
    precision: str = "float32",
    initial: bool = True,
    progress: Progress = silent,
    views: str = "",
) -> Tangent:
    """Kernel, predicted embeddings and alignments of a trained run, on n of its training pairs."""
    where = choose_device(device)
    progress(0.0, 1, "drawing pairs")
    x = fixed_views(run, n, seed, where, views)
    model = Outputs(load_network(run)).to(where).eval()
    before = Outputs(initial_network(run)).to(where).eval() if initial else None
    tangent = study(run.folder.name, model, x, before, precision=precision, seed=seed, progress=progress)
    tangent.facts.update(weights=checkpoint.identity(run.folder / CHECKPOINTS), code=code_digest(*CODE), views=views)
    few = x.flatten()[:: max(1, x.numel() // SAMPLED)][:SAMPLED]
    tangent.facts["sample"] = [round(float(v), 3) for v in few.cpu()]
    return tangent


def refuse_other_views(runs: Sequence[Run], seed: int, views: str) -> None:
    """Raise InputError if stored studies of several runs are not of one and the same tensor of views.

    A few of its pixels are compared. A GPU and a CPU draw other views from the same seed."""
    samples = {}
    for run in runs:
        stored = json.loads((_place(run, seed, views) / "tangent.json").read_text(encoding="utf-8"))
        samples[run.folder.name] = np.array(stored.get("sample", []))
    known = {name: sample for name, sample in samples.items() if len(sample)}  # older studies have none
    first = next(iter(known.values()), np.zeros(0))
    other = [name for name, v in known.items() if v.shape != first.shape or np.abs(v - first).max() > SAME]
    if other:
        remedy = "study all of them on one kind of device, with the same images"
        raise InputError("studies", "must be of the same views", ", ".join(other), remedy)


def stored_study(
    run: Run, n: int, seed: int, device: str, precision: str, progress: Progress, views: str = ""
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Scores and arrays of a run, read from RUN/ntk, or computed and written there if that study does not match.

    A run without checkpoints cannot be studied again, so any stored study of these pairs is used."""
    folder = _place(run, seed, views)
    wanted = _wanted(run, n, seed, precision) | {"initial": True}
    if not _holds(folder / "tangent.json", wanted):
        study_of(run, n, seed, device, precision, progress=progress, views=views).write(folder)
    stored = json.loads((folder / "tangent.json").read_text(encoding="utf-8"))
    return stored["scores"], load_arrays(folder / "tangent.npz")


def stored_lengths(
    run: Run, n: int, seed: int, device: str, precision: str, progress: Progress, views: str = ""
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of `ntk.lengths` of a run, likewise."""
    folder, wanted = _place(run, seed, views), _wanted(run, n, seed, precision)
    if not _holds(folder / "lengths.json", wanted):
        where = choose_device(device)
        model = Outputs(load_network(run)).to(where).eval()
        x = fixed_views(run, n, seed, where, views)
        found = study_lengths(run.folder.name, model, x, precision=precision, progress=progress)
        found.facts.update(wanted)
        found.write(folder)
    facts: dict[str, Any] = json.loads((folder / "lengths.json").read_text(encoding="utf-8"))
    return facts, load_arrays(folder / "lengths.npz")


def stored_coming(
    run: Run, n: int, seeds: Sequence[int], device: str, precision: str, progress: Progress, views: str = ""
) -> dict[str, np.ndarray] | None:
    """Arrays of `ntk.coming` of a run for several draws of pairs, likewise; None if it has kept no weights and no study
    of them is stored."""
    folder, kept = _place(run, seeds[0], views), checkpoint.every(run.folder / WEIGHTS)
    wanted: dict[str, Any] = {"n": n, "seeds": list(seeds), "precision": precision, "predicted": PREDICTED}
    if kept:
        wanted |= {"code": code_digest(*CODE), "weights": checkpoint.identity(run.folder / WEIGHTS)}
    if not _holds(folder / "coming.json", wanted):
        if len(kept) < 2:
            return None
        where = choose_device(device)
        models = [(step, Outputs(network).to(where).eval()) for step, _, network in kept_networks(run)]
        draws = [fixed_views(run, n, seed, where, views) for seed in seeds]
        study_coming(run.folder.name, models, draws, precision=precision, progress=progress).write(folder)
        save_json(folder / "coming.json", wanted)
    return load_arrays(folder / "coming.npz")


def study_for_tables(
    run: Run,
    views: str,
    n: int = 1000,
    draws: int = 3,
    seed: int = 0,
    device: str = "auto",
    precision: str = "float16",
    progress: Progress = silent,
) -> None:
    """Make all studies of a run that Tables 1 and 2 read, where its weights are; needs no matplotlib."""
    how = device, precision, progress
    for one in range(seed, seed + draws):
        stored_study(run, n, one, *how, views=views)
        stored_lengths(run, n, one, *how, views=views)
    stored_drift(run, min(PAIRS, n), seed, *how, views=views)


def _place(run: Run, seed: int, views: str) -> Path:
    """Where studies of these pairs are stored."""
    folder = run.folder / KERNELS
    return folder if not views and seed == 0 else folder / f"{views or 'own'}-{seed}"


def _wanted(run: Run, n: int, seed: int, precision: str) -> dict[str, Any]:
    """What a stored study must say; one without its weights cannot be made again."""
    wanted: dict[str, Any] = {"n": n, "seed": seed, "precision": precision}
    weights = checkpoint.identity(run.folder / CHECKPOINTS)
    return wanted | ({"weights": weights, "code": code_digest(*CODE)} if weights else {})


def _holds(path: Path, wanted: dict[str, Any]) -> bool:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(stored.get(key) == value for key, value in wanted.items())


def drift_of(
    run: Run,
    n: int = 250,
    seed: int = 0,
    device: str = "auto",
    precision: str = "float32",
    progress: Progress = silent,
    views: str = "",
) -> Drift:
    """Change of the tangent kernel during training, from the weights that the run has kept (`keep`)."""
    where = choose_device(device)
    kept = list(kept_networks(run))
    if not kept:
        remedy = "train it again with --set keep=10 --restart"
        raise InputError("run", "must have kept weights during training", run.folder, remedy)
    networks = [(0, 0.0, initial_network(run)), *kept]
    models = [(step, t, Outputs(network).to(where).eval()) for step, t, network in networks]
    x = fixed_views(run, n, seed, where, views)
    return study_drift(run.folder.name, models, x, precision=precision, seed=seed, progress=progress)


def stored_drift(
    run: Run, n: int, seed: int, device: str, precision: str, progress: Progress, views: str = ""
) -> dict[str, np.ndarray] | None:
    """Arrays of `drift_of`, read from RUN/ntk if it holds this study of these weights, otherwise computed and written
    there; None if the run has kept no weights. Without its weights, any study of these pairs is taken."""
    folder, kept = _place(run, seed, views), checkpoint.every(run.folder / WEIGHTS)
    if not kept:
        arrays = load_arrays(folder / "drift.npz") if (folder / "drift.npz").is_file() else {}
        return arrays if arrays and (int(arrays["n"]), int(arrays["seed"])) == (n, seed) else None
    wanted = {"n": n, "seed": seed, "precision": precision, "code": code_digest(*CODE)}
    wanted["weights"] = checkpoint.identity(run.folder / WEIGHTS)
    if not _holds(folder / "drift.json", wanted):
        drift_of(run, n, seed, device, precision, progress, views).write(folder)
        save_json(folder / "drift.json", wanted)
    return load_arrays(folder / "drift.npz")
