"""Do LARS and Muon learn the span that the theory predicts from the initial network, and do both learn the same?

    python -m benchmarks.race.span --data-file FILE.npz --minutes 9     continues where it stopped
    python -m benchmarks.race.page                                      writes the table

Two views of some training images are fixed once, for all runs of a loss. The theory predicts the span of their
embeddings from the tangent kernel of the initial network. At checkpoints we take the k leading modes of the
embeddings, where k is the race's count of modes in use, and compare their span with that of the k leading predicted
modes. An overlap is the mean squared cosine of the principal angles between two spans.

- Embeddings and kernels are taken about their means, because k counts modes of a covariance.
- The kernel is that of the network in evaluation mode, so batch norm needs statistics. Table 1 keeps those of a new
  network, mean 0 and variance 1, and so does the first kernel here. But with them the network is not the one that
  training begins with: from the small start its embeddings are many orders of magnitude smaller. So there is a second
  kernel, with the statistics of the fixed views; names of its results hold "_measured".
- Kernels are computed in float64, because from the small start their entries hardly differ: in SimCLR's first kernel by
  a ten thousandth. The bias of the last layer is left out. It adds the same to all entries, which changes nothing about
  the mean but would add rounding error.

Runs of one loss and start are made in one process and stored together, because their spans are compared in memory. So
ask for all seeds at once: with more seeds, those that are stored are trained again.
"""

import argparse
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from benchmarks.race.__main__ import STORE, TINY, _name
from benchmarks.race.entrants import METHODS, RACED, RaceRun
from benchmarks.race.images import named_images, read_images
from benchmarks.race.jobs import seconds_of
from benchmarks.race.plan import FIRST, MUON, Race, Rules
from benchmarks.race.single import CHECK, checkpoints, described, device_for_runs, free_memory, measure, recipe_of
from benchmarks.race.store import Result, Store
from stairwise.checks import InputError
from stairwise.evaluate.representations import eval_mode
from stairwise.ntk.empirical import empirical_ntk
from stairwise.ntk.predict import kernel_pca, predict_embeddings
from stairwise.ntk.study import BATCH, Outputs, embed
from stairwise.theory.spectra import subspace_alignment
from stairwise.training.loop import Trainer

Floats = NDArray[np.float64]
STARTS = ("small", "standard")
COMPARED = ("lars", MUON)
LEADING = 128  # modes of a network that are kept; twice as many are predicted
DRAWS = 5  # random spans, for chance
PREDICTING = 20.0  # seconds for the kernels of one network, to plan with
UNMEASURED = ("seconds", "start_s", "measured_s", "logistic", "knn")  # of a result of the race


def fixed_views(trainer: Trainer, n: int) -> Tensor:
    """Two views of the first n training images, first views first; the same for all methods and seeds of a loss."""
    pairs = trainer.material.pairs.copy()
    pairs.seed, pairs.half = 0, False
    both = list(pairs.fixed_batches(torch.arange(n)))
    return torch.cat([a for a, _ in both] + [b for _, b in both])


def with_statistics_of(network: nn.Module, views: Tensor | None) -> Outputs:
    """A copy of a network in evaluation mode, whose batch norms have the statistics of these views, if given."""
    model = Outputs(deepcopy(network)).to(memory_format=torch.contiguous_format).eval()
    if views is not None:
        with torch.no_grad():
            update_bn(views.split(BATCH), model)
    return model


def predicted_modes(network: nn.Module, views: Tensor) -> dict[str, Floats]:
    """Modes (2n, …) by name, leading ones first: of the theory and of kernel PCA, from two kernels of the network."""
    spans = {}
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # to search would take longer
    for ending, statistics in (("", None), ("_measured", views)):
        model = with_statistics_of(network, statistics)
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        if last.bias is not None:
            last.bias.requires_grad_(False)
        K = empirical_ntk(model, views, precision="float64").cpu().numpy()
        K = K - K.mean(axis=0) - K.mean(axis=1, keepdims=True) + K.mean()
        spans["theory" + ending] = theory_modes(K, min(2 * LEADING, len(K) // 2 - 1))
        spans["pca" + ending] = kernel_pca(K, min(2 * LEADING, len(K) - 1))
    torch.backends.cudnn.benchmark = before
    return spans


def theory_modes(K: Floats, most: int) -> Floats:
    """Predicted embeddings (2n, most), or as many as K resolves."""
    try:
        return predict_embeddings(K, most, at_most=True)
    except InputError:  # it resolves none
        return np.zeros((len(K), 0))


def learned_modes(network: nn.Module, views: Tensor) -> Floats:
    """Orthonormal leading modes of the embeddings about their mean, (2n, …)."""
    with eval_mode(network):
        z = embed(Outputs(network), views)
    modes = np.linalg.svd(z - z.mean(axis=0), full_matrices=False)[0]
    return np.asarray(modes[:, : min(LEADING, len(z) // 4)])  # twice as many can be predicted from n pairs


def shares(learned: Floats, predicted: dict[str, Floats], k: int) -> dict[str, float]:
    """Overlaps of the k leading learned modes with k predicted ones, and with 2k ("_2k"), where there are as many.

    "chance" is the mean overlap with a few random spans.
    """
    k = min(k, learned.shape[1])
    found: dict[str, float] = {"k": k}
    drawn = np.random.default_rng(0).standard_normal((DRAWS, len(learned), 2 * k))
    random = {f"chance{i}": one - one.mean(axis=0) for i, one in enumerate(drawn)}
    for ending, count in (("", k), ("_2k", 2 * k)) if k else ():
        spans = {name: modes[:, :count] for name, modes in (predicted | random).items() if modes.shape[1] >= count}
        overlaps = {name: subspace_alignment(learned[:, :k], span) for name, span in spans.items()}
        found["chance" + ending] = float(np.mean([overlaps.pop(name) for name in random]))
        found |= {name + ending: overlap for name, overlap in overlaps.items()}
    return {name: round(value, 4) for name, value in found.items()}


@dataclass
class Group:
    """Runs of one loss from one start: their results and learned modes, and the predicted modes of every seed."""

    images: int
    results: dict[RaceRun, Result] = field(default_factory=dict)
    learned: dict[RaceRun, Floats] = field(default_factory=dict)
    predicted: dict[int, dict[str, Floats]] = field(default_factory=dict)

    def train(self, run: RaceRun, changes: dict[str, Any], device: str) -> None:
        """Train one run, and compare its span with the predicted ones on the way."""
        where, began = device_for_runs(device), time.monotonic()
        trainer = Trainer(recipe_of(run, changes), Path("unused"), where)
        try:
            views = fixed_views(trainer, self.images)
            if run.seed not in self.predicted:  # all methods begin with the same network
                self.predicted[run.seed] = predicted_modes(trainer.network, views)
                free_memory(where)
            result = described(run, changes, where, alone=False) | {"images": self.images, "alpha": trainer.alpha}
            result |= {"spans": [], "ready_s": round(time.monotonic() - began, 2)}
            self._train(trainer, run, result, views)
        finally:
            trainer.close()
            del trainer
            free_memory(where)
        result["duration"] = round(time.monotonic() - began, 2)
        self.results[run] = {name: value for name, value in result.items() if name not in UNMEASURED}

    def _train(self, trainer: Trainer, run: RaceRun, result: Result, views: Tensor) -> None:
        trainer.objective.train()
        pairs, due = trainer.remaining_pairs(), checkpoints(run)
        for step in range(1, run.steps + 1):
            trainer.advance(pairs)
            if step in due or step % CHECK == 0:
                measure(trainer, run, result, step, None, step in due)
            if result["diverged"]:
                return
            if step in due:
                modes = learned_modes(trainer.network, views)
                result["spans"].append(shares(modes, self.predicted[run.seed], result["grown"][-1]))
        self.learned[run] = modes

    def compare(self) -> None:
        """Add shares at the least k of a seed's methods ("equal"), and overlaps of two methods or two seeds ("beside"):
        of their k leading modes, and of the smaller span with all modes in use of the larger ("in_all")."""
        ends = {run: self.results[run]["spans"][-1]["k"] for run in self.learned}
        for run, modes in self.learned.items():
            least = min(k for other, k in ends.items() if other.seed == run.seed)
            self.results[run] |= {"equal": shares(modes, self.predicted[run.seed], least), "beside": []}
        for first, second in combinations(self.learned, 2):
            small, large = sorted((first, second), key=ends.__getitem__)
            k = ends[small]
            if k and (first.seed == second.seed) != (first.method == second.method):
                widths = {"overlap": k, "in_all": ends[large]}
                found = {
                    name: round(subspace_alignment(self.learned[small][:, :k], self.learned[large][:, :width]), 4)
                    for name, width in widths.items()
                }
                self.results[second]["beside"].append({"method": first.method, "seed": first.seed, "k": k} | found)


def chosen_rate(results: dict[str, Result], data: str, loss: str, method: str, start: str) -> tuple[float, str]:
    """The learning rate that the race chose for this start, or that of its best short trial; without any, the same for
    the standard start, or the third of the grid. And which of these it is."""
    for where in dict.fromkeys((start, "standard")):
        races = [Race(Rules(data=data, start=where, methods=m), results) for m in (Rules.methods, COMPARED)]
        for race in races:
            if rate := race.chosen_rate(loss, method):
                return rate, where
        scores = {run.lr: races[0].score(run) or 0.0 for run in races[0].trials(loss, method)}
        if any(scores.values()):
            return max(scores, key=lambda lr: scores[lr]), where
    return METHODS[method].rates_for(loss)[2], "grid"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    store, raced = Store(options.out), Store(options.race).results()
    images = read_images(options.data_file, options.data) if options.data_file else named_images(options.data)
    if options.images > images.training:
        raise InputError("--images", f"must be at most {images.training}, the training images", options.images)
    images.offer()
    name, changes = _name(images, options.data), (TINY if options.tiny else {}) | {"probes": []}
    deadline = time.monotonic() + 60 * options.minutes
    for start, loss in product(options.starts, options.losses):
        rates = {m: chosen_rate(raced, options.data, loss, m, start) for m in COMPARED}
        lengths = {"lars": options.length, MUON: options.length // FIRST[0]}
        wanted = product(range(options.seeds), COMPARED)
        runs = [RaceRun("final", name, loss, m, rates[m][0], lengths[m], seed, start) for seed, m in wanted]
        keys = {run: f"{run.key(changes)}/{options.images}" for run in runs}
        if store.results().keys() >= set(keys.values()):
            continue
        seconds = sum(seconds_of(run, raced) for run in runs) + PREDICTING * options.seeds
        if time.monotonic() + seconds > deadline:
            print(f"{loss} from the {start} start may take {seconds:.0f} s and is left out", flush=True)
            continue
        group = Group(options.images)
        for run in runs:
            group.train(run, changes, options.device)
            print(f"{keys[run]}: {(group.results[run]['spans'] or ['diverged'])[-1]}", flush=True)
        group.compare()
        for run, result in group.results.items():
            store.add(result | {"key": keys[run], "rate_from": rates[run.method][1]})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=STORE.with_name("span.jsonl"))
    parser.add_argument("--race", type=Path, default=STORE, help="results of the race, for its learning rates")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-file", type=Path, nargs="+", help=".npz files of images")
    parser.add_argument("--losses", nargs="+", default=list(RACED), choices=RACED)
    parser.add_argument("--starts", nargs="+", default=list(STARTS), choices=STARTS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--images", type=int, default=512, help="two views of each are compared")
    parser.add_argument("--length", type=int, default=Rules.length, help="updates of LARS; Muon has a third of them")
    parser.add_argument("--minutes", type=float, default=1e6, help="start nothing that would not end in this time")
    parser.add_argument("--tiny", action="store_true", help="a narrow network, to try the script")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
