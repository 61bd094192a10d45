"""What a classifier would trip over in its data sets; see `data.check`."""

import logging
import numbers
from collections import Counter
from collections.abc import Sequence

from ...data.check import Classes, LoadedSet, Wanted
from ...errors import UserError
from .data import check_classes, class_names

logger = logging.getLogger(__name__)


def check_labels(sets: Sequence[LoadedSet], classes: Classes, wanted: Wanted) -> None:
    """See `data.check.Check`."""
    if sets:
        check_classes(tuple(dataset.name for dataset in sets), classes.number)
    for dataset in sets:
        images = Counter()
        for record in dataset.records:
            label = record.get("label")
            if not isinstance(label, numbers.Integral) or not 0 <= label < classes.number:
                raise UserError(
                    f"data set {dataset.name!r}: {record.get('file_name', 'an image')!r} has the "
                    f"label {label!r}, but there are {classes.number} classes, numbered from 0"
                )
            images[label] += 1
        names = class_names(dataset.name)
        absent = [name for number, name in enumerate(names) if number not in images]
        if absent and dataset.training and dataset.records:
            logger.warning(
                f"Data set {dataset.name!r} has no image of {len(absent)} of its {len(names)} "
                f"classes, such as {absent[0]!r}"
            )
