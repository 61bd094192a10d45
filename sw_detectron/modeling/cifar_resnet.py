"""He et al.'s ResNets for CIFAR, made of Detectron2's parts.

Deep Residual Learning for Image Recognition (CVPR 2016), section 4.2: a 3x3 convolution, three
stages of n blocks with 16, 32 and 64 channels, 6n + 2 layers with the classifier. Where the
channels double, the shortcut is the paper's option A, which has no parameters.
"""

from collections.abc import Sequence

import fvcore.nn.weight_init as weight_init
import torch.nn.functional as F
from detectron2.layers import CNNBlockBase, Conv2d, get_norm
from detectron2.modeling import ResNet
from torch import Tensor

from ..errors import UserError
from .norms import NormFactory

CHANNELS = (16, 32, 64)


class CifarStem(CNNBlockBase):
    """A 3x3 convolution, without pooling."""

    def __init__(self, in_channels: int, out_channels: int, norm: str | NormFactory):
        super().__init__(in_channels, out_channels, stride=1)
        self.conv1 = _conv3x3(in_channels, out_channels, 1, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, out_channels, H, W)."""
        return F.relu_(self.conv1(x))


class CifarBlock(CNNBlockBase):
    """Two 3x3 convolutions around which the input is added, by option A where shapes differ."""

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int, norm: str | NormFactory
    ):
        super().__init__(in_channels, out_channels, stride)
        self.conv1 = _conv3x3(in_channels, out_channels, stride, norm)
        self.conv2 = _conv3x3(out_channels, out_channels, 1, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, out_channels, ⌈H / stride⌉, ⌈W / stride⌉)."""
        y = self.conv2(F.relu_(self.conv1(x)))
        new_channels = self.out_channels - self.in_channels
        if self.stride > 1 or new_channels:
            half = new_channels // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, half, new_channels - half))
        return F.relu_(y.add_(x))


def _conv3x3(in_channels: int, out_channels: int, stride: int, norm: str | NormFactory) -> Conv2d:
    conv = Conv2d(
        in_channels,
        out_channels,
        kernel_size=3,
        stride=stride,
        padding=1,
        bias=False,
        norm=get_norm(norm, out_channels),
    )
    weight_init.c2_msra_fill(conv)
    return conv


def make_cifar_resnet(
    depth: int,
    norm: str | NormFactory = "BN",
    num_classes: int | None = None,
    out_features: Sequence[str] | None = None,
    in_channels: int = 3,
) -> ResNet:
    """A ResNet for CIFAR: stem.conv1, res2 (16 channels, stride 1), res3 (32, 2), res4 (64, 4).

    Args:
        depth: 6n + 2; the paper has 20, 32, 44, 56 and 110.
        norm: of all convolutions, as `get_norm` takes it.
        num_classes: of the classifier, "linear"; None for none.
        out_features: names of what the network returns; None for its last layer.
        in_channels: of the images.

    Raises:
        UserError: there is no such depth.
    """
    num_blocks, rest = divmod(depth - 2, 6)
    if rest or num_blocks < 1:
        raise UserError(
            f"no ResNet for CIFAR has depth {depth}: it is 6n + 2, such as 20, 32, 44, 56 or 110"
        )
    stem = CifarStem(in_channels, CHANNELS[0], norm)
    stages = [
        ResNet.make_stage(
            CifarBlock,
            num_blocks,
            in_channels=before,
            out_channels=channels,
            stride_per_block=[channels // before] + [1] * (num_blocks - 1),
            norm=norm,
        )
        for before, channels in zip((CHANNELS[0], *CHANNELS), CHANNELS)
    ]
    return ResNet(stem, stages, num_classes=num_classes, out_features=out_features)
