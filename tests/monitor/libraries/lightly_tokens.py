"""Modules after lightly's Lightning examples with vision transformers; see `lightly_pairs`."""

from copy import deepcopy

import pytorch_lightning as pl
import torch
import torchvision
from lightly import loss
from lightly.models import modules, utils
from lightly.models.modules import heads
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tests.monitor.libraries.images import SIZE, D

PATCH, WIDTH = 8, 16


def transformer(**options):
    size = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": 1, "num_heads": 2}
    return VisionTransformer(**size, num_classes=0, **options)


class Example(pl.LightningModule):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.001)


def frozen(module):
    utils.deactivate_requires_grad(module)
    return module.eval()


class AIM(Example):
    """MSELoss(predicted patches, patches): a single view."""

    def __init__(self):
        super().__init__()
        self.backbone = modules.MaskedCausalVisionTransformer(
            img_size=SIZE,
            patch_size=PATCH,
            embed_dim=WIDTH,
            depth=1,
            num_heads=2,
            qk_norm=False,
            class_token=False,
            no_embed_class=True,
            global_pool="avg",  # timm 1.0 asks for it when there is no class token
        )
        utils.initialize_2d_sine_cosine_positional_embedding(
            pos_embedding=self.backbone.pos_embed, has_class_token=False
        )
        self.projection_head = modules.AIMPredictionHead(WIDTH, 3 * PATCH**2, hidden_dim=16, num_blocks=1)
        self.criterion = nn.MSELoss()

    def training_step(self, batch, _):
        images = batch[0][0]
        tokens = self.backbone.patch_embed.num_patches
        mask = utils.random_prefix_mask(size=(len(images), tokens), max_prefix_length=tokens - 1)
        features = self.backbone._pos_embed(self.backbone.forward_features(images, mask=mask))
        patches = utils.normalize_mean_var(utils.patchify(images, PATCH), dim=-1)
        return self.criterion(self.projection_head(features), patches)


class MAE(Example):
    """MSELoss(predicted patches, patches) where they were masked: a single view; `encode` of the backbone is called."""

    def __init__(self, prefix=0):
        super().__init__()
        vit = transformer(reg_tokens=prefix)
        self.prefix = vit.num_prefix_tokens
        self.backbone = modules.MaskedVisionTransformerTIMM(vit=vit)
        self.sequence_length = self.backbone.sequence_length
        self.decoder = self.make_decoder(vit.patch_embed.num_patches)
        self.criterion = nn.MSELoss()

    def make_decoder(self, patches):
        self.embed, self.predict = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * PATCH**2)
        return modules.MaskedVisionTransformerDecoderTIMM(patches, WIDTH, depth=1, num_heads=2)

    def mask(self, n):
        return utils.random_token_mask(size=(n, self.sequence_length), mask_ratio=0.75)

    def training_step(self, batch, _):
        images = batch[0][0]
        keep, masked = self.mask(len(images))
        encoded = self.embed(self.backbone.encode(images=images, idx_keep=keep))
        tokens = utils.repeat_token(self.decoder.mask_token, (len(images), self.sequence_length))
        decoded = self.decoder.decode(utils.set_at_index(tokens, keep, encoded))
        predicted = self.predict(utils.get_at_index(decoded, masked))
        target = utils.get_at_index(utils.patchify(images, PATCH), masked - self.prefix)
        return self.criterion(predicted, utils.normalize_mean_var(target))


class PIXIO(MAE):
    """The same with register tokens, blocks of masked patches, and a decoder that embeds and predicts."""

    def __init__(self):
        super().__init__(prefix=3)

    def make_decoder(self, patches):
        options = {"decoder_depth": 1, "decoder_num_heads": 2, "num_prefix_tokens": self.prefix}
        return modules.PixioDecoderTIMM(patches, PATCH, embed_dim=WIDTH, decoder_embed_dim=WIDTH, **options)

    def embed(self, x):
        return self.decoder.embed(x)

    def predict(self, x):
        return self.decoder.predict(x)

    def mask(self, n):
        size = (n, self.sequence_length)
        return utils.random_grid_token_mask(size=size, mask_ratio=0.75, grid_size=2, num_prefix_tokens=self.prefix)


class SimMIM(Example):
    """L1Loss(predicted patches, patches): a single view, a linear decoder."""

    def __init__(self):
        super().__init__()
        vit = torchvision.models.VisionTransformer(SIZE, PATCH, 1, 2, WIDTH, 4 * WIDTH)
        self.sequence_length = vit.seq_length
        self.backbone = modules.MaskedVisionTransformerTorchvision(vit=vit)
        self.decoder = nn.Linear(WIDTH, PATCH**2 * 3)
        self.criterion = nn.L1Loss()

    def training_step(self, batch, _):
        images = batch[0][0]
        _, masked = utils.random_token_mask(size=(len(images), self.sequence_length), mask_ratio=0.75)
        encoded = utils.get_at_index(self.backbone.encode(images=images, idx_mask=masked), masked)
        target = utils.get_at_index(utils.patchify(images, PATCH), masked - 1)
        return self.criterion(self.decoder(encoded), target)


class CAPI(Example):
    """criterion on clusters of masked patches, twice per step, with keywords: a single view."""

    def __init__(self):
        super().__init__()
        vit = transformer(reg_tokens=3)
        self.prefix = vit.num_prefix_tokens
        self.student_backbone = modules.MaskedVisionTransformerTIMM(vit=vit)
        self.student_head = modules.CAPIProjectionHead(WIDTH, num_clusters=D, weight_norm=True)
        self.predictor = modules.CAPIPredictorTIMM(WIDTH, grid_size=SIZE // PATCH, depth=1, num_heads=2)
        self.teacher_backbone = deepcopy(self.student_backbone)
        self.teacher_head = modules.CAPIProjectionHead(WIDTH, num_clusters=D, bias=True)
        utils.deactivate_requires_grad(self.teacher_backbone)
        self.criterion = loss.CAPILoss()

    def training_step(self, batch, _):
        utils.update_momentum(self.student_backbone, self.teacher_backbone, m=0.99)
        images = batch[0][0]
        size = (len(images), self.student_backbone.sequence_length)
        keep, masked = utils.random_inverse_block_mask(size=size, mask_ratio=0.65, num_prefix_tokens=self.prefix)
        visible = self.student_backbone.encode(images=images, idx_keep=keep)
        predicted = self.predictor(
            context=visible[:, self.prefix :],
            context_positions=keep[:, self.prefix :] - self.prefix,
            query_positions=masked - self.prefix,
        )
        student = self.student_head(predicted)
        with torch.no_grad():
            features = self.teacher_backbone.encode(images=images)
        teacher = self.teacher_head(features)[:, self.prefix :]
        index = masked - self.prefix
        loss = self.criterion(teacher_logits=teacher, student_logits=student, teacher_index=index)
        return loss + self.criterion(teacher_logits=teacher, student_logits=teacher)


class LeJEPA(Example):
    """criterion(local_proj=…, global_proj=…), (views, N, d) each; timm's backbone."""

    def __init__(self):
        super().__init__()
        self.backbone = transformer(dynamic_img_size=True, drop_path_rate=0.1)
        self.projection_head = heads.LeJEPAProjectionHead(WIDTH, hidden_dim=16, output_dim=D)
        self.criterion = loss.LeJEPALoss(sigreg_num_vectors=16)

    def forward(self, x):
        return self.projection_head(self.backbone(x))

    def training_step(self, batch, _):
        projections = [self(x) for x in batch[0]]
        return self.criterion(local_proj=torch.stack(projections[2:]), global_proj=torch.stack(projections[:2]))


class MSN(Example):
    """criterion(z of masked anchors and of small crops, joined; z of the target; prototypes)."""

    def __init__(self, criterion=loss.MSNLoss):
        super().__init__()
        vit = torchvision.models.VisionTransformer(SIZE, PATCH, 1, 2, WIDTH, 4 * WIDTH)
        self.backbone = modules.MaskedVisionTransformerTorchvision(vit=vit)
        self.projection_head = heads.MSNProjectionHead(WIDTH, 16, D)
        self.anchor_backbone = deepcopy(self.backbone)
        self.anchor_projection_head = deepcopy(self.projection_head)
        utils.deactivate_requires_grad(self.backbone)
        utils.deactivate_requires_grad(self.projection_head)
        self.prototypes = nn.Linear(D, 10, bias=False).weight
        self.criterion = criterion()

    def masked(self, x):
        keep, _ = utils.random_token_mask(size=(len(x), (x.shape[3] // PATCH) ** 2), mask_ratio=0.15)
        return self.anchor_projection_head(self.anchor_backbone(images=x, idx_keep=keep))

    def training_step(self, batch, _):
        utils.update_momentum(self.anchor_backbone, self.backbone, 0.996)
        utils.update_momentum(self.anchor_projection_head, self.projection_head, 0.996)
        target, anchor, *small = batch[0]
        targets = self.projection_head(self.backbone(images=target))
        anchors = torch.cat([self.masked(anchor), self.masked(torch.cat(small))])
        return self.criterion(anchors, targets, self.prototypes.data)


def pmsn():
    return MSN(loss.PMSNLoss)


class IBOT(Example):
    """Heads are called by `.forward`, on both global crops joined; two losses with keywords."""

    def __init__(self):
        super().__init__()
        options = {"antialias": False, "pos_embed_initialization": "skip"}
        vit = transformer(dynamic_img_size=True, init_values=1e-5)
        self.teacher_backbone = modules.MaskedVisionTransformerTIMM(vit=vit, **options)
        self.student_backbone = deepcopy(self.teacher_backbone)
        utils.update_drop_path_rate(self.student_backbone.vit, drop_path_rate=0.1, mode="uniform")
        self.make_heads()
        frozen(self.teacher_backbone)
        frozen(self.teacher_head)

    def make_heads(self):
        self.student_head = heads.DINOProjectionHead(WIDTH, 16, 8, D, norm_last_layer=False)
        self.student_cls_head = self.student_patch_head = self.student_head
        self.teacher_head = heads.DINOProjectionHead(WIDTH, 16, 8, D)
        self.teacher_cls_head = self.teacher_patch_head = self.teacher_head
        self.cls_criterion = loss.DINOLoss(output_dim=D, teacher_temp=0.07)
        self.patch_criterion = loss.IBOTPatchLoss(output_dim=D, teacher_temp=0.07)

    def parts(self):
        head, teacher = self.student_head, self.teacher_head
        return head, teacher, self.cls_criterion, self.patch_criterion

    def training_step(self, batch, _):
        head, teacher_head, whole_criterion, patch_criterion = self.parts()
        large, small = torch.cat(batch[0][:2]), torch.cat(batch[0][2:])
        rows, columns = self.teacher_backbone.vit.patch_embed.grid_size
        blocks = utils.random_block_mask(size=(len(large), rows, columns), min_num_masks_per_block=1)
        mask = torch.cat([blocks.new_zeros(len(large), 1), blocks.flatten(start_dim=1)], dim=1)
        with torch.no_grad():
            features = self.teacher_backbone.encode(large)
            teacher = teacher_head.forward(features[:, 0])
            teacher_patches = teacher_head.forward(features[mask])
        features = self.student_backbone.encode(large, mask=mask)
        student = head.forward(features[:, 0])
        patches = head.forward(features[mask])
        student = torch.cat([student, head.forward(self.student_backbone.encode(small)[:, 0])])
        views = student.chunk(len(batch[0]))
        result = whole_criterion(teacher_out=teacher.chunk(2), student_out=views, teacher_temp=0.05)
        result = result + self.extra(features[:, 0])
        return result + patch_criterion(
            teacher_out=teacher_patches, student_out=patches, mask=blocks, teacher_temp=0.05
        )

    def extra(self, _):
        return 0.0

    def on_train_batch_end(self, *_):
        utils.update_momentum(self.student_backbone, self.teacher_backbone, m=0.99)
        utils.update_momentum(self.student_head, self.teacher_head, m=0.99)


class Heads(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.dino_head = self.ibot_head = head


class DINOv2(IBOT):
    """The same; the heads are parts of a module, and a third loss is called once per global crop."""

    def make_heads(self):
        self.teacher_head = Heads(heads.DINOv2ProjectionHead(WIDTH, 16, 8, D))
        self.student_head = Heads(heads.DINOv2ProjectionHead(WIDTH, 16, 8, D))
        self.dino_criterion = loss.DINOLoss(output_dim=D)
        self.ibot_criterion = loss.IBOTPatchLoss(output_dim=D)
        self.koleo_criterion = loss.KoLeoLoss()

    def parts(self):
        head, teacher = self.student_head.dino_head, self.teacher_head.dino_head
        return head, teacher, self.dino_criterion, self.ibot_criterion

    def extra(self, tokens):
        return 0.1 * sum(self.koleo_criterion(t) for t in tokens.chunk(2))
