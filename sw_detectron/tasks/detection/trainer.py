"""The trainer of detectors."""

from detectron2.config import CfgNode
from detectron2.modeling import GeneralizedRCNNWithTTA
from torch import nn

from ...engine.trainer import Trainer


class DetectionTrainer(Trainer):
    """The `Trainer` of Detectron2's detectors, instance and panoptic models."""

    @classmethod
    def augmented(cls, cfg: CfgNode, model: nn.Module) -> tuple[CfgNode, nn.Module]:
        return cfg, GeneralizedRCNNWithTTA(cfg, model)
