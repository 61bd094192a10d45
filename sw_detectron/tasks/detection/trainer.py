"""The trainer of detectors."""

from collections.abc import Callable

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import (
    META_ARCH_REGISTRY,
    GeneralizedRCNN,
    GeneralizedRCNNWithTTA,
    PanopticFPN,
)
from torch import nn

from ...engine.trainer import Trainer
from ...errors import UserError
from .evaluators import CocoEvaluator
from .mapper import DetectionMapper


class DetectionTrainer(Trainer):
    """The `Trainer` of Detectron2's detectors, instance and panoptic models."""

    @classmethod
    def build_mapper(cls, cfg: CfgNode, is_train: bool) -> Callable[[dict], dict]:
        return DetectionMapper(cfg, is_train)

    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None
    ) -> DatasetEvaluator:
        evaluator = super().build_evaluator(cfg, dataset_name, output_folder)
        if isinstance(evaluator, CocoEvaluator):
            evaluator.count_up_to(cfg.TEST.DETECTIONS_PER_IMAGE)
        return evaluator

    @classmethod
    def check_augmentation(cls, cfg: CfgNode) -> None:
        network = META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE)
        # A panoptic one would lack what the evaluator of panoptic results reads.
        if not issubclass(network, GeneralizedRCNN) or issubclass(network, PanopticFPN):
            super().check_augmentation(cfg)
        for key in ("KEYPOINT_ON", "LOAD_PROPOSALS"):
            if cfg.MODEL[key]:
                raise UserError(
                    f"TEST.AUG.ENABLED: there is no test-time augmentation with MODEL.{key}; set "
                    "one of them to False"
                )

    @classmethod
    def augmented(cls, cfg: CfgNode, model: nn.Module) -> tuple[CfgNode, nn.Module]:
        return cfg, GeneralizedRCNNWithTTA(cfg, model)
