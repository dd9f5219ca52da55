"""Modules of the shape of other libraries' and repositories': their names, and which modules they call how often.

Networks and losses are small and our own; the sources are named in `SHAPES`.
"""

from copy import deepcopy

import pytorch_lightning as pl
import timm
import torch
from torch import nn
from torch.nn import functional as F

from stairwise.losses import SimCLR, VICReg, barlow_twins, vicreg
from tests.monitor.libraries.images import FEATURES, D, backbone


def encoder():
    return nn.Sequential(backbone(), nn.Flatten())


def mlp(features=FEATURES):
    return nn.Sequential(nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, D))


def frozen(module):
    return deepcopy(module).requires_grad_(False)


def towards(p, z):
    return -F.cosine_similarity(p, z, dim=1).mean()


# solo-learn


class Solo(pl.LightningModule):
    """Losses are functions. A classifier learns from detached features; batches are (indices, crops, labels)."""

    def __init__(self):
        super().__init__()
        self.backbone, self.classifier, self.projector = encoder(), nn.Linear(FEATURES, 4), mlp()

    def forward(self, x):
        features = self.backbone(x)
        return {"feats": features, "logits": self.classifier(features.detach()), "z": self.projector(features)}

    def training_step(self, batch, _):
        _, crops, labels = batch
        outputs = [self(x) for x in crops[:2]]
        wrong = sum(F.cross_entropy(out["logits"], labels) for out in outputs) / 2
        small = [self.projector(self.backbone(x)) for x in crops[2:]]
        return wrong + self.loss([out["z"] for out in outputs], small, crops)

    def loss(self, z, small, crops):
        return barlow_twins(*z) + sum(F.mse_loss(s, z[0].detach()) for s in small)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class SoloBYOL(Solo):
    def __init__(self):
        super().__init__()
        self.predictor = nn.Linear(D, D)
        self.momentum_backbone, self.momentum_projector = frozen(self.backbone), frozen(self.projector)

    def loss(self, z, small, crops):
        with torch.no_grad():
            targets = [self.momentum_projector(self.momentum_backbone(x)) for x in crops[:2]]
        return towards(self.predictor(z[0]), targets[1]) + towards(self.predictor(z[1]), targets[0])


class TowardsProbabilities(nn.Module):
    def forward(self, student, teacher):
        return -(teacher.softmax(dim=1) * student.log_softmax(dim=1)).sum(dim=1).mean()


class SoloDINO(Solo):
    """`head` instead of `projector`; the loss is a module and gets both crops joined, of student and of teacher."""

    def __init__(self):
        super().__init__()
        del self.projector
        self.head = mlp()
        self.momentum_backbone, self.momentum_head = frozen(self.backbone), frozen(self.head)
        self.dino_loss_func = TowardsProbabilities()

    def training_step(self, batch, _):
        z = [self.head(self.backbone(x)) for x in batch[1]]
        with torch.no_grad():
            targets = [self.momentum_head(self.momentum_backbone(x)) for x in batch[1]]
        return self.dino_loss_func(torch.cat(z), torch.cat(targets[::-1]))


# stable-pretraining


class Stable(pl.LightningModule):
    """Optimizes by hand; batches are lists of views, each a dict; the loss is an attribute named after the method."""

    def __init__(self, name, loss):
        super().__init__()
        self.automatic_optimization = False
        self.backbone, self.projector = encoder(), mlp()
        self.name = name
        setattr(self, name, loss)

    def forward(self, views):
        z = [self.projector(self.backbone(view["image"])) for view in views]
        return getattr(self, self.name)(*z)

    def training_step(self, views, _):
        optimizer = self.optimizers()
        loss = self(views)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class BarlowLoss(nn.Module):
    def forward(self, z_i, z_j):
        return barlow_twins(z_i, z_j)


class Teacher(nn.Module):
    """Holds a student and its moving average; neither is called through the wrapper."""

    def __init__(self, student):
        super().__init__()
        self.student, self.teacher = student, frozen(student)


class Towards(nn.Module):
    def forward(self, prediction, target):
        return towards(prediction, target)


class StableBYOL(Stable):
    def __init__(self):
        super().__init__("byol_loss", Towards())
        self.backbone, self.projector = Teacher(encoder()), Teacher(mlp())
        self.predictor = nn.Linear(D, D)

    def forward(self, views):
        images = [view["image"] for view in views]
        p = [self.predictor(self.projector.student(self.backbone.student(x))) for x in images]
        with torch.no_grad():
            targets = [self.projector.teacher(self.backbone.teacher(x)) for x in images]
        return (self.byol_loss(p[0], targets[1]) + self.byol_loss(p[1], targets[0])) / 2


# plain loops: `step` returns the loss of a batch, after its backward pass


class Plain(nn.Module):
    watch = None  # set where embeddings are handed over by hand

    def step(self, batch):
        loss = self(*batch)
        loss.backward()
        return loss


class OwnLoop(Plain):
    def __init__(self):
        super().__init__()
        self.backbone, self.projector, self.criterion = encoder(), mlp(), VICReg()

    def forward(self, x_a, x_b):
        return self.criterion(*(self.projector(self.backbone(x)) for x in (x_a, x_b)))


class OwnFunction(OwnLoop):
    def forward(self, x_a, x_b):
        z_a, z_b = (self.projector(self.backbone(x)) for x in (x_a, x_b))
        loss = vicreg(z_a, z_b)
        if self.watch is not None:
            self.watch.update(z_a, z_b, loss=loss)
        return loss


class MetaBarlowTwins(Plain):
    """The loss is computed inside `forward`, after a batch norm without parameters."""

    def __init__(self):
        super().__init__()
        self.backbone, self.projector = encoder(), mlp()
        self.bn = nn.BatchNorm1d(D, affine=False)

    def forward(self, y1, y2):
        z1 = self.projector(self.backbone(y1))
        z2 = self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2) / len(z1)
        return (c - torch.eye(D)).square().sum()


class MetaVICReg(Plain):
    def __init__(self):
        super().__init__()
        self.backbone, self.projector = encoder(), mlp()

    def forward(self, x, y):
        return vicreg(self.projector(self.backbone(x)), self.projector(self.backbone(y)))


class MoCo(Plain):
    """Query and key encoders end in their heads; CrossEntropyLoss(logits, labels) sees neither."""

    def __init__(self):
        super().__init__()
        self.encoder_q = nn.Sequential(encoder(), mlp())
        self.encoder_k = frozen(self.encoder_q)
        self.query, self.key = nn.Identity(), nn.Identity()  # only so that tests can see them
        self.register_buffer("queue", F.normalize(torch.randn(D, 32), dim=0))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, im_q, im_k):
        q = self.query(F.normalize(self.encoder_q(im_q), dim=1))
        with torch.no_grad():
            k = self.key(F.normalize(self.encoder_k(im_k), dim=1))
        logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ self.queue], dim=1) / 0.07
        loss = self.criterion(logits, torch.zeros(len(q), dtype=torch.long))
        if self.watch is not None:
            self.watch.update(q, k, loss=loss)
        return loss


class GradCache(Plain):
    """Embeddings of parts of the batch without gradients, the loss on all, then each part again with gradients."""

    def __init__(self):
        super().__init__()
        self.backbone, self.projector, self.criterion = encoder(), nn.Linear(FEATURES, D), SimCLR()

    def step(self, batch):
        parts = [x.chunk(2) for x in batch]
        with torch.no_grad():
            z = [torch.cat([self.projector(self.backbone(x)) for x in view]) for view in parts]
        z = [z_view.requires_grad_() for z_view in z]
        loss = self.criterion(*z)
        loss.backward()
        for view, z_view in zip(parts, z, strict=True):
            for x, gradient in zip(view, z_view.grad.chunk(2), strict=True):
                (self.projector(self.backbone(x)) * gradient).sum().backward()
        return loss


class Timm(Plain):
    """A backbone of timm: called, or asked for its features."""

    def __init__(self, features=False):
        super().__init__()
        self.features = features
        self.backbone = timm.create_model("test_resnet", num_classes=0)
        self.projector, self.criterion = mlp(self.backbone.num_features), VICReg()

    def forward(self, x_a, x_b):
        return self.criterion(*(self.projector(self.representation(x)) for x in (x_a, x_b)))

    def representation(self, x):
        return self.backbone.forward_features(x).mean(dim=(2, 3)) if self.features else self.backbone(x)


class HuggingFace(nn.Module):
    """As Hugging Face's Trainer calls it: keywords in, a dict with the loss out."""

    def __init__(self):
        super().__init__()
        self.backbone, self.projector, self.criterion = encoder(), mlp(), VICReg()

    def forward(self, view_a, view_b):
        z_a, z_b = (self.projector(self.backbone(x)) for x in (view_a, view_b))
        return {"loss": self.criterion(z_a, z_b)}
