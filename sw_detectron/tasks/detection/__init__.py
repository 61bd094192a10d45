"""Detection, instance segmentation and panoptic segmentation with Detectron2's models."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import Metadata

from ...data import register_shapes
from ...data.check import Wanted
from ...task import Task, register_task
from .check import check_objects, wanted_by_detector
from .coco_folder import add_coco_folder_config, follow_coco_folder, register_coco_folder
from .evaluators import EVALUATORS
from .page import predictions_section
from .predictor import DetectionPredictor
from .results import detection_results
from .trainer import DetectionTrainer

__all__ = ["DetectionTrainer"]


class Detection(Task):
    name = "detection"
    output = "instances"
    trainer = DetectionTrainer
    evaluators = EVALUATORS
    checks = {"thing_classes": check_objects}

    def add_config(self, cfg: CfgNode) -> None:
        add_coco_folder_config(cfg)

    def register_datasets(self, cfg: CfgNode) -> None:
        register_coco_folder(cfg)

    def follow_data(self, cfg: CfgNode, given: Collection[str]) -> None:
        follow_coco_folder(cfg, given)

    def wanted(self, cfg: CfgNode) -> Wanted:
        return wanted_by_detector(cfg)

    def class_names(self, metadata: Metadata) -> Sequence[str]:
        return metadata.get("thing_classes", ())

    def build_predictor(self, cfg: CfgNode, confidence: float) -> Callable[[np.ndarray], dict]:
        cfg = cfg.clone()
        cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = confidence
        cfg.MODEL.RETINANET.SCORE_THRESH_TEST = confidence
        return DetectionPredictor(cfg)

    def results(
        self, outputs: dict, frame: np.ndarray, metadata: Metadata, confidence: float
    ) -> tuple[list[dict], np.ndarray]:
        return detection_results(outputs["instances"], frame, metadata, confidence)

    def page_sections(
        self, keys: Mapping, test_datasets: Sequence[str], folder: Path
    ) -> dict[str, str]:
        return {"Predictions": predictions_section(test_datasets, folder)}


register_task(Detection())
register_shapes()
