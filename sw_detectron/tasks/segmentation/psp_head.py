"""The head of PSPNet (Zhao et al., Pyramid Scene Parsing Network, CVPR 2017)."""

from collections.abc import Sequence

import fvcore.nn.weight_init as weight_init
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode, configurable
from detectron2.layers import Conv2d, ShapeSpec, get_norm
from detectron2.modeling import SEM_SEG_HEADS_REGISTRY
from torch import Tensor, nn

from ...errors import UserError


class PyramidPooling(nn.Module):
    """Appends to feature maps what they are on average in the cells of several coarse grids.

    Each grid of k x k cells is reduced to a share of the channels by a 1x1 convolution, and
    interpolated back.

    Args:
        in_channels: C, a multiple of the number of grids.
        bins: k of each grid.
        norm: of the 1x1 convolutions.
    """

    def __init__(self, in_channels: int, bins: Sequence[int], norm: str):
        super().__init__()
        self.bins = tuple(bins)
        channels = in_channels // len(bins)
        self.reductions = nn.ModuleList(_conv(in_channels, channels, 1, norm) for _ in bins)
        self.out_channels = in_channels + channels * len(bins)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, 2C, H, W)."""
        levels = [
            F.interpolate(
                reduction(F.adaptive_avg_pool2d(x, k)),
                size=x.shape[-2:],
                mode="bilinear",
                align_corners=True,
            )
            for k, reduction in zip(self.bins, self.reductions)
        ]
        return torch.cat([x, *levels], dim=1)


@SEM_SEG_HEADS_REGISTRY.register()
class PSPHead(nn.Module):
    """PSPNet's head, or without pyramid pooling the plain head of its dilated-FCN baseline.

    A 3x3 convolution, dropout and a 1x1 classifier; the same again, with half the channels, on an
    earlier feature map for the auxiliary loss.

    The strides of the backbone's convolutions put the feature with index i at the pixel
    stride * i, so an image has stride * k + 1 pixels a side, and logits are interpolated between
    those pixels (`align_corners`).

    Args:
        input_shape: of the features by name.
        in_features: one name, or two: the first gets the auxiliary loss, the last is classified.
        num_classes: K.
        conv_dim: channels of the 3x3 convolution.
        pool_bins: see `PyramidPooling`; empty for none.
        norm: of all convolutions but the classifiers.
        dropout: probability.
        ignore_value: label of the pixels that no loss is taken of.
        loss_weight, aux_loss_weight: factors of the losses.
        class_weights: K factors of the classes' pixels, the loss being the weighted mean over
            pixels; empty for ones.

    Raises:
        UserError: `class_weights` are not K.
    """

    @configurable
    def __init__(
        self,
        input_shape: dict[str, ShapeSpec],
        *,
        in_features: Sequence[str],
        num_classes: int,
        conv_dim: int,
        pool_bins: Sequence[int],
        norm: str,
        dropout: float,
        ignore_value: int,
        loss_weight: float,
        aux_loss_weight: float,
        class_weights: Sequence[float],
    ):
        super().__init__()
        if class_weights and len(class_weights) != num_classes:
            raise UserError(
                f"MODEL.SEM_SEG_HEAD.CLASS_WEIGHTS are {len(class_weights)}, but there are "
                f"{num_classes} classes"
            )
        self.in_features = tuple(in_features)
        self.stride = input_shape[in_features[-1]].stride
        self.ignore_value = ignore_value
        self.loss_weight = loss_weight
        self.aux_loss_weight = aux_loss_weight
        weights = torch.tensor(class_weights or [1.0] * num_classes, dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)

        channels = input_shape[in_features[-1]].channels
        self.pyramid = PyramidPooling(channels, pool_bins, norm) if pool_bins else None
        if self.pyramid:
            channels = self.pyramid.out_channels
        self.classifier = _classifier(channels, conv_dim, num_classes, norm, dropout)
        self.auxiliary = None
        if len(in_features) > 1:
            channels = input_shape[in_features[0]].channels
            self.auxiliary = _classifier(channels, conv_dim // 2, num_classes, norm, dropout)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> dict:
        head = cfg.MODEL.SEM_SEG_HEAD
        return {
            "input_shape": input_shape,
            "in_features": head.IN_FEATURES,
            "num_classes": head.NUM_CLASSES,
            "conv_dim": head.CONVS_DIM,
            "pool_bins": head.POOL_BINS,
            "norm": head.NORM,
            "dropout": head.DROPOUT,
            "ignore_value": head.IGNORE_VALUE,
            "loss_weight": head.LOSS_WEIGHT,
            "aux_loss_weight": head.AUX_LOSS_WEIGHT,
            "class_weights": head.CLASS_WEIGHTS,
        }

    def forward(
        self, features: dict[str, Tensor], targets: Tensor | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """
        Args:
            features: each (N, C, h, w).
            targets: in training, (N, stride * (h - 1) + 1, stride * (w - 1) + 1), the labels.

        Returns:
            In training, None and the losses; else the logits, (N, K, *) with the targets' height
            and width, and no losses.
        """
        x = features[self.in_features[-1]]
        logits = self.classifier(self.pyramid(x) if self.pyramid else x)
        if not self.training:
            return self._upsample(logits), {}
        losses = {"loss_sem_seg": self._loss(logits, targets) * self.loss_weight}
        if self.auxiliary:
            logits = self.auxiliary(features[self.in_features[0]])
            losses["loss_sem_seg_aux"] = self._loss(logits, targets) * self.aux_loss_weight
        return None, losses

    def _upsample(self, logits: Tensor) -> Tensor:
        size = [self.stride * (side - 1) + 1 for side in logits.shape[-2:]]
        # In the parameters' type, which autocast leaves.
        logits = logits.to(self.class_weights.dtype)
        return F.interpolate(logits, size=size, mode="bilinear", align_corners=True)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(
            self._upsample(logits),
            targets,
            self.class_weights,
            ignore_index=self.ignore_value,
            reduction="sum",
        )
        pixels = self.class_weights[targets[targets != self.ignore_value]].sum()
        # Crops without any labelled pixel have no loss, instead of 0 / 0.
        return total / pixels.clamp(min=torch.finfo(pixels.dtype).tiny)


def _conv(in_channels: int, out_channels: int, kernel_size: int, norm: str) -> Conv2d:
    conv = Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        padding=kernel_size // 2,
        bias=not norm,
        norm=get_norm(norm, out_channels),
        activation=F.relu,
    )
    weight_init.c2_msra_fill(conv)
    return conv


def _classifier(
    in_channels: int, channels: int, num_classes: int, norm: str, dropout: float
) -> nn.Sequential:
    layers = nn.Sequential()
    layers.add_module("conv", _conv(in_channels, channels, 3, norm))
    layers.add_module("dropout", nn.Dropout(dropout))
    layers.add_module("predictor", nn.Conv2d(channels, num_classes, 1))
    # All classes are about equally likely at first.
    nn.init.normal_(layers.predictor.weight, std=0.01)
    nn.init.zeros_(layers.predictor.bias)
    return layers
