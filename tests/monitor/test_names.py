"""Loss, projector and backbone found by their names, as libraries name them."""

import pytest
import torch
from torch import nn

from stairwise.monitor.hooks import Attachment
from stairwise.monitor.names import found_projectors, named
from stairwise.monitor.spectrum import SpectrumMonitor

NOTHING = {"loss": None, "projector": None, "backbone": None}


def model(*names):
    """A model with submodules of these names."""
    root = nn.Module()
    for name in names:
        parent = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                setattr(parent, part, nn.Module())
            parent = getattr(parent, part)
        setattr(parent, last, nn.Linear(2, 2))
    return root


@pytest.mark.parametrize(
    ("names", "projector", "backbone"),
    [
        (("backbone", "projection_head", "criterion"), "projection_head", "backbone"),
        (("backbone", "head", "projector"), "projector", "backbone"),
        (
            ("projection_head_momentum", "backbone_momentum", "backbone", "projection_head"),
            "projection_head",
            "backbone",
        ),
        (("teacher_head", "student_head", "teacher_backbone", "student_backbone"), "student_head", "student_backbone"),
        (("prediction_head", "projection_head", "encoder"), "projection_head", "encoder"),
        (
            ("backbone.student", "backbone.teacher", "projector.teacher", "projector.student"),
            "projector.student",
            "backbone.student",
        ),
        (("backbone.head", "backbone.conv", "predictor"), None, "backbone"),
        (("encoder", "proj", "ntxent"), "proj", "encoder"),
        (("encoder", "projection"), "projection", "encoder"),
        (("model.encoder", "model.proj"), "model.proj", "model.encoder"),
        (("encoder", "q_proj"), None, "encoder"),
        (("backbone.patch_embed.proj", "vit.patch_embed.proj"), None, "backbone"),
        (("model.backbone", "model.projector"), "model.projector", "model.backbone"),
    ],
)
def test_names_of_libraries(names, projector, backbone):
    root = model(*names)
    assert next(iter(found_projectors(root)), None) == projector
    modules = named(root, NOTHING, "SpectrumCallback")
    assert modules.backbone is root.get_submodule(backbone)
    assert modules.automatic
    assert modules.lines.projector.startswith(f'SpectrumCallback(projector="{projector or "NAME"}", …)')


@pytest.mark.parametrize("name", ["criterion", "loss", "loss_fn", "barlow_loss", "dino_criterion", "criterion_global"])
def test_losses(name):
    root = model("backbone", name)
    assert named(root, NOTHING, "SpectrumCallback").loss is getattr(root, name)


def test_what_is_named_is_not_searched_for():
    root = model("backbone", "projector", "criterion", "mine")
    modules = named(root, NOTHING | {"projector": "mine"}, "SpectrumCallback")
    assert (modules.loss, modules.projectors, modules.backbone) == (None, {"mine": root.mine}, None)
    assert not modules.automatic
    modules = named(root, NOTHING | {"backbone": "mine"}, "SpectrumCallback")
    assert (modules.loss, modules.backbone, modules.automatic) == (root.criterion, root.mine, True)


def test_a_model_whose_names_say_nothing():
    """The warning names the line to use, and the modules to choose from."""
    root = model("net", "map", "ntxent")
    watch = Attachment(SpectrumMonitor(), named(root, NOTHING, "SpectrumCallback"), None, None, 5, False)
    root.ntxent(root.map(root.net(torch.ones(3, 2))))
    watch.close()
    [said] = watch.tell.said
    assert "no loss or projector was found by name: use SpectrumCallback(projector=" in said
    assert "one of ['net', 'map', 'ntxent']" in said
