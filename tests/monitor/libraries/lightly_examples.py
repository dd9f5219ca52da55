"""The Lightning examples of lightly 1.6.0: all 30 that run with it."""

from tests.monitor.libraries import lightly_pairs as pairs
from tests.monitor.libraries import lightly_tokens as tokens
from tests.monitor.libraries.harness import Case
from tests.monitor.libraries.images import SIZE, SMALL, crops


def views(*sizes):
    """Batches as lightly's collate function makes them: views, labels, file names."""
    return lambda step: [crops(*sizes, seed=step), None, None]


TWO, FOUR, ONE = views(SIZE, SIZE), views(SIZE, SIZE, SIZE, SIZE), views(SIZE)
MULTI = views(SIZE, SIZE, SMALL, SMALL)
TEACHER = {"z": "student_head", "h": "student_backbone"}
KEY = {"z": ("projection_head", "projection_head_momentum"), "views": "query and key"}
SINGLE = {"z": None, "h": None}


def anchors(args, _):
    """The first view among the joined anchors, and the target."""
    anchors, targets = args[:2]
    return anchors[: len(targets)], targets


ANCHOR = {
    "z": ("anchor_projection_head", "projection_head"),
    "views": "anchor and target",
    "h": None,
    "instead": {"loss": "criterion", "views": anchors},
}

# name: module, batches, first digits of the commit that was read, what differs from the defaults
_EXAMPLES = {
    "aim": (tokens.AIM, ONE, "01c349c", SINGLE),
    "barlowtwins": (pairs.barlow_twins, TWO, "fdf819c", {}),
    "byol": (pairs.BYOL, TWO, "1360295", {}),
    "capi": (tokens.CAPI, ONE, "fbb3797", SINGLE),
    "dcl": (pairs.dcl, TWO, "03464db", {}),
    "densecl": (pairs.DenseCL, TWO, "06f3da3", {"z": "projection_head_global", "views": "query and key"}),
    "detcon": (pairs.DetCon, TWO, "dbf9608", {}),
    "dino": (pairs.DINO, MULTI, "03464db", TEACHER),
    "dinov2": (tokens.DINOv2, MULTI, "0978245", {"z": "student_head.dino_head", "h": None, "joined": True}),
    "fastsiam": (pairs.FastSiam, FOUR, "2f00e77", {}),
    "fda": (pairs.simclr, TWO, "dbf9608", {}),
    "frossl": (pairs.FroSSL, TWO, "9b333a3", {}),
    "ibot": (tokens.IBOT, MULTI, "1ef6143", {"z": "student_head", "h": None, "joined": True}),
    "lejepa": (tokens.LeJEPA, MULTI, "fa733d4", {}),
    "mae": (tokens.MAE, ONE, "00c8aae", SINGLE),
    "mmcr": (pairs.MMCR, FOUR, "1403ff9", {}),
    "moco": (pairs.MoCo, TWO, "0e4125d", KEY),
    "msn": (tokens.MSN, MULTI, "07fdae4", ANCHOR),
    "nnclr": (pairs.NNCLR, TWO, "26bd765", {}),
    "pixio": (tokens.PIXIO, ONE, "2bd75d0", SINGLE),
    "pmsn": (tokens.pmsn, MULTI, "053327d", ANCHOR),
    "simclr": (pairs.simclr, TWO, "1d55c26", {}),
    "simmim": (tokens.SimMIM, ONE, "07fdae4", SINGLE),
    "simsiam": (pairs.SimSiam, TWO, "1cf7db3", {}),
    "smog": (pairs.SMoG, TWO, "1a67d05", KEY | {"instead": {}, "h": None}),
    "swav": (pairs.SwaV, MULTI, "0cc079b", {}),
    "swav_queue": (pairs.SwaVQueue, MULTI, "1186ddd", {}),
    "tico": (pairs.tico, TWO, "03464db", KEY),
    "vicreg": (pairs.vicreg, TWO, "32c2b47", {}),
    "vicregl": (pairs.VICRegL, MULTI, "7984654", {}),
}
EXAMPLES = {
    name: Case(build, batch, f"lightly-ai/lightly examples/pytorch_lightning/{name}.py {commit}", **differing)
    for name, (build, batch, commit, differing) in _EXAMPLES.items()
}
