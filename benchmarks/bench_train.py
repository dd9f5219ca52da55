"""How fast is training, compared with the model alone, an eager loop, a torchvision loop and kornia?

    python benchmarks/bench_train.py [--device cuda] [--quick] [--steps 300]

ResNet-50, 96 px, Barlow Twins with the published views, LARS, bf16 autocast, channels-last; random smooth images.

  model     both passes, loss, backward and optimizer on precomputed views, as one CUDA graph
  ours      `stairwise train`: views, both passes, step, spectra of z (512) and h (2048), records
  eager     like `ours`, without CUDA graphs
  ordinary  Pillow + torchvision transforms in a DataLoader with all cores, eager step
  views     one view of one batch: by stairwise, by kornia if it is installed, by torchvision in one process

Rates are views per second, as medians over parts of the run. The last line is JSON.
"""

import argparse
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from stairwise.data.augment import PIPELINES, augment, to_layout
from stairwise.training.graph import Recorded
from stairwise.training.loop import Trainer
from stairwise.training.process import StopRequest
from stairwise.training.recipe import Recipe


def smooth_images(n, size):
    """Random colour gradients with noise, so that images are neither constant nor white noise."""
    rng = np.random.default_rng(0)
    coarse = torch.as_tensor(rng.random((n, 3, 6, 6), dtype=np.float32))
    fine = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1).numpy()
    noisy = np.clip(255 * fine + rng.normal(0, 6, fine.shape), 0, 255)
    return noisy.astype(np.uint8).transpose(0, 2, 3, 1)


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


class Reached(Exception):
    pass


def loop_rate(recipe, device, steps):
    """Views per second of `Trainer.run`: median over the intervals between records, which wait for the device."""
    every, moments = max(1, steps // 6), []  # records as frequent as in a run of a few thousand steps
    recipe = replace(recipe, steps=steps + 2 * every, records=(steps + 2 * every) // every, window=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(recipe, Path(folder), device)
        trainer.resume()

        def progress(step, total, words):
            if words:
                moments.append((step, perf_counter()))
                if step + every > total:
                    raise Reached  # no final checkpoint

        with suppress(Reached):
            trainer.run(StopRequest(), 1e9, progress)
    rates = [2 * recipe.batch * (b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(moments[2:])]
    return float(np.median(rates))


def model_rate(recipe, device, steps):
    """Views per second of the step on precomputed views."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(recipe, Path(folder), device)
        trainer.objective.train()
        x_a, x_b = trainer.material.pairs.fixed(torch.arange(recipe.batch))
        trainer.optimizer.lr.fill_(1e-4)
        if device.type == "cuda":
            trainer.take = Recorded(trainer.step)
        for _ in range(8):
            trainer.take(x_a, x_b, measure=False)
        rates = []
        for _ in range(5):
            sync(device)
            started = perf_counter()
            for _ in range(max(1, steps // 5)):
                trainer.take(x_a, x_b, measure=False)
            sync(device)
            rates.append(2 * recipe.batch * max(1, steps // 5) / (perf_counter() - started))
    return float(np.median(rates))


def torchvision_view(blur, solarize, size):
    from torchvision import transforms as T

    return T.Compose(
        [
            T.RandomResizedCrop(size, interpolation=T.InterpolationMode.BICUBIC),
            T.RandomHorizontalFlip(),
            T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            T.RandomGrayscale(0.2),
            T.RandomApply([T.GaussianBlur(9, (0.1, 2.0))], blur),
            T.RandomSolarize(128, solarize),
            T.ToTensor(),
            T.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )


class Pairs(torch.utils.data.Dataset):
    """Two torchvision views of an image."""

    def __init__(self, pixels):
        from PIL import Image

        size = pixels.shape[1]
        self.pixels, self.image = pixels, Image.fromarray
        self.a, self.b = torchvision_view(1.0, 0.0, size), torchvision_view(0.1, 0.2, size)

    def __len__(self):
        return 1 << 20

    def __getitem__(self, i):
        image = self.image(self.pixels[i % len(self.pixels)])
        return self.a(image), self.b(image)


def ordinary_rate(recipe, device, pixels, steps):
    """Views per second of an eager loop fed by torchvision in a DataLoader."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(replace(recipe, graph=False), Path(folder), device)
        trainer.objective.train()
        trainer.optimizer.lr.fill_(1e-4)
        loader = torch.utils.data.DataLoader(
            Pairs(pixels), recipe.batch, num_workers=os.cpu_count(), pin_memory=True, drop_last=True, prefetch_factor=4
        )
        started, done = 0.0, 0
        for i, (x_a, x_b) in enumerate(loader):
            if i == 4 * os.cpu_count():  # all prefetched batches are used up
                sync(device)
                started = perf_counter()
            sent = [x.to(device, non_blocking=True, memory_format=torch.channels_last) for x in (x_a, x_b)]
            trainer.step(*sent, measure=False)
            done += started > 0
            if done == steps:
                break
        sync(device)
        return 2 * recipe.batch * done / (perf_counter() - started)


def views_times(pixels, device, batch, rounds=20):
    """Seconds for one view of one batch by stairwise, kornia and torchvision (one process)."""
    images = to_layout(torch.as_tensor(pixels[:batch])).to(device)
    generator = torch.Generator(device).manual_seed(0)
    half = torch.full((3,), 0.5, device=device)
    size = pixels.shape[1]
    took = {}

    def timed(call):
        for _ in range(3):
            call()
        seconds = []
        for _ in range(rounds):
            sync(device)
            started = perf_counter()
            call()
            sync(device)
            seconds.append(perf_counter() - started)
        return float(np.median(seconds))

    view = PIPELINES["barlow"][0]
    took["ours"] = timed(lambda: augment(images, view, size, generator, half, half))
    if device.type == "cuda":
        # inside a CUDA graph, as in training
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            augment(images, view, size, generator, half, half)
        took["ours"] = timed(graph.replay)
    try:
        import kornia.augmentation as K

        chain = K.AugmentationSequential(
            K.RandomResizedCrop((size, size), scale=(0.08, 1.0), resample="bicubic"),
            K.RandomHorizontalFlip(),
            K.ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.8),
            K.RandomGrayscale(p=0.2),
            K.RandomGaussianBlur((9, 9), (0.1, 2.0), p=1.0),
            K.Normalize(half, half),
        ).to(device)
        planes = images.permute(0, 2, 1, 3).contiguous()
        took["kornia"] = timed(lambda: chain(planes.float() / 255))
    except ImportError as error:
        print(f"kornia is skipped: {error}")
    try:
        from PIL import Image

        transform = torchvision_view(1.0, 0.0, size)
        few = [Image.fromarray(p) for p in pixels[:64]]
        started = perf_counter()
        for image in few:
            transform(image)
        took["torchvision"] = (perf_counter() - started) * batch / len(few)
    except (ImportError, RuntimeError) as error:
        print(f"torchvision is skipped: {error}")
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a narrow network and small images, to try the script")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    device, steps = torch.device(options.device), options.steps
    size, batches = (32, (64, 16)) if options.quick else (96, (256, 64))
    pixels = smooth_images(2048, size)
    speed = {}
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "images.npy"
        np.save(stored, pixels)
        recipe = Recipe(
            data=f"array:{stored}", views="barlow", encoder="resnet50", hidden=[2048], d=512, optimizer="lars", lr=1e-3
        )
        if options.quick:
            recipe = replace(recipe, encoder_options={"width": 8}, d=16, hidden=[32])
        for batch in batches:
            mine = replace(recipe, batch=batch)
            speed[batch] = {
                "model": model_rate(mine, device, steps),
                "ours": loop_rate(mine, device, steps),
                "eager": loop_rate(replace(mine, graph=False), device, steps),
                "model again": model_rate(mine, device, steps),
            }
            stretched = replace(mine, precondition={"damping": 0.1})
            speed[batch]["model, preconditioned"] = model_rate(stretched, device, steps)
            if batch == batches[0]:
                try:
                    speed[batch]["ordinary"] = ordinary_rate(mine, device, pixels, max(4, steps // 4))
                except (ImportError, RuntimeError) as error:
                    print(f"the ordinary loop is skipped: {error}")
            for name, rate in speed[batch].items():
                print(
                    f"batch {batch:<4} {name:<22} {rate:>10,.0f} views/s {rate / (2 * batch):>8.1f} steps/s", flush=True
                )
        took = views_times(pixels, device, batches[0])
        for name, seconds in took.items():
            print(f"one view of {batches[0]} images  {name:<12} {1e3 * seconds:>8.2f} ms", flush=True)
    large, small = speed[batches[0]], speed[batches[1]]
    model = (large["model"] + large["model again"]) / 2
    summary = {
        "ours_of_model": large["ours"] / model,
        "graph_speedup_small_batch": small["ours"] / small["eager"],
        "precondition_cost": model / large["model, preconditioned"] - 1,
    }
    if "ordinary" in large:
        summary["ours_over_ordinary"] = large["ours"] / large["ordinary"]
    summary |= {f"views_{name}_over_ours": took[name] / took["ours"] for name in took if name != "ours"}
    print(json.dumps({name: round(value, 4) for name, value in summary.items()}))


if __name__ == "__main__":
    main()
