"""Detectron2's evaluator of semantic segmentation, for label maps of any kind."""

import functools

from detectron2.data import MetadataCatalog
from detectron2.evaluation import SemSegEvaluator

from .data import read_labels


def build_segmentation_evaluator(dataset_name: str, folder: str) -> SemSegEvaluator:
    """The evaluator of a registered data set; it writes its predictions to `folder`."""
    metadata = MetadataCatalog.get(dataset_name)
    read = functools.partial(
        read_labels,
        num_classes=len(metadata.stuff_classes),
        ignore_label=metadata.ignore_label,
        label_ids=metadata.get("label_ids", ()),
    )
    return SemSegEvaluator(dataset_name, output_dir=folder, sem_seg_loading_fn=read)
