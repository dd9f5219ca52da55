"""Two encoders, trained differently and frozen, are brought into one space from a few thousand pairs, without training.

    python examples/align_two_encoders.py [--data cifar10] [--steps 400] [--pairs 3000] [--out aligned]

Trains two small networks without labels (VICReg and SimCLR, different layers and widths; their features are kept in
--out, and a second run reads them), then aligns their features of images that neither has seen: given the features of
an image by the one, find the same image among those of the other. Compared: `KernelSSL` with a kernel for each encoder,
CCA of scikit-learn, and two linear maps trained with CLIP's loss.
"""

import argparse
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cross_decomposition import CCA
from torch import nn

import stairwise as sw
from stairwise.data.images import load
from stairwise.data.pairs import view_pairs

HELD_OUT = 2000  # images among which the right one is looked for


def encoder(widths, size):
    layers, inputs = [], 3
    for width in widths:
        layers += [nn.Conv2d(inputs, width, size, 2, size // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


ENCODERS = {
    "vicreg": (lambda: encoder((32, 64, 192), 3), 192, sw.losses.VICReg(), "barlow-small"),
    "simclr": (lambda: encoder((24, 48, 96, 128), 5), 128, sw.losses.SimCLR(), "simclr-small"),
}


def features(name, images, train, steps, seed):
    """Train an encoder on the first `train` images; its features of all others."""
    make, width, loss, views = ENCODERS[name]
    torch.manual_seed(seed)
    pairs = view_pairs(images, views, seed=seed, training=train)
    backbone, projector = (
        make(),
        nn.Sequential(nn.Linear(width, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64)),
    )
    optimizer = torch.optim.AdamW([*backbone.parameters(), *projector.parameters()], lr=2e-3, weight_decay=1e-4)
    rows = (torch.randint(train, (256,)) for _ in range(steps))
    for step, (a, b) in enumerate(pairs.stream(rows, 0)):
        value = loss(projector(backbone(a)), projector(backbone(b)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{name}: step {step}, loss {value.item():.3f}", flush=True)
    plain = view_pairs(images, "none", seed=seed, mean=tuple(pairs.mean.tolist()), std=tuple(pairs.std.tolist()))
    backbone.eval()
    with torch.no_grad():
        batches = plain.fixed_batches(torch.arange(train, len(images.pixels)))
        return torch.cat([backbone(x) for x, _ in batches]).numpy().astype(np.float64)


def whitened(train, *others, keep=0.999):
    """Principal components with equal variance, as CCA has them too; directions of little variance are left out."""
    mean = train.mean(0)
    _, s, vt = np.linalg.svd(train - mean, full_matrices=False)
    r = int(np.searchsorted(np.cumsum(s**2) / np.sum(s**2), keep)) + 1
    scale = vt[:r].T / s[:r] * len(train) ** 0.5
    return [(x - mean) @ scale for x in (train, *others)]


def found(z_a, z_b, ranks=(1, 5, 10)):
    """Share of rows of z_a whose own row of z_b is among the nearest by cosine."""
    z_a, z_b = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_a, z_b))
    cosine = z_a @ z_b.T
    place = (cosine > np.diag(cosine)[:, None]).sum(1)
    return [float((place < rank).mean()) for rank in ranks]


def kernel(name, method="auto"):
    def fit(a, b, d):
        est = sw.KernelSSL(d, kernel=(name, name), method=method).fit(a, X_b=b)
        return lambda x: est.transform(x, view="a"), lambda x: est.transform(x, view="b"), est.eigenvalues_

    return fit


def cca(a, b, d):
    model = CCA(d, scale=False, max_iter=2000, tol=1e-4).fit(a, b)
    z_a, z_b = model.transform(a, b)
    shared = np.abs((z_a * z_b).mean(0)) / (z_a.std(0) * z_b.std(0))
    return model.transform, lambda x: (x - b.mean(0)) @ model.y_rotations_, shared


def clip(a, b, d, steps):
    """Two linear maps, CLIP's symmetric cross-entropy with a learned temperature."""
    torch.manual_seed(0)
    maps = [nn.Linear(x.shape[1], d, bias=False) for x in (a, b)]
    temperature = nn.Parameter(torch.tensor(np.log(10.0)))
    views = [torch.tensor(x, dtype=torch.float32) for x in (a, b)]
    optimizer = torch.optim.AdamW(
        [*maps[0].parameters(), *maps[1].parameters(), temperature], lr=1e-3, weight_decay=0.01
    )
    for _ in range(steps):
        rows = torch.randint(len(a), (512,))
        z = [F.normalize(m(x[rows]), dim=1) for m, x in zip(maps, views, strict=True)]
        logits = temperature.exp() * z[0] @ z[1].T
        target = torch.arange(len(rows))
        loss = F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads = (lambda x, m=m: m(torch.tensor(x, dtype=torch.float32)).detach().numpy() for m in maps)
    return *heads, np.ones(d)


def chosen_power(fit, a, b, d):
    """Power of the modes' strengths that finds most of a sixth of the pairs when the others are fitted."""
    some = len(a) // 6
    to_a, to_b, strength = fit(a[some:], b[some:], d)
    z_a, z_b = to_a(a[:some]), to_b(b[:some])
    return max(POWERS, key=lambda power: found(z_a * strength**power, z_b * strength**power)[0])


POWERS = (0.0, 0.5, 1.0, 2.0, 4.0)  # modes weigh by how much the encoders share of them
METHODS = {
    "KernelSSL, linear kernels": kernel("linear", "features"),  # Γ of the features, exactly
    "KernelSSL, RBF kernels": kernel("rbf"),
    "CCA (scikit-learn)": cca,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="as for `stairwise embed`: cifar10, array:FILE.npy, a folder")
    parser.add_argument("--train", type=int, default=0, help="images for the encoders; default: all but 10,000")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--clip-steps", type=int, default=2000)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of pairs")
    parser.add_argument("--out", type=Path, default=Path("aligned"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    both = []
    for seed, name in enumerate(ENCODERS):
        file = options.out / f"{name}.npy"
        if not file.exists():
            images = load(options.data)
            train = options.train or len(images.pixels) - 10_000
            np.save(file, features(name, images, train, options.steps, seed))
        both.append(np.load(file))
    order, n = np.random.default_rng(options.seed).permutation(len(both[0])), options.pairs
    both = [x[order] for x in both]
    parts = [whitened(x[:n], x[n : n + HELD_OUT]) for x in both]
    (a, a_new), (b, b_new) = parts
    print(f"{n} pairs, {a.shape[1]} and {b.shape[1]} features, {len(a_new)} images to choose from")
    print(f"{'':28}{'nearest':>9}{'nearest 5':>11}{'nearest 10':>12}{'seconds':>9}")
    d = min(options.dimension, a.shape[1], b.shape[1])
    trained = {"linear maps, CLIP's loss": partial(clip, steps=options.clip_steps)}
    for name, fit in (METHODS | trained).items():
        try:
            power = chosen_power(fit, a, b, d) if name in METHODS else 0.0
            started = perf_counter()
            to_a, to_b, strength = fit(a, b, d)
            seconds = perf_counter() - started
        except np.linalg.LinAlgError as error:  # scikit-learn's CCA sometimes fails on what its deflation leaves
            print(f"{name:28}  failed: {error}", flush=True)
            continue
        one, five, ten = found(to_a(a_new) * strength**power, to_b(b_new) * strength**power)
        print(f"{name:28}{one:>9.3f}{five:>11.3f}{ten:>12.3f}{seconds:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
