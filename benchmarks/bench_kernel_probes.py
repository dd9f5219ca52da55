"""How well do probes classify images from kernel embeddings that were computed without labels, and in what time?

    python -m benchmarks.bench_kernel_probes --quick            # photographs, half a minute on a CPU
    python -m benchmarks.bench_kernel_probes --data-file A.npz B.npz --device cuda --out docs/results/kernel_probes.json
    python -m benchmarks.bench_kernel_probes --page             # writes the table of docs/kernel-scale.md

`KernelSSL` is fitted to two augmented views of training images, and embeds the whole image of labelled and test images.
Embeddings of pixels: RBF kernel exactly, with landmarks and with random features; tangent kernel of a convolutional
network (5 layers, global average pooling) with as many landmarks as its measured time per entry allows, beside an RBF
kernel with as many. Embeddings of the 512 features of a ResNet-18, trained without labels for a minute: linear and RBF.
"no kernel" is the probe of pixels or features themselves. Seconds are of the fit (kernel and modes) and of embedding
the labelled and test images. Compiling, warming up, training and probes are not counted. If modes are below the
rounding error of float32, d is halved. Files are those that benchmarks/race reads. The last line is JSON.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import stairwise as sw
from benchmarks.clock import timed
from benchmarks.corpus.page import filled, markdown
from benchmarks.race.images import RaceImages, named_images, read_images
from benchmarks.speedrun import recipe_of
from stairwise.checks import InputError
from stairwise.data.augment import full_view
from stairwise.data.images import Images, load
from stairwise.data.pairs import view_pairs
from stairwise.distributed import choose_device
from stairwise.evaluate.classifiers import knn_probe, logistic_probe
from stairwise.evaluate.representations import eval_mode
from stairwise.kernel.kernels import conv_ntk, rbf
from stairwise.training.networks import load_network

STORED, PAGE = Path("docs/results/kernel_probes.json"), Path("docs/kernel-scale.md")
NOTHING = "*Not run yet.*"
VIEWS = "simclr-small"
MOST_LANDMARKS = 2000  # of the convolutional kernel
WARM = 800  # images of a first call, which compiles; enough for tiles of full size
SIDE = 40  # landmarks are a multiple of the side of these tiles, so that nothing is compiled again
# settings of the ResNet-18 whose features are used
NETWORK = {"loss": "simclr", "views": "simclr-small-wide", "hidden": [512], "d": 128, "batch": 256, "lr": 0.08}
NETWORK |= {"head_norm": False, "head_bias": True}


@dataclass(frozen=True)
class Sizes:
    """Pairs of views, pairs for the convolutional kernel, labelled and test images, dimensions, landmarks or features.

    `tuned`: what changes in the recipe of the ResNet-18.
    """

    pairs: int = 50_000
    few: int = 10_000
    labelled: int = 50_000
    test: int = 10_000
    d: int = 128
    width: int = 5000
    depth: int = 5
    head: str = "gap"
    memory: int = 30 << 30  # less than K̃ of 100,000 points takes, so that tiles are used
    tuned: tuple = (("steps", 4000),)


QUICK = Sizes(
    150, 60, 300, 100, 8, 60, 3, "flatten", 1 << 30, (("encoder_options.width", 8), ("steps", 12), ("batch", 32))
)


@dataclass(frozen=True)
class Sets:
    """Rows of two views, of labelled images and of test images, (n, features) each, and their classes."""

    a: torch.Tensor
    b: torch.Tensor
    x: torch.Tensor
    x_test: torch.Tensor
    y: torch.Tensor
    y_test: torch.Tensor

    def first(self, pairs):
        return replace(self, a=self.a[:pairs], b=self.b[:pairs])

    def through(self, call):
        """The same with rows replaced, in batches."""

        def moved(x):
            return torch.cat([call(part) for part in x.split(1000)])

        return replace(self, a=moved(self.a), b=moved(self.b), x=moved(self.x), x_test=moved(self.x_test))


def pixel_sets(images, sizes, device):
    """Pixels as rows (height, width, channels)."""
    pairs = view_pairs(Images("probes", images.pixels, images.labels), VIEWS, 0, 0, device, training=images.training)
    last = min(sizes.pairs, images.training)
    both = zip(*pairs.fixed_batches(torch.arange(last), 1000), strict=True)

    def whole(first, last):
        parts = torch.arange(first, min(last, len(images.labels))).split(1000)
        return torch.cat(
            [full_view(pairs.feed.take(rows), pairs.size, pairs.mean, pairs.std).float() for rows in parts]
        )

    end = images.training + sizes.test
    sets = Sets(
        *(torch.cat(one) for one in both), whole(0, last_of(images, sizes)), whole(images.training, end), None, None
    )
    labels = torch.as_tensor(images.labels, device=device)
    sets = replace(sets, y=labels[: len(sets.x)], y_test=labels[images.training : end])
    return sets.through(lambda x: x.permute(0, 2, 3, 1).flatten(1))


def last_of(images, sizes):
    return min(sizes.labelled, images.training)


def probed(x, x_test, sets):
    """Accuracies of both probes in per cent."""
    scores = {"logistic": logistic_probe(x, sets.y, x_test, sets.y_test)}
    scores["knn"] = knn_probe(x, sets.y, x_test, sets.y_test, k=min(200, max(1, len(x) // 10)))
    return {name: round(100 * score, 2) for name, score in scores.items()}


def fitted(est, sets, device):
    """Seconds of the fit, and the estimator; d is halved until all modes are above rounding error."""
    while True:
        try:
            return timed(lambda: est.fit(sets.a, X_b=sets.b), device)
        except InputError as error:
            if est.n_components == 1 or not str(error).startswith("n_components "):
                raise
            est.set_params(n_components=est.n_components // 2)


def row(of, kernel, method, sets, device, est=None):
    """A line of the table; without an estimator, of the rows themselves."""
    line = {"of": of, "kernel": kernel, "method": method, "pairs": len(sets.a) if est else 0, "d": sets.x.shape[1]}
    if est is None:
        return shown(line | {"fit_s": 0.0, "embed_s": 0.0} | probed(sets.x, sets.x_test, sets))
    fit_s, est = fitted(est, sets, device)
    embed_s, (z, z_test) = timed(lambda: [est.transform(x) for x in (sets.x, sets.x_test)], device)
    seconds = {"d": est.n_components, "fit_s": float(f"{fit_s:.3g}"), "embed_s": float(f"{embed_s:.3g}")}
    return shown(line | seconds | probed(z, z_test, sets))


def shown(line):
    print(
        f"{line['of']:<10}{line['kernel']:<10}{line['method']:<24}{line['pairs']:>7,}{line['d']:>6}"
        f"{line['fit_s']:>9.4g} s{line['embed_s']:>9.4g} s{line['logistic']:>9.2f} %{line['knn']:>9.2f} %",
        flush=True,
    )
    return line


def conv_landmarks(kernel, sets, seconds, device):
    """Milliseconds per entry, measured after compiling, and the number of landmarks that `seconds` allow."""
    some = sets.a[: min(WARM, len(sets.a))]
    kernel(some, some.clone())
    took, _ = timed(lambda: kernel(some, some.clone()), device)
    each = took / len(some) ** 2
    rows = 2 * len(sets.a) + len(sets.x) + len(sets.x_test)
    count = int(np.clip(seconds / (each * rows), 50, min(MOST_LANDMARKS, 2 * len(sets.a))))
    count -= count % SIDE if count > SIDE else 0
    kernel(sets.a[:count].double(), sets.a[:count].double())  # warms up for the landmarks, which are in float64
    return 1e3 * each, count


def of_pixels(sets, sizes, device):
    """Lines of RBF kernels of pixels."""
    common = {"dtype": "float32", "memory": sizes.memory}
    nystroem = common | {"method": "nystroem", "n_features": sizes.width}
    few = sets.first(100)
    for method in ("exact", "nystroem", "features"):  # warm up
        sw.KernelSSL(2, method=method, n_features=50, dtype="float32").fit(few.a, X_b=few.b).transform(few.x)
    lines = [
        row("pixels", "no kernel", "", sets, device),
        row("pixels", "RBF", "exact", sets, device, sw.KernelSSL(sizes.d, method="exact", **common)),
        row("pixels", "RBF", f"{sizes.width} landmarks", sets, device, sw.KernelSSL(sizes.d, **nystroem)),
    ]
    features = sw.KernelSSL(sizes.d, **nystroem | {"method": "features"})
    return [*lines, row("pixels", "RBF", f"{sizes.width} random features", sets, device, features)]


def of_convolutions(sets, sizes, seconds, device):
    """Lines of a convolutional tangent kernel and of an RBF kernel with as many landmarks; facts about the former."""
    kernel, some = conv_ntk(sizes.depth, strides=(1, 2, 2), head=sizes.head), sets.first(sizes.few)
    each, count = conv_landmarks(kernel, some, seconds, device)
    settings = {"dtype": "float32", "memory": sizes.memory, "method": "nystroem", "n_features": count}
    lines = []
    for name, one in (("conv NTK", kernel), ("RBF", rbf())):
        est = sw.KernelSSL(sizes.d, kernel=one, **settings)
        lines.append(row("pixels", name, f"{count} landmarks", some, device, est))
    return lines, {"conv_ms_per_entry": float(f"{each:.3g}"), "conv_depth": sizes.depth, "conv_head": sizes.head}


def of_network(sets, images, sizes, device):
    """Lines of the features of a trained network, and seconds of its training."""
    images.offer()
    recipe = recipe_of("85", 0, False, {"probes": [], "held_out": 0, **dict(sizes.tuned)}, NETWORK)
    if device.type == "cpu":
        recipe = recipe.with_settings({"precision": "float32"})
    side, channels = images.pixels.shape[1], images.pixels.shape[3]
    with tempfile.TemporaryDirectory() as folder:
        seconds, run = timed(lambda: sw.train(recipe, folder, device=str(device)), device)
        network = load_network(run).to(device)
    with eval_mode(network):
        sets = sets.through(lambda x: network(x.reshape(-1, side, side, channels).permute(0, 3, 1, 2))[0].float())
    common = {"dtype": "float32", "memory": sizes.memory}
    d, width = min(sizes.d, sets.x.shape[1]), sizes.width
    nystroem = sw.KernelSSL(d, method="nystroem", n_features=width, **common)
    lines = [
        row("network", "no kernel", "", sets, device),
        row("network", "linear", "exact", sets, device, sw.KernelSSL(d, kernel="linear", **common)),
        row("network", "RBF", f"{width} landmarks", sets, device, nystroem),
    ]
    return lines, {"train_s": float(f"{seconds:.3g}"), "train_steps": recipe.steps}


def measure(images, sizes, seconds, device, keep=lambda found: None):
    """All lines and facts; `keep` gets what there is after each part."""
    sets = pixel_sets(images, sizes, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found = {"device": where, "data": images.name, "labelled": len(sets.x), "test": len(sets.x_test), "views": VIEWS}
    print(f"{'':<44}{'pairs':>7}{'d':>6}{'fit':>11}{'embedding':>11}{'logistic':>11}{'kNN':>11}")
    rows = of_pixels(sets, sizes, device)
    keep(found | {"rows": rows})
    parts = [lambda: of_network(sets, images, sizes, device), lambda: of_convolutions(sets, sizes, seconds, device)]
    for part in parts:
        lines, facts = part()
        rows, found = rows + lines, found | facts
        keep(found | {"rows": rows})
    return found | {"rows": rows}


def table(stored):
    """The table of the page."""
    if not stored.exists():
        return NOTHING
    found = json.loads(stored.read_text(encoding="utf-8"))
    head = ["of", "kernel", "method", "pairs", "d", "fit", "embedding", "logistic probe", "kNN"]
    lines = [
        [
            *(line["of"], line["kernel"], line["method"], f"{line['pairs']:,}" if line["pairs"] else "", line["d"]),
            *(f"{line[name]:.3g} s" if line["pairs"] else "" for name in ("fit_s", "embed_s")),
            *(f"{line[name]:.1f} %" for name in ("logistic", "knn")),
        ]
        for line in found["rows"]
    ]
    words = [f"{found['device']}; {found['labelled']:,} labelled and {found['test']:,} test images of {found['data']}."]
    if "train_s" in found:
        words.append(f"The network was trained for {found['train_s']:.0f} s ({found['train_steps']} steps).")
    if "conv_ms_per_entry" in found:
        words.append(f"An entry of the convolutional kernel took {found['conv_ms_per_entry']} ms.")
    return markdown([head, *lines]) + "\n\n" + " ".join(words)


def photographs():
    """Tiles of two photographs in random order, four fifths of them to train on."""
    photos = load("photos")
    order = np.random.default_rng(0).permutation(len(photos.pixels))
    return RaceImages("photos", photos.pixels[order], photos.labels[order].astype(np.int64), 4 * len(order) // 5)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="a dataset with labels and a test set")
    parser.add_argument("--data-file", type=Path, nargs="+", help="instead of --data")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="few images, small networks, for a CPU")
    parser.add_argument("--seconds", type=float, default=90.0, help="of the convolutional kernel, about")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    for name in ("pairs", "few", "labelled", "test", "d", "width"):
        parser.add_argument(f"--{name}", type=int, help="of `Sizes`")
    parser.add_argument("--steps", type=int, help="of the training of the network")
    parser.add_argument("--page", action="store_true", help="write the table of the page from the stored JSON")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), {"probes": table(STORED)}), encoding="utf-8")
        return
    if options.data_file:
        images = read_images(options.data_file, "CIFAR-10" if "cifar10" in options.data_file[0].stem else "")
    else:
        images = photographs() if options.quick else named_images(options.data)
    device = choose_device("cpu" if options.quick else options.device)

    def keep(found):
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    sizes = QUICK if options.quick else Sizes()
    given = {name: getattr(options, name) for name in ("pairs", "few", "labelled", "test", "d", "width")}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    if options.steps:
        sizes = replace(sizes, tuned=(*sizes.tuned, ("steps", options.steps)))
    print(json.dumps(measure(images, sizes, options.seconds, device, keep)))


if __name__ == "__main__":
    main()
