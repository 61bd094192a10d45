"""What a segmentor would trip over in its data sets, or learn wrongly; see `data.check`."""

import logging
from collections.abc import Sequence

import numpy as np
from detectron2.data import MetadataCatalog

from ...data.check import (
    Classes,
    LoadedSet,
    Wanted,
    check_files_there,
    classes_of,
    image_size,
    progress,
    spread,
)
from ...errors import UserError
from .data import check_classes, read_labels

logger = logging.getLogger(__name__)

_FILES_A_CLASS = 20
"""From so many label files for each class, one that is in none of them is worth a warning."""


def check_label_maps(sets: Sequence[LoadedSet], classes: Classes, wanted: Wanted) -> None:
    """See `data.check.Check`."""
    check_classes([dataset.name for dataset in sets], classes.number, wanted.ignore[1])
    for dataset in sets:
        records = dataset.records
        if any("sem_seg_file_name" not in record for record in records):
            raise UserError(f"data set {dataset.name!r} has images without label maps")
        labels = [record["sem_seg_file_name"] for record in records]
        check_files_there(dataset.name, "label maps", labels)
        if records:
            _look_at_labels(dataset, wanted)


def _look_at_labels(dataset: LoadedSet, wanted: Wanted) -> None:
    """Labels are those of the classes, of the images' sizes; every class is somewhere.

    Raises:
        UserError: a label map cannot be read, has other labels, or another size than its image.
    """
    names = classes_of(dataset.name, "stuff_classes")
    ignore_label = MetadataCatalog.get(dataset.name).ignore_label
    sample = spread(dataset.records)
    pixels, ignored = np.zeros(len(names), np.int64), 0
    for record in progress(sample, dataset.name):
        path = record["sem_seg_file_name"]
        ids = record.get("label_ids", ())
        labels = read_labels(path, len(names), ignore_label, np.int64, ids)
        size = image_size(record["file_name"])
        if labels.shape[::-1] != size:
            raise UserError(
                f"image {record['file_name']!r} has {size[0]} x {size[1]} pixels, its labels "
                f"{path!r} have {labels.shape[1]} x {labels.shape[0]}"
            )
        there = labels != ignore_label
        pixels += np.bincount(labels[there], minlength=len(names))
        ignored += there.size - np.count_nonzero(there)
    absent = [f"{number} {names[number]!r}" for number in np.flatnonzero(pixels == 0)]
    enough = len(sample) == len(dataset.records) or len(sample) >= _FILES_A_CLASS * len(names)
    if not absent or not (enough or len(names) - len(absent) < 2):
        return
    hint = ""
    if ignored:
        share = ignored / (ignored + pixels.sum())
        hint = (
            f"; {share:.0%} of the pixels have {ignore_label}, the label to ignore "
            f"({wanted.ignore[0]}): if it stands for a class, write that class's number instead"
        )
    logger.warning(
        f"Data set {dataset.name!r}: no pixel of {'class' if len(absent) == 1 else 'classes'} "
        f"{', '.join(absent[:5])}{', …' if len(absent) > 5 else ''} in {len(sample)} of "
        f"{len(dataset.records)} label maps{hint}"
    )
