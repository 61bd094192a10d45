"""Which evaluator measures a data set, by the type its metadata declares."""

import functools
import os

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
)

from ..data.sem_seg import read_labels
from ..errors import UserError
from .classification import ClassificationEvaluator


def build_evaluator(
    cfg: CfgNode, dataset_name: str, output_folder: str | None = None
) -> DatasetEvaluator:
    """The evaluator of a registered data set.

    Args:
        output_folder: where predictions and results are written; OUTPUT_DIR/inference if None.

    Raises:
        UserError: the data set declares no type, or one that has no evaluator.
    """
    folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")

    # use_fast_impl=False: pycocotools, as Detectron2's own C++ evaluation needs its compiled part.
    def coco() -> DatasetEvaluator:
        metadata = MetadataCatalog.get(dataset_name)
        if metadata.get("sliced_from"):
            # Detectron2 writes the annotations of a slice to the output folder, and remembers them:
            # the folder of another run in this process may be gone.
            vars(metadata).pop("json_file", None)
        return COCOEvaluator(dataset_name, output_dir=folder, use_fast_impl=False)

    def semantic() -> DatasetEvaluator:
        metadata = MetadataCatalog.get(dataset_name)
        read = functools.partial(
            read_labels,
            num_classes=len(metadata.stuff_classes),
            ignore_label=metadata.ignore_label,
        )
        return SemSegEvaluator(dataset_name, output_dir=folder, sem_seg_loading_fn=read)

    builders = {
        "classification": ClassificationEvaluator,
        "coco": coco,
        "sem_seg": semantic,
        "coco_panoptic_seg": lambda: DatasetEvaluators(
            [semantic(), coco(), COCOPanopticEvaluator(dataset_name, folder)]
        ),
        "cityscapes_instance": lambda: CityscapesInstanceEvaluator(dataset_name),
        # Not by Cityscapes' own scripts, whose mIoU is the same: they also want to be installed.
        "cityscapes_sem_seg": semantic,
        "pascal_voc": lambda: PascalVOCDetectionEvaluator(dataset_name),
        "lvis": lambda: LVISEvaluator(dataset_name, output_dir=folder),
    }
    kind = getattr(MetadataCatalog.get(dataset_name), "evaluator_type", None)
    if kind not in builders:
        raise UserError(
            f"data set {dataset_name!r} declares evaluator_type {kind!r}; known: "
            f"{', '.join(builders)}"
        )
    return builders[kind]()
