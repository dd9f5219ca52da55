"""What `shapes` is written after, and which line is documented for it."""

from functools import partial

import torch

from stairwise.losses import SimCLR, VICReg
from tests.monitor.libraries import shapes
from tests.monitor.libraries.harness import Case
from tests.monitor.libraries.images import SIZE, SMALL, N, crops


def solo(*sizes):
    return lambda step: [torch.arange(N), crops(*sizes, seed=step), torch.arange(N) % 4]


def dicts(step):
    return [{"image": x} for x in crops(SIZE, SIZE, seed=step)]


def two(step):
    return crops(SIZE, SIZE, seed=step)


TWO, MULTI = solo(SIZE, SIZE), solo(SIZE, SIZE, SMALL, SMALL)
SOLO = "vturrisi/solo-learn solo/methods/"
STABLE = "galilai-group/stable-pretraining stable_pretraining/forward.py 5ce73d6"
STUDENT = {"z": "projector.student", "h": "backbone.student"}
PROJECTOR = {"z": "projector"}
INSIDE = {"projector": "module.projector", "backbone": "module.backbone"}
MODULE = {"z": "module.projector", "h": "module.backbone"}
LOSS = {"loss": "criterion", "backbone": "backbone"}

IN_LIGHTNING = {
    ("solo-learn", "Barlow Twins"): Case(shapes.Solo, TWO, SOLO + "barlow_twins.py 14be766", **PROJECTOR),
    ("solo-learn", "multi-crop"): Case(shapes.Solo, MULTI, SOLO + "base.py c980e9e", **PROJECTOR),
    ("solo-learn", "BYOL"): Case(shapes.SoloBYOL, TWO, SOLO + "byol.py 12f8477", **PROJECTOR),
    ("solo-learn", "DINO"): Case(shapes.SoloDINO, TWO, SOLO + "dino.py e384184", z="head"),
    ("stable-pretraining", "Barlow Twins"): Case(
        partial(shapes.Stable, "barlow_loss", shapes.BarlowLoss()), dicts, STABLE, **PROJECTOR
    ),
    ("stable-pretraining", "VICReg"): Case(partial(shapes.Stable, "vicreg_loss", VICReg()), dicts, STABLE, **PROJECTOR),
    ("stable-pretraining", "SimCLR"): Case(partial(shapes.Stable, "simclr_loss", SimCLR()), dicts, STABLE, **PROJECTOR),
    ("stable-pretraining", "BYOL"): Case(shapes.StableBYOL, dicts, STABLE, **STUDENT),
}
UNDER_DDP = {
    ("Meta's barlowtwins", "main.py"): Case(
        shapes.MetaBarlowTwins, two, "facebookresearch/barlowtwins main.py 046eec3", INSIDE, **MODULE
    ),
    ("Meta's vicreg", "main_vicreg.py"): Case(
        shapes.MetaVICReg, two, "facebookresearch/vicreg main_vicreg.py 08c8c0c", INSIDE, **MODULE
    ),
}
IN_PLAIN_LOOPS = {
    ("plain torch", "the loss is a module"): Case(shapes.OwnLoop, two, "examples/plain_torch.py", LOSS, **PROJECTOR),
    ("plain torch", "the loss is a function"): Case(
        shapes.OwnFunction, two, "examples/plain_torch.py", z="projector", h=None, by_hand=True
    ),
    ("Meta's moco", "builder.py"): Case(
        shapes.MoCo,
        two,
        "facebookresearch/moco moco/builder.py 4397a04",
        {"loss": "criterion"},
        z=("query", "key"),
        h=None,
        views="query and key",
        instead={},
    ),
    ("GradCache", "grad_cache.py"): Case(
        shapes.GradCache, two, "luyug/GradCache src/grad_cache/grad_cache.py 6b3291a", LOSS, **PROJECTOR, parts=2
    ),
    ("timm 1.0", "backbone(x)"): Case(shapes.Timm, two, "timm 1.0.30", LOSS, **PROJECTOR),
    ("timm 1.0", "backbone.forward_features(x)"): Case(
        partial(shapes.Timm, features=True), two, "timm 1.0.30", LOSS, z="projector", h=None
    ),
}
IN_HUGGING_FACE = {
    ("Hugging Face", "Trainer"): Case(shapes.HuggingFace, two, "transformers 5.22.2", **PROJECTOR),
}
