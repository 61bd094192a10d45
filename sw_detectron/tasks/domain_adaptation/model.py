"""DeepLab-v2's head, the segmentor that is adapted, and the discriminator that it is to deceive.

Tsai et al., Learning to Adapt Structured Output Space for Semantic Segmentation (CVPR 2018).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling import META_ARCH_REGISTRY, SEM_SEG_HEADS_REGISTRY, SemanticSegmentor
from detectron2.modeling.postprocessing import sem_seg_postprocess
from detectron2.structures import ImageList
from torch import Tensor, nn

from ...errors import UserError
from ..segmentation.model import output_size


@SEM_SEG_HEADS_REGISTRY.register()
class DeepLabV2Head(nn.Module):
    """The sum of dilated 3x3 convolutions, each a classifier of its own (Chen et al., 2018).

    Args:
        in_channels: of the feature `in_feature`.
        num_classes: K.
        dilations: of each convolution; [6, 12, 18, 24] in DeepLab.
        ignore_value: the label of pixels without loss.
    """

    @configurable
    def __init__(
        self,
        *,
        in_feature: str,
        in_channels: int,
        num_classes: int,
        dilations: Sequence[int],
        ignore_value: int,
    ):
        super().__init__()
        self.in_feature = in_feature
        self.ignore_value = ignore_value
        self.classifiers = nn.ModuleList(
            nn.Conv2d(in_channels, num_classes, 3, padding=dilation, dilation=dilation)
            for dilation in dilations
        )
        for classifier in self.classifiers:
            nn.init.normal_(classifier.weight, std=0.01)
            nn.init.zeros_(classifier.bias)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> dict:
        head = cfg.MODEL.SEM_SEG_HEAD
        if len(head.IN_FEATURES) != 1 or not head.DILATIONS:
            raise UserError(
                f"DeepLabV2Head takes one of MODEL.SEM_SEG_HEAD.IN_FEATURES, got "
                f"{head.IN_FEATURES}, and one or more DILATIONS, got {head.DILATIONS}"
            )
        (in_feature,) = head.IN_FEATURES
        return {
            "in_feature": in_feature,
            "in_channels": input_shape[in_feature].channels,
            "num_classes": head.NUM_CLASSES,
            "dilations": head.DILATIONS,
            "ignore_value": head.IGNORE_VALUE,
        }

    def logits(self, features: dict[str, Tensor], size: Sequence[int]) -> Tensor:
        """(N, C, h, w) to (N, K, H, W), with H, W = `size`."""
        x = features[self.in_feature]
        logits = sum(classifier(x) for classifier in self.classifiers)
        logits = logits.to(self.classifiers[0].weight.dtype)  # which autocast leaves
        return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labelled pixels; 0 if there are none.

        Args:
            logits: (N, K, H, W).
            labels: (N, H, W), int64.
        """
        total = F.cross_entropy(logits, labels, ignore_index=self.ignore_value, reduction="sum")
        return total / (labels != self.ignore_value).sum().clamp(min=1)


@META_ARCH_REGISTRY.register()
class AdaptedSegmentor(SemanticSegmentor):
    """A `SemanticSegmentor` with a `DeepLabV2Head`, which hands out its logits in training too."""

    def forward(
        self, batched_inputs: list[dict], with_logits: bool = False
    ) -> dict[str, Tensor] | tuple[dict[str, Tensor], Tensor] | list[dict]:
        """
        Args:
            batched_inputs: "image" (3, H, W); "sem_seg" (H, W) where there are labels.
            with_logits: whether to return, in training, the logits too.

        Returns:
            In training, the loss "loss_seg", if there are labels, and the logits (N, K, H, W). Else
            for each image "sem_seg", its logits (K, height, width).
        """
        images = [
            (x["image"].to(self.device) - self.pixel_mean) / self.pixel_std for x in batched_inputs
        ]
        images = ImageList.from_tensors(images, self.backbone.size_divisibility)
        size = images.tensor.shape[2:]
        logits = self.sem_seg_head.logits(self.backbone(images.tensor), size)
        if not self.training:
            return [
                {"sem_seg": sem_seg_postprocess(one, size, *output_size(x))}
                for one, size, x in zip(logits, images.image_sizes, batched_inputs)
            ]
        losses = {}
        if "sem_seg" in batched_inputs[0]:
            labels = ImageList.from_tensors(
                [x["sem_seg"].to(self.device) for x in batched_inputs],
                self.backbone.size_divisibility,
                self.sem_seg_head.ignore_value,
            )
            losses["loss_seg"] = self.sem_seg_head.loss(logits, labels.tensor)
        return (losses, logits) if with_logits else losses


class Discriminator(nn.Sequential):
    """From which domain each patch of a prediction is, by five 4x4 convolutions of stride 2.

    Args:
        num_classes: K.
        channels: of the first convolution; the next three have 2, 4 and 8 times as many.
    """

    SMALLEST = 32  # pixels: the side of a prediction of which the last convolution sees one patch

    def __init__(self, num_classes: int, channels: int = 64):
        widths = [num_classes, *(channels * factor for factor in (1, 2, 4, 8)), 1]
        layers = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        super().__init__(*layers[:-1])

    def forward(self, logits: Tensor) -> Tensor:
        """The segmentor's logits (N, K, H, W) to those of its patches, (N, 1, ⌊H / 32⌋, ⌊W / 32⌋):
        positive where they seem to be of the target."""
        return super().forward(logits.softmax(dim=1))
