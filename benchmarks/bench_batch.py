"""Does a ResNet carry as many dimensions as its batch size allows?

    python benchmarks/bench_batch.py --images FILE.npz [--loss barlow_twins] [--steps 1500] [--batches 64,256,1024]

ResNet-18 from standard initialization on the images of FILE.npz (its first array of shape (N, H, W, 3), uint8), d = 50.
Predicted from the correlations of the last record, and from those of the run at the middle batch size; measured: modes
of variance above 0.1 and eigenvalues of C above ½. About 75 s a loss on one H200. The last line is JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import stairwise as sw
from stairwise.staircase.noise import carried_by, excess_noise, noise_of, noise_sentence
from stairwise.theory.batch_noise import VISIBLE, carried

SETTINGS = {
    "barlow_twins": {"loss_options": {"lambda_": 1.0, "batch_norm": False, "symmetric": True}, "lr": 0.4},
    "vicreg": {"loss_options": {}, "lr": 0.4},
    "simclr": {"loss_options": {"temperature": 0.2}, "lr": 0.4},
}


def recipe_for(data, loss, batch, steps):
    return sw.Recipe(
        data=data,
        views="barlow-small",
        encoder_options={"stem": "small"},
        d=50,
        loss=loss,
        optimizer="lars",
        lr_bias=0.01,
        weight_decay=1e-6,
        batch=batch,
        steps=steps,
        warmup_epochs=1.0,
        records=12,
        window=16_384,
        hidden_spectrum=False,
        **SETTINGS[loss],
    )


def measured_counts(record, loss):
    """SimCLR's embedding is scaled to E‖z‖² = d, Barlow Twins' constant counts as a mode."""
    d = len(record.covariance)
    size = d / record.covariance.sum() if loss == "simclr" else 1.0
    constant = loss == "barlow_twins" and record.mean_square > VISIBLE
    above_tenth = int((size * record.covariance > VISIBLE).sum()) + constant
    return [above_tenth, int((size * record.eigenvalues > 0.5).sum())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True)
    parser.add_argument("--loss", default="barlow_twins", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batches", default="64,256,1024")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    batches = [int(size) for size in given.batches.split(",")]
    options, found = SETTINGS[given.loss]["loss_options"], {}
    with tempfile.TemporaryDirectory() as folder:
        stored = np.load(given.images)
        images = next(stored[k] for k in stored.files if stored[k].ndim == 4)
        np.save(Path(folder) / "images.npy", images)
        for batch in batches:
            started = perf_counter()
            recipe = recipe_for(f"array:{folder}/images.npy", given.loss, batch, given.steps)
            run = sw.train(recipe, Path(folder) / str(batch), device=given.device)
            last = run.records[-1]
            own = carried_by(last, given.loss, options)
            found[batch] = {
                "measured": measured_counts(last, given.loss),
                "own": [own.above_tenth, own.above_half],
                "rho": own.rho,
                "excess": excess_noise(last, given.loss),
                "loss": last.loss,
                "noise": noise_of(last, given.loss, options),
                "sentence": noise_sentence(last, given.loss, options, last.loss),
                "seconds": perf_counter() - started,
            }
    middle = found[batches[len(batches) // 2]]
    for batch, one in found.items():
        there = carried(middle["rho"], batch, given.loss, 50, middle["excess"], **options)
        one["elsewhere"] = [there.above_tenth, there.above_half]
        shown = {k: one[k] for k in ("measured", "own", "elsewhere", "loss", "noise", "seconds")}
        print(batch, shown, one["sentence"])
    print(json.dumps({k: {n: np.asarray(v).tolist() for n, v in one.items()} for k, one in found.items()}))


if __name__ == "__main__":
    main()
