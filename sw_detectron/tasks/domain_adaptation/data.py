"""Source and target data sets: GTA5, and the images of Cityscapes."""

import logging
from pathlib import Path

from detectron2.data import MetadataCatalog

from ...data.check import image_size, progress
from ...data.image_folders import register_images
from ...data.registration import datasets_root, register_dataset
from ..segmentation.data import load_records

logger = logging.getLogger(__name__)

CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""What label files of GTA5, and Cityscapes' `labelIds`, have for each of the 19 classes that are
trained; all else is ignored (Cordts et al., 2016)."""


def register_adaptation_datasets() -> None:
    """Register `gta5_train`, and `cityscapes_images_train`, which has no labels, below
    DETECTRON2_DATASETS."""
    root = datasets_root()
    images, labels = root / "gta5/images", root / "gta5/labels"
    register_dataset(
        "gta5_train",
        lambda: load_gta5("gta5_train", images, labels),
        image_root=str(images),
        sem_seg_root=str(labels),
        stuff_classes=MetadataCatalog.get("cityscapes_fine_sem_seg_train").stuff_classes,
        ignore_label=255,
        label_ids=CITYSCAPES_IDS,
        evaluator_type="sem_seg",
    )
    register_images("cityscapes_images_train", str(root / "cityscapes/leftImg8bit/train"), None)


def load_gta5(name: str, images: Path, labels: Path) -> list[dict]:
    """The records of GTA5, but for those of its images that differ in size from their labels.

    Raises:
        UserError: there are no images, or one has no labels.
    """
    records = load_records(name, images, labels, CITYSCAPES_IDS)
    fitting, others = [], []
    for record in progress(records, name):
        (fitting if _sizes_agree(record) else others).append(record)
    if others:
        logger.warning(
            f"Data set {name!r} without {len(others)} of {len(records)} images, whose labels have "
            f"another size, such as {others[0]['file_name']!r}"
        )
    return fitting


def _sizes_agree(record: dict) -> bool:
    return image_size(record["file_name"]) == image_size(record["sem_seg_file_name"])
