"""Modules after lightly's Lightning examples with convolutional networks.

They have the names and make the calls of `examples/pytorch_lightning/NAME.py` in lightly-ai/lightly, which the package
does not contain. Networks, widths and images are small; losses and heads are lightly's own. `lightly_examples.EXAMPLES`
names the commits.
"""

from copy import deepcopy

import pytorch_lightning as pl
import torch
from lightly import loss, models
from lightly.loss.memory_bank import MemoryBankModule
from lightly.models import utils
from lightly.models.modules import heads
from lightly.models.modules.nn_memory_bank import NNMemoryBankModule
from torch import nn
from torch.nn import functional as F

from tests.monitor.libraries.images import FEATURES, D, backbone


class Example(pl.LightningModule):
    """Holds backbone and projection head, as most examples do."""

    def __init__(self, head, criterion, pooled=True):
        super().__init__()
        self.backbone = backbone(pooled)
        self.projection_head = head
        self.criterion = criterion

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.06)

    def add_momentum(self, *names):
        for name in names:
            copy = deepcopy(getattr(self, name))
            utils.deactivate_requires_grad(copy)
            setattr(self, f"{name}_momentum", copy)

    def move_momentum(self, *names):
        for name in names:
            utils.update_momentum(getattr(self, name), getattr(self, f"{name}_momentum"), m=0.99)

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()


class Pairs(Example):
    """criterion(z0, z1)."""

    def training_step(self, batch, _):
        x0, x1 = batch[0]
        return self.criterion(self(x0), self(x1))


def barlow_twins():
    return Pairs(heads.BarlowTwinsProjectionHead(FEATURES, 16, D), loss.BarlowTwinsLoss())


def simclr():
    return Pairs(heads.SimCLRProjectionHead(FEATURES, 16, D), loss.NTXentLoss())


def dcl():
    return Pairs(heads.SimCLRProjectionHead(FEATURES, 16, D), loss.DCLLoss())


def vicreg():
    return Pairs(heads.VICRegProjectionHead(FEATURES, 16, D, num_layers=2), loss.VICRegLoss())


class FroSSL(Example):
    """criterion([z0, z1])."""

    def __init__(self):
        super().__init__(heads.VICRegProjectionHead(FEATURES, 16, D, num_layers=2), loss.FroSSLLoss())

    def training_step(self, batch, _):
        return self.criterion([self(x) for x in batch[0]])


class MoCo(Example):
    """criterion(query, key): one call of the projection head, and one of its momentum copy."""

    def __init__(self, head=None, criterion=None):
        head = head or heads.MoCoProjectionHead(FEATURES, 16, D)
        super().__init__(head, criterion or loss.NTXentLoss(memory_bank_size=(64, D)))
        self.add_momentum("backbone", "projection_head")

    def training_step(self, batch, _):
        self.move_momentum("backbone", "projection_head")
        x_query, x_key = batch[0]
        return self.criterion(self(x_query), self.forward_momentum(x_key))


def tico():
    return MoCo(heads.TiCoProjectionHead(FEATURES, 16, D), loss.TiCoLoss())


class BYOL(Example):
    """criterion(p0, z1 of the momentum copy), criterion(p1, z0)."""

    def __init__(self):
        super().__init__(heads.BYOLProjectionHead(FEATURES, 16, D), loss.NegativeCosineSimilarity())
        self.prediction_head = heads.BYOLPredictionHead(D, 16, D)
        self.add_momentum("backbone", "projection_head")

    def training_step(self, batch, _):
        self.move_momentum("backbone", "projection_head")
        x0, x1 = batch[0]
        p0, z0 = self.prediction_head(self(x0)), self.forward_momentum(x0)
        p1, z1 = self.prediction_head(self(x1)), self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))


class SimSiam(Example):
    """criterion(z0 detached, p1), criterion(z1, p0)."""

    def __init__(self):
        super().__init__(heads.SimSiamProjectionHead(FEATURES, 16, D), loss.NegativeCosineSimilarity())
        self.prediction_head = heads.SimSiamPredictionHead(D, 4, D)

    def both(self, x):
        z = self(x)
        return z.detach(), self.prediction_head(z)

    def training_step(self, batch, _):
        (z0, p0), (z1, p1) = (self.both(x) for x in batch[0])
        return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))


class FastSiam(SimSiam):
    """Four views; criterion(p of one, mean of the others' z), four times."""

    def training_step(self, batch, _):
        zs, ps = (torch.stack(part) for part in zip(*(self.both(x) for x in batch[0]), strict=True))
        others = [zs[torch.arange(len(zs)) != i].mean(dim=0) for i in range(len(zs))]
        return sum(self.criterion(p, z) / len(zs) for p, z in zip(ps, others, strict=True))


class NNCLR(SimSiam):
    """criterion(nearest neighbour of z0, p1), criterion(that of z1, p0)."""

    def __init__(self):
        super().__init__()
        self.projection_head = heads.NNCLRProjectionHead(FEATURES, 16, D)
        self.prediction_head = heads.NNCLRPredictionHead(D, 16, D)
        self.memory_bank = NNMemoryBankModule(size=(64, D))
        self.criterion = loss.NTXentLoss()

    def training_step(self, batch, _):
        (z0, p0), (z1, p1) = (self.both(x) for x in batch[0])
        z0, z1 = self.memory_bank(z0, update=False), self.memory_bank(z1, update=True)
        return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))


class SMoG(Example):
    """CrossEntropyLoss(logits, groups); views take turns in the online network."""

    callback = None  # set where embeddings are handed over by hand

    def __init__(self):
        super().__init__(heads.SMoGProjectionHead(FEATURES, 16, D), nn.CrossEntropyLoss())
        resnet = models.ResNetGenerator("resnet-9", width=0.125)
        self.backbone = nn.Sequential(*list(resnet.children())[:-1], nn.AdaptiveAvgPool2d(1))
        self.projection_head = heads.SMoGProjectionHead(64, 16, D)
        self.prediction_head = heads.SMoGPredictionHead(D, 16, D)
        self.memory_bank = MemoryBankModule(size=(64, D))
        self.smog = heads.SMoGPrototypes(group_features=F.normalize(torch.rand(10, D), dim=1), beta=0.99)
        self.add_momentum("backbone", "projection_head")

    def training_step(self, batch, index):
        self.move_momentum("backbone", "projection_head")
        x0, x1 = batch[0][::-1] if index % 2 else batch[0]
        z0 = self(x0)
        p0 = self.prediction_head(z0)
        z1 = self.forward_momentum(x1)
        if self.callback is not None:
            self.callback.watch.update(z0, z1)
        groups = self.smog.assign_groups(z1)
        features = self.smog.get_updated_group_features(z0)
        logits = self.smog(p0, features, temperature=0.1)
        self.smog.set_group_features(features)
        result = self.criterion(logits, groups)
        self.memory_bank(z0, update=True)
        return result


class MMCR(Example):
    """k views, stacked: criterion(z, z of the momentum copy), (N, k, d) each."""

    def __init__(self):
        super().__init__(heads.MMCRProjectionHead(FEATURES, 16, D), loss.MMCRLoss())
        self.add_momentum("backbone", "projection_head")

    def training_step(self, batch, _):
        self.move_momentum("backbone", "projection_head")
        online = torch.stack([self(x) for x in batch[0]], dim=1)
        return self.criterion(online, torch.stack([self.forward_momentum(x) for x in batch[0]], dim=1))


class SwaV(Example):
    """Two global crops and small ones; criterion gets two lists of assignments to prototypes."""

    def __init__(self):
        super().__init__(heads.SwaVProjectionHead(FEATURES, 16, D), loss.SwaVLoss())
        self.prototypes = heads.SwaVPrototypes(D, n_prototypes=10)

    def features(self, x):
        return F.normalize(self(x), dim=1)

    def training_step(self, batch, _):
        self.prototypes.normalize()
        assigned = [self.prototypes(self.features(x)) for x in batch[0]]
        return self.criterion(assigned[:2], assigned[2:])


class SwaVQueue(SwaV):
    """The same; the prototypes of a queue are a third list."""

    def __init__(self):
        super().__init__()
        self.queues = nn.ModuleList([MemoryBankModule(size=(64, D)) for _ in range(2)])

    def training_step(self, batch, _):
        self.prototypes.normalize()
        features = [self.features(x) for x in batch[0]]
        assigned = [self.prototypes(f) for f in features]
        with torch.no_grad():
            queued = [queue(f, update=True)[1].T for queue, f in zip(self.queues, features[:2], strict=True)]
            queued = [self.prototypes(f) for f in queued]
        return self.criterion(assigned[:2], assigned[2:], queued)


class DINO(pl.LightningModule):
    """Two global crops and small ones; criterion(list of the teacher's, list of the student's)."""

    def __init__(self):
        super().__init__()
        self.student_backbone = backbone()
        self.student_head = heads.DINOProjectionHead(FEATURES, 16, 8, D, freeze_last_layer=1)
        self.teacher_backbone = deepcopy(self.student_backbone)
        self.teacher_head = heads.DINOProjectionHead(FEATURES, 16, 8, D)
        utils.deactivate_requires_grad(self.teacher_backbone)
        utils.deactivate_requires_grad(self.teacher_head)
        self.criterion = loss.DINOLoss(output_dim=D, warmup_teacher_temp_epochs=5)

    def forward(self, x):
        return self.student_head(self.student_backbone(x).flatten(start_dim=1))

    def training_step(self, batch, _):
        utils.update_momentum(self.student_backbone, self.teacher_backbone, m=0.99)
        utils.update_momentum(self.student_head, self.teacher_head, m=0.99)
        teacher = [self.teacher_head(self.teacher_backbone(x).flatten(start_dim=1)) for x in batch[0][:2]]
        student = [self(x) for x in batch[0]]
        return self.criterion(teacher, student, epoch=self.current_epoch)

    def on_after_backward(self):
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.001)


class DenseCL(Example):
    """A global and a local loss; the keys come from the same modules, without gradients."""

    def __init__(self):
        super().__init__(None, None, pooled=False)
        del self.projection_head, self.criterion
        self.projection_head_global = heads.DenseCLProjectionHead(FEATURES, 16, D)
        self.projection_head_local = heads.DenseCLProjectionHead(FEATURES, 16, D)
        self.add_momentum("backbone", "projection_head_global", "projection_head_local")
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.criterion_global = loss.NTXentLoss(memory_bank_size=(64, D))
        self.criterion_local = loss.NTXentLoss(memory_bank_size=(64, D))

    def forward(self, x):
        features = self.backbone(x)
        whole = self.projection_head_global(self.pool(features).flatten(start_dim=1))
        features = features.flatten(start_dim=2).permute(0, 2, 1)
        return features, whole, self.projection_head_local(features)

    def training_step(self, batch, _):
        self.move_momentum("backbone", "projection_head_global", "projection_head_local")
        x_query, x_key = batch[0]
        features, query, query_local = self(x_query)
        with torch.no_grad():
            key_features, key, key_local = self(x_key)
        key_local = utils.select_most_similar(features, key_features, key_local)
        whole = self.criterion_global(query, key)
        return 0.5 * (whole + self.criterion_local(query_local.flatten(end_dim=1), key_local.flatten(end_dim=1)))


class DetCon(Example):
    """criterion(z0, z1, indices, indices) with z of parts of the images, (N, parts, d)."""

    def __init__(self):
        head = heads.SimCLRProjectionHead(FEATURES, 16, D)
        super().__init__(head, loss.DetConSLoss(gather_distributed=False), pooled=False)
        self.parts = 4

    def forward(self, x):
        features = self.backbone(x)
        columns = torch.arange(self.parts).repeat_interleave(features.shape[3] // self.parts)
        parts = columns.repeat(len(x), features.shape[2], 1)
        pooled = utils.pool_masked(features, parts, num_cls=self.parts).permute(0, 2, 1)
        return self.projection_head(pooled.reshape(-1, FEATURES)).unflatten(0, (len(x), self.parts))

    def training_step(self, batch, _):
        x0, x1 = batch[0]
        indices = torch.arange(self.parts).expand(len(x0), -1)
        return self.criterion(self(x0), self(x1), indices, indices)


class VICRegL(Example):
    """criterion gets keywords: tuples (z, z of positions) of global and of small crops, and their grids."""

    def __init__(self):
        super().__init__(heads.BarlowTwinsProjectionHead(FEATURES, 16, D), None, pooled=False)
        self.local_projection_head = heads.VicRegLLocalProjectionHead(FEATURES, 16, D)
        self.average_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.criterion = loss.VICRegLLoss(num_matches=(4, 2))

    def forward(self, x):
        features = self.backbone(x)
        z = self.projection_head(self.average_pool(features).flatten(start_dim=1))
        return z, self.local_projection_head(features.permute(0, 2, 3, 1))

    def training_step(self, batch, _):
        features = [self(x) for x in batch[0]]
        grids = [torch.rand(*z.shape[:3], 2) for _, z in features]
        return self.criterion(
            global_view_features=features[:2],
            global_view_grids=grids[:2],
            local_view_features=features[2:],
            local_view_grids=grids[2:],
        )
