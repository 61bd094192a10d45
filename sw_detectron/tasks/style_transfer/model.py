"""The stylizing network as a model of Detectron2's."""

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn

from ...errors import UserError
from ...modeling.backbone import sw_norm_from_config
from .loss import PerceptualLoss
from .network import StylizingNetwork

OUTPUTS = ("tanh", "none")


@META_ARCH_REGISTRY.register()
class StyleTransfer(nn.Module):
    """A `StylizingNetwork` that is trained by a `PerceptualLoss`, which is no part of its weights.

    Args:
        network: the part that stylizes, which can be exported alone.
    """

    @configurable
    def __init__(self, *, network: StylizingNetwork):
        super().__init__()
        self.network = network
        self._criterion: tuple[PerceptualLoss, ...] = ()  # a tuple, not to be a submodule

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict:
        keys = cfg.MODEL.STYLE
        if cfg.INPUT.FORMAT != "RGB":
            raise UserError(f"INPUT.FORMAT {cfg.INPUT.FORMAT!r}: style transfer takes RGB")
        network = StylizingNetwork(
            sw_norm_from_config(cfg),
            keys.CHANNELS,
            keys.NUM_BLOCKS,
            keys.OUTPUT == "tanh",
            cfg.MODEL.PIXEL_MEAN,
            cfg.MODEL.PIXEL_STD,
        )
        return {"network": network}

    @property
    def device(self) -> torch.device:
        return self.network.pixel_mean.device

    def set_criterion(self, criterion: PerceptualLoss) -> None:
        """What it is trained by; it is moved to the model's device."""
        self._criterion = (criterion.to(self.device),)

    def forward(self, batched_inputs: list[dict]) -> dict[str, Tensor] | list[dict]:
        """
        Args:
            batched_inputs: "image" (3, H, W), RGB in 0..255; in training all of one size.

        Returns:
            In training the losses of `PerceptualLoss`. Else for each image "stylized", (3, H, W) in
            0..255.
        """
        images = [x["image"].to(self.device).float() for x in batched_inputs]
        if not self.training:
            stylized = [self.network(image[None])[0].clamp(0, 255) for image in images]
            return [{"stylized": image} for image in stylized]
        content = torch.stack(images)
        (criterion,) = self._criterion
        return criterion(self.network(content), content)
