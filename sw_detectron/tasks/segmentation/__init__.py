"""Semantic segmentation: PSPNet and its dilated-FCN baseline on any data set of label maps."""

from collections.abc import Sequence

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import Metadata

from ...data.check import Classes, Wanted
from ...task import Task, register_task
from . import dilated_resnet, psp_head  # noqa: F401  they register themselves
from .check import check_label_maps
from .config import add_segmentation_config
from .data import register_configured_folders, register_folders
from .evaluator import build_segmentation_evaluator
from .results import segmentation_results
from .shapes import register_shapes_segmentation
from .trainer import SegmentationTrainer

__all__ = ["SegmentationTrainer", "register_folders", "register_shapes_segmentation"]


class Segmentation(Task):
    name = "segmentation"
    output = "sem_seg"
    meta_architectures = ("SlidingWindowSegmentor",)
    trainer = SegmentationTrainer
    evaluators = {
        "sem_seg": build_segmentation_evaluator,
        # Not by Cityscapes' own scripts, whose mIoU is the same: they also want to be installed.
        "cityscapes_sem_seg": build_segmentation_evaluator,
    }

    checks = {"stuff_classes": check_label_maps}

    def wanted(self, cfg: CfgNode) -> Wanted:
        head = cfg.MODEL.SEM_SEG_HEAD
        return Wanted(
            {"stuff_classes": Classes("MODEL.SEM_SEG_HEAD.NUM_CLASSES", head.NUM_CLASSES)},
            ignore=("MODEL.SEM_SEG_HEAD.IGNORE_VALUE", head.IGNORE_VALUE),
        )

    def add_config(self, cfg: CfgNode) -> None:
        add_segmentation_config(cfg)

    def register_datasets(self, cfg: CfgNode) -> None:
        register_configured_folders(cfg)

    def class_names(self, metadata: Metadata) -> Sequence[str]:
        return metadata.get("stuff_classes", ())

    def results(
        self, outputs: dict, frame: np.ndarray, metadata: Metadata, confidence: float
    ) -> tuple[list[dict], np.ndarray]:
        return segmentation_results(outputs["sem_seg"], frame, metadata)


register_task(Segmentation())
register_shapes_segmentation()
