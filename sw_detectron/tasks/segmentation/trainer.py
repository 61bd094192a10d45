"""The trainer of semantic segmentation."""

from detectron2.config import CfgNode
from torch import nn

from ...engine.trainer import Trainer
from ...errors import UserError
from .mapper import SegmentationMapper
from .model import MultiScaleSegmentor


class SegmentationTrainer(Trainer):
    """The `Trainer` of a `SlidingWindowSegmentor`."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """
        Raises:
            UserError: the crops do not fit the head.
        """
        if any(side % 8 != 1 for side in cfg.INPUT.CROP.SIZE):
            raise UserError(
                f"INPUT.CROP.SIZE {tuple(cfg.INPUT.CROP.SIZE)}: height and width must be a "
                "multiple of 8, plus 1"
            )
        return super().build_model(cfg)

    @classmethod
    def build_mapper(cls, cfg: CfgNode, is_train: bool) -> SegmentationMapper:
        return SegmentationMapper(cfg, is_train)

    @classmethod
    def check_augmentation(cls, cfg: CfgNode) -> None:
        """Every segmentor has them."""

    @classmethod
    def augmented(cls, cfg: CfgNode, model: nn.Module) -> tuple[CfgNode, nn.Module]:
        unscaled = cfg.clone()
        unscaled.defrost()
        unscaled.INPUT.MIN_SIZE_TEST = 0
        return unscaled, MultiScaleSegmentor(cfg, model)
