"""Image classification with any Detectron2 backbone."""

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone
from torch import Tensor, nn

IGNORED_LABEL = -1
"""The label that stands for "no image"; it takes no part in the loss."""


@META_ARCH_REGISTRY.register()
class ImageClassifier(nn.Module):
    """A backbone, global average pooling of its last feature map, and a linear layer.

    The backbone is the one a detector is built with, so a detector starts from its weights as they
    are. The linear layer starts as in Detectron2's ResNet, with a standard deviation of 0.01
    (Goyal et al., 2017, section 5.1), the backbone as Detectron2 initializes it (He et al., 2015);
    the last γ of a residual branch starts at 1, not at 0, as in He et al. (2016).

    Args:
        backbone: its last output feature is classified.
        num_classes: K.
        pixel_mean, pixel_std: of each channel, in 0..255, in the order of the images' channels.
        label_smoothing: share of the target that is spread evenly over all classes.
        channels_last: keep images, weights and feature maps in that memory format.
    """

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        num_classes: int,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        label_smoothing: float = 0.0,
        channels_last: bool = False,
    ):
        super().__init__()
        self.backbone = backbone
        self._feature, shape = list(backbone.output_shape().items())[-1]
        self.linear = nn.Linear(shape.channels, num_classes)
        nn.init.normal_(self.linear.weight, std=0.01)
        self.label_smoothing = label_smoothing
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        self.to(memory_format=self._memory_format)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict:
        keys = cfg.MODEL.CLASSIFIER
        return {
            "backbone": build_backbone(cfg),
            "num_classes": keys.NUM_CLASSES,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
            "label_smoothing": keys.LABEL_SMOOTHING,
            "channels_last": keys.CHANNELS_LAST,
        }

    @property
    def device(self) -> torch.device:
        return self.pixel_mean.device

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        """The loss in training, the scores of the classes in evaluation.

        Args:
            batch: `image` (N, C, H, W), values in 0..255, in any dtype; `label` (N,), int64, in
                training.

        Returns:
            In training `{"loss_cls": ()}`, the mean cross-entropy; else logits (N, K).
        """
        images = batch["image"].to(self.device, non_blocking=True)
        images = (images - self.pixel_mean) / self.pixel_std
        features = self.backbone(images.contiguous(memory_format=self._memory_format))
        logits = self.linear(features[self._feature].mean((2, 3)))
        if not self.training:
            return logits
        loss = F.cross_entropy(
            logits,
            batch["label"].to(self.device, non_blocking=True),
            ignore_index=IGNORED_LABEL,
            label_smoothing=self.label_smoothing,
        )
        return {"loss_cls": loss}
