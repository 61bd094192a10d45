"""The trainer of detectors."""

from collections.abc import Callable

from detectron2.config import CfgNode
from detectron2.modeling import GeneralizedRCNNWithTTA
from torch import nn

from ...engine.trainer import Trainer
from .mapper import DetectionMapper


class DetectionTrainer(Trainer):
    """The `Trainer` of Detectron2's detectors, instance and panoptic models."""

    @classmethod
    def build_mapper(cls, cfg: CfgNode, is_train: bool) -> Callable[[dict], dict]:
        return DetectionMapper(cfg, is_train)

    @classmethod
    def augmented(cls, cfg: CfgNode, model: nn.Module) -> tuple[CfgNode, nn.Module]:
        return cfg, GeneralizedRCNNWithTTA(cfg, model)
