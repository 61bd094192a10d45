"""VGG-16 as DeepLab takes it, made of Detectron2's parts.

Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition (ICLR
2015), configuration D, whose thirteen convolutions form five groups. Chen et al., DeepLab (TPAMI
2018): the last two poolings are left out, so that the stride is 8, the convolutions of the fifth
group are dilated instead, and the fully connected layers are convolutions.
"""

from collections.abc import Sequence

import fvcore.nn.weight_init as weight_init
import torch.nn.functional as F
from detectron2.layers import CNNBlockBase, Conv2d, ShapeSpec
from detectron2.modeling import Backbone
from torch import Tensor, nn

from ..errors import UserError

NUM_CONVS = (2, 2, 3, 3, 3)
CHANNELS = (64, 128, 256, 512, 512)
FC_CHANNELS = 1024
# Of fc6 and fc7, which were seven pixels wide, and one, at four times the stride.
FC_DILATION = 4


class VGGGroup(CNNBlockBase):
    """Some 3x3 convolutions conv1, conv2, …, a ReLU after each. They can hold a norm, and have none
    to begin with; they have a bias in any case."""

    def __init__(self, in_channels: int, out_channels: int, num_convs: int, dilation: int):
        super().__init__(in_channels, out_channels, stride=1)
        for index in range(num_convs):
            channels = out_channels if index else in_channels
            setattr(self, f"conv{index + 1}", _conv3x3(channels, out_channels, dilation))

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, out_channels, H, W)."""
        for conv in self.children():
            x = F.relu_(conv(x))
        return x


class VGG(Backbone):
    """Five groups of convolutions, group1 to group5, then fc6 and fc7.

    Args:
        in_channels: of the images.
        channels: of each group.
        fc_channels: of fc6 and fc7.
        out_features: names of what the network returns: groups, of strides 1, 2, 4, 8 and 8, or
            "fc7", of stride 8.

    Raises:
        UserError: there are not five groups, or no feature of that name.
    """

    def __init__(
        self,
        in_channels: int = 3,
        channels: Sequence[int] = CHANNELS,
        fc_channels: int = FC_CHANNELS,
        out_features: Sequence[str] = ("fc7",),
    ):
        super().__init__()
        if len(channels) != len(NUM_CONVS):
            raise UserError(
                f"a VGG-16 has {len(NUM_CONVS)} groups, got channels of {len(channels)}: "
                f"{list(channels)}"
            )
        self._shapes = {}
        self.group_names = [f"group{number}" for number in range(1, len(channels) + 1)]
        before, stride = in_channels, 1
        for index, name in enumerate(self.group_names):
            dilation = 2 if index == 4 else 1
            setattr(self, name, VGGGroup(before, channels[index], NUM_CONVS[index], dilation))
            self._shapes[name] = ShapeSpec(channels=channels[index], stride=stride)
            before, stride = channels[index], min(2 * stride, 8)
        self.pool = nn.MaxPool2d(2)
        self.fc6 = _conv3x3(before, fc_channels, FC_DILATION)
        self.fc7 = _conv3x3(fc_channels, fc_channels, FC_DILATION)
        self._shapes["fc7"] = ShapeSpec(channels=fc_channels, stride=8)
        unknown = [name for name in out_features if name not in self._shapes]
        if unknown or not out_features:
            raise UserError(
                f"a VGG-16 has no output {', '.join(unknown) or 'at all'}; there are "
                f"{', '.join(self._shapes)}"
            )
        self._out_features = list(out_features)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(N, in_channels, H, W) to the features by name, of ⌊H / stride⌋ x ⌊W / stride⌋."""
        features = {}
        for index, name in enumerate(self.group_names):
            x = features[name] = getattr(self, name)(self.pool(x) if 0 < index < 4 else x)
        features["fc7"] = F.relu_(self.fc7(F.relu_(self.fc6(x))))
        return {name: features[name] for name in self._out_features}

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {name: self._shapes[name] for name in self._out_features}

    def freeze(self, freeze_at: int) -> "VGG":
        """Freeze the first groups, as Detectron2's ResNet does with its stem and stages."""
        for name in self.group_names[:freeze_at]:
            getattr(self, name).freeze()
        return self


def _conv3x3(in_channels: int, out_channels: int, dilation: int) -> Conv2d:
    conv = Conv2d(in_channels, out_channels, kernel_size=3, padding=dilation, dilation=dilation)
    weight_init.c2_msra_fill(conv)
    return conv
