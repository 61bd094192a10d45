"""Image classification: ImageNet, CIFAR, and folders of classes."""

import os
from collections.abc import Callable, Sequence

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import Metadata

from ...data.check import Classes, Wanted
from ...task import Task, register_task
from .check import check_labels
from .config import add_classification_config
from .data import register_class_folders, register_classification
from .evaluator import ClassificationEvaluator
from .model import ImageClassifier
from .results import ClassPredictor, classification_results
from .shapes import register_shape_classes
from .trainer import ClassificationTrainer

__all__ = [
    "ClassificationTrainer",
    "ImageClassifier",
    "register_class_folders",
    "register_classification",
    "register_shape_classes",
]


class Classification(Task):
    name = "classification"
    output = "scores"
    meta_architectures = ("ImageClassifier",)
    confidence = 0.0  # the best classes have something to say even if none is likely
    trainer = ClassificationTrainer
    evaluators = {"classification": lambda dataset_name, folder: ClassificationEvaluator()}

    checks = {"list_classes": check_labels}

    def wanted(self, cfg: CfgNode) -> Wanted:
        key = "MODEL.CLASSIFIER.NUM_CLASSES"
        return Wanted({"list_classes": Classes(key, cfg.MODEL.CLASSIFIER.NUM_CLASSES)})

    def add_config(self, cfg: CfgNode) -> None:
        add_classification_config(cfg)

    def register_datasets(self, cfg: CfgNode) -> None:
        if not cfg.DATASETS.FOLDER:
            return
        for split in ("train", "val"):
            register_class_folders(
                f"folder_{split}",
                os.path.join(cfg.DATASETS.FOLDER, split),
                remedy="set DATASETS.FOLDER to a folder with train/CLASS/* and val/CLASS/*",
            )

    def class_names(self, metadata: Metadata) -> Sequence[str]:
        list_classes = metadata.get("list_classes")
        return list_classes() if list_classes else ()

    def build_predictor(self, cfg: CfgNode, confidence: float) -> Callable[[np.ndarray], dict]:
        return ClassPredictor(cfg)

    def results(
        self, outputs: dict, frame: np.ndarray, metadata: Metadata, confidence: float
    ) -> tuple[list[dict], np.ndarray]:
        classes = self.class_names(metadata)
        return classification_results(outputs["scores"], frame, classes, metadata.name, confidence)


register_task(Classification())
register_classification()
register_shape_classes()
