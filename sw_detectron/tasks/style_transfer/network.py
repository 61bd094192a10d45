"""The network that stylizes images.

Johnson, Alahi and Fei-Fei, Perceptual Losses for Real-Time Style Transfer and Super-Resolution
(ECCV 2016), with nearest-neighbour upsampling in the place of transposed convolutions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...modeling.norms import NormFactory, get_norm

_RANGE = 150.0  # of what comes out, about the mean of images, in pixel values
_STRIDE = 4


class StylizingNetwork(nn.Module):
    """Images to stylized images.

    A convolution of 9x9, two of stride 2, residual blocks, two convolutions after upsampling, and
    another of 9x9; all pad by reflection, and all but the last have a norm.

    Args:
        norm: its name, or a function that makes one for a number of channels.
        channels: of the first convolution; inside there are four times as many.
        num_blocks: residual blocks.
        bounded: whether the output ends with tanh, times 150, about the mean.
        pixel_mean, pixel_std: of each channel, in 0..255.
    """

    def __init__(
        self,
        norm: str | NormFactory,
        channels: int,
        num_blocks: int,
        bounded: bool,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
    ):
        super().__init__()
        colors, inner = len(pixel_mean), 4 * channels
        self.down = nn.Sequential(
            ConvNorm(colors, channels, 9, norm),
            ConvNorm(channels, 2 * channels, 3, norm, stride=2),
            ConvNorm(2 * channels, inner, 3, norm, stride=2),
        )
        self.blocks = nn.Sequential(*(ResidualBlock(inner, norm) for _ in range(num_blocks)))
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2),
            ConvNorm(inner, 2 * channels, 3, norm),
            nn.Upsample(scale_factor=2),
            ConvNorm(2 * channels, channels, 3, norm),
        )
        self.last = _conv(channels, colors, 9)
        self._bounded = bounded
        self.register_buffer("pixel_mean", _per_channel(pixel_mean), False)
        self.register_buffer("pixel_std", _per_channel(pixel_std), False)

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape; values are those of pixels, about 0 to 255."""
        height, width = images.shape[2:]
        x = (images - self.pixel_mean) / self.pixel_std
        # To whole strides, and such that the smallest map has something to reflect.
        rows, columns = (max(-side % _STRIDE, 2 * _STRIDE - side) for side in (height, width))
        x = F.pad(x, (0, columns, 0, rows), mode="replicate")
        x = self.last(self.up(self.blocks(self.down(x))))
        if self._bounded:
            x = _RANGE * x.tanh()
        return x[:, :, :height, :width] + self.pixel_mean


class ConvNorm(nn.Sequential):
    """A convolution, its norm, and a ReLU if asked for."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        norm: str | NormFactory,
        stride: int = 1,
        activation: bool = True,
    ):
        super().__init__()
        self.conv = _conv(in_channels, out_channels, size, stride)
        self.norm = get_norm(norm, out_channels)
        if activation:
            self.relu = nn.ReLU(inplace=True)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with norms, a ReLU between them and none after the sum."""

    def __init__(self, channels: int, norm: str | NormFactory):
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3, norm)
        self.conv2 = ConvNorm(channels, channels, 3, norm, activation=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x))


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, size, stride, padding=size // 2, padding_mode="reflect"
    )


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)
