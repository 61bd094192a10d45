"""The trainer of semantic segmentation."""

import os
from collections import OrderedDict

from detectron2.config import CfgNode
from torch import nn

from ..data.sem_seg import check_classes
from ..data.sem_seg_mapper import SemSegMapper
from ..errors import UserError
from ..modeling.segmentor import MultiScaleSegmentor
from .trainer import Trainer


class SegmentationTrainer(Trainer):
    """The `Trainer` of a `SlidingWindowSegmentor`."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """
        Raises:
            UserError: the data sets' classes are not the head's, or the crops do not fit it.
        """
        head = cfg.MODEL.SEM_SEG_HEAD
        names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
        check_classes(names, head.NUM_CLASSES, head.IGNORE_VALUE)
        if any(side % 8 != 1 for side in cfg.INPUT.CROP.SIZE):
            raise UserError(
                f"INPUT.CROP.SIZE {tuple(cfg.INPUT.CROP.SIZE)}: height and width must be a "
                "multiple of 8, plus 1"
            )
        return super().build_model(cfg)

    @classmethod
    def build_mapper(cls, cfg: CfgNode, is_train: bool) -> SemSegMapper:
        return SemSegMapper(cfg, is_train)

    @classmethod
    def test_with_augmentation(cls, cfg: CfgNode, model: nn.Module) -> OrderedDict:
        """Evaluate with TEST.AUG's scales and flips; the results' names end in `_TTA`."""
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        unscaled = cfg.clone()
        unscaled.defrost()
        unscaled.INPUT.MIN_SIZE_TEST = 0
        results = cls.test(unscaled, MultiScaleSegmentor(cfg, model), evaluators)
        return OrderedDict((f"{task}_TTA", values) for task, values in results.items())
