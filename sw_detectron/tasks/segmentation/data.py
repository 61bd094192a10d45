"""Data sets of images and label maps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from PIL import Image

from ...data.images import ImageFolder, why_unreadable
from ...data.registration import register_dataset
from ...errors import UserError

_KEYS = ("IMAGES", "LABELS", "CLASSES", "IGNORE_LABEL", "LABEL_IDS")


def read_labels(
    path: str, num_classes: int, ignore_label: int, dtype=None, label_ids: Sequence[int] = ()
) -> np.ndarray:
    """The labels of an image, (H, W): the pixel values of a file with one channel, or with a
    palette, which is left unread.

    Args:
        num_classes: labels are from 0 and below it, or `ignore_label`.
        dtype: of the result; by default the smallest that holds them all.
        label_ids: what the file has for each class, all else being ignored; empty: its number.

    Raises:
        UserError: the file is no label map, or has other labels.
    """
    try:
        with Image.open(path) as image:
            labels = np.array(image)
    except Exception as error:
        raise UserError(f"labels {path!r} cannot be read: {why_unreadable(error)}") from None
    if labels.ndim != 2:
        raise UserError(
            f"labels {path!r} have {labels.shape[2]} channels; a label map has one, whose values "
            "are the classes' numbers"
        )
    if label_ids:
        labels = _classes_of_ids(labels, label_ids, ignore_label)
    is_class = (labels >= 0) & (labels < num_classes) & (labels % 1 == 0)
    wrong = labels[~is_class & (labels != ignore_label)]
    if wrong.size:
        raise UserError(
            f"labels {path!r} have the value {wrong[0]}, but there are {num_classes} classes, "
            f"numbered from 0, and the label to ignore is {ignore_label}"
        )
    smallest = np.result_type(*map(np.min_scalar_type, (num_classes - 1, ignore_label)))
    return labels.astype(dtype or smallest)


def _classes_of_ids(labels: np.ndarray, label_ids: Sequence[int], ignore_label: int) -> np.ndarray:
    order = np.argsort(label_ids)
    ids = np.asarray(label_ids)[order]
    found = np.searchsorted(ids, labels).clip(max=len(ids) - 1)
    return np.where(ids[found] == labels, order[found], ignore_label)


def check_label_size(record: dict, image: np.ndarray) -> None:
    """An image and the label file of its record have the same height and width.

    Raises:
        UserError: they have not.
    """
    try:
        with Image.open(record["sem_seg_file_name"]) as labels:
            width, height = labels.size
    except Exception as error:
        path = record["sem_seg_file_name"]
        raise UserError(f"labels {path!r} cannot be read: {why_unreadable(error)}") from None
    if image.shape[:2] != (height, width):
        raise UserError(
            f"image {record['file_name']!r} has {image.shape[1]} x {image.shape[0]} pixels, its "
            f"labels {record['sem_seg_file_name']!r} have {width} x {height}"
        )


def check_classes(names: Sequence[str], num_classes: int, ignore_label: int) -> None:
    """Registered data sets of label maps have the given classes and label to ignore.

    Raises:
        UserError: one has not, or no label maps at all.
    """
    for name in names:
        metadata = MetadataCatalog.get(name)
        classes = metadata.get("stuff_classes")
        if not classes or metadata.get("ignore_label") is None:
            raise UserError(f"data set {name!r} has no label maps")
        if len(classes) != num_classes:
            raise UserError(
                f"data set {name!r} has {len(classes)} classes; set "
                f"MODEL.SEM_SEG_HEAD.NUM_CLASSES to that instead of {num_classes}"
            )
        if metadata.ignore_label != ignore_label:
            raise UserError(
                f"data set {name!r} ignores the label {metadata.ignore_label}; set "
                f"MODEL.SEM_SEG_HEAD.IGNORE_VALUE to that instead of {ignore_label}"
            )


def register_configured_folders(cfg: CfgNode) -> None:
    """Register the data sets that DATASETS.SEM_SEG_FOLDERS describes; see `register_folders`.

    Raises:
        UserError: a description lacks a key, or has one that is unknown.
    """
    for name, folder in cfg.DATASETS.SEM_SEG_FOLDERS.items():
        keys = set(folder) if isinstance(folder, dict) else set()
        if keys - set(_KEYS) or not keys >= set(_KEYS[:3]):
            raise UserError(
                f"DATASETS.SEM_SEG_FOLDERS.{name} has the keys {', '.join(sorted(keys)) or 'none'};"
                " it takes IMAGES, LABELS, CLASSES, IGNORE_LABEL if it is not 255, and LABEL_IDS "
                "if files have other values than the numbers of classes"
            )
        classes = folder.CLASSES
        if isinstance(classes, int):
            classes = [str(number) for number in range(classes)]
        label_ids = folder.get("LABEL_IDS", ())
        if label_ids and len(set(label_ids)) != len(classes):
            raise UserError(
                f"DATASETS.SEM_SEG_FOLDERS.{name}: LABEL_IDS are {len(set(label_ids))} different "
                f"values, but there are {len(classes)} classes"
            )
        register_folders(
            name, folder.IMAGES, folder.LABELS, classes, folder.get("IGNORE_LABEL", 255), label_ids
        )


def register_folders(
    name: str,
    images: str,
    labels: str,
    classes: Sequence[str],
    ignore_label: int = 255,
    label_ids: Sequence[int] = (),
) -> None:
    """Register a data set of images and label maps, in the place of one of that name.

    Args:
        images: a folder of image files.
        labels: a folder with a file STEM.png for each image STEM.*, in the same subfolder; its
            values are the classes' numbers from 0, or `ignore_label`.
        classes: their names.
        label_ids: see `read_labels`.
    """
    register_dataset(
        name,
        lambda: load_records(name, Path(images), Path(labels), label_ids),
        image_root=images,
        sem_seg_root=labels,
        stuff_classes=list(classes),
        ignore_label=ignore_label,
        label_ids=list(label_ids),
        evaluator_type="sem_seg",
        remedy=f"set DATASETS.SEM_SEG_FOLDERS.{name} to the folders of images and labels",
    )


def load_records(
    name: str, images: Path, labels: Path, label_ids: Sequence[int] = ()
) -> list[dict]:
    """The records of a data set's images, in the order of their paths; see `register_folders`.

    Raises:
        UserError: there are no images, or one has no labels.
    """
    files = ImageFolder(images).files
    records = [
        {
            "file_name": str(file),
            "sem_seg_file_name": str((labels / file.relative_to(images)).with_suffix(".png")),
        }
        for file in files
    ]
    for record in records:
        if label_ids:
            record["label_ids"] = list(label_ids)
        if not Path(record["sem_seg_file_name"]).is_file():
            raise UserError(
                f"data set {name!r} has an image {record['file_name']!r}, but no labels "
                f"{record['sem_seg_file_name']!r}"
            )
    return records
