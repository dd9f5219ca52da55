"""ResNet-18, -34 and -50 (He et al. 2016), without the classifier.

Parameter names, shapes and initialization are torchvision's, so state dicts are interchangeable (except `fc.*`).
`stem="large"` is the original stem (7×7 convolution with stride 2, pooling), used for 96 px and more; `stem="small"`
(3×3, stride 1, no pooling) is the usual one for 32 px.
"""

import torch
from torch import Tensor, nn

from stairwise.checks import one_of

STEMS = ("large", "small")


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a residual connection."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with a residual connection; the 3×3 convolution has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images (N, 3, H, W) → representations (N, `features`).

    >>> net = resnet18(stem="small")
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.features
    (torch.Size([2, 512]), 512)
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        stem: str = "large",
        width: int = 64,
        channels: int = 3,
    ) -> None:
        super().__init__()
        small = one_of(stem, "stem", STEMS) == "small"
        self.conv1 = _conv(channels, width, 3) if small else _conv(channels, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        inputs = width
        stages: list[nn.Sequential] = []
        for stage, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for i in range(depth):
                blocks.append(block(inputs, width << stage, 2 if stage and i == 0 else 1))
                inputs = (width << stage) * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.features = inputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean(dim=(2, 3))


def resnet18(stem: str = "large", width: int = 64, channels: int = 3) -> ResNet:
    """11 million parameters, 512 features at width 64."""
    return ResNet(BasicBlock, (2, 2, 2, 2), stem, width, channels)


def resnet34(stem: str = "large", width: int = 64, channels: int = 3) -> ResNet:
    """21 million parameters, 512 features at width 64."""
    return ResNet(BasicBlock, (3, 4, 6, 3), stem, width, channels)


def resnet50(stem: str = "large", width: int = 64, channels: int = 3) -> ResNet:
    """23.5 million parameters, 2048 features at width 64."""
    return ResNet(Bottleneck, (3, 4, 6, 3), stem, width, channels)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
