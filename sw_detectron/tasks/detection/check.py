"""What a detector would trip over in its data sets; see `data.check`."""

import logging
import numbers
from collections.abc import Iterator, Sequence

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.modeling import META_ARCH_REGISTRY, GeneralizedRCNN, PanopticFPN, SemanticSegmentor
from detectron2.structures import BoxMode

from ...data.check import Classes, LoadedSet, Wanted, classes_of
from ...errors import UserError

logger = logging.getLogger(__name__)

_MODES = (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS, BoxMode.XYWHA_ABS)


def wanted_by_detector(cfg: CfgNode) -> Wanted:
    """What one of Detectron2's models, or of others' that are built like them, wants."""
    name, classes = cfg.MODEL.META_ARCHITECTURE, {}
    architecture = META_ARCH_REGISTRY.get(name) if name in META_ARCH_REGISTRY else None
    architecture = architecture if isinstance(architecture, type) else object
    if issubclass(architecture, GeneralizedRCNN):
        classes["thing_classes"] = _classes(cfg, "ROI_HEADS")
    elif "NUM_CLASSES" in cfg.MODEL.get(name.upper(), ()):  # RETINANET, and FCOS where it exists
        classes["thing_classes"] = _classes(cfg, name.upper())
    if issubclass(architecture, (PanopticFPN, SemanticSegmentor)):
        classes["stuff_classes"] = _classes(cfg, "SEM_SEG_HEAD")
    return Wanted(
        classes=classes,
        mask_format=cfg.INPUT.MASK_FORMAT if cfg.MODEL.MASK_ON else "",
        ignore=("MODEL.SEM_SEG_HEAD.IGNORE_VALUE", cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE),
        filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
    )


def _classes(cfg: CfgNode, section: str) -> Classes:
    return Classes(f"MODEL.{section}.NUM_CLASSES", cfg.MODEL[section].NUM_CLASSES)


def check_objects(sets: Sequence[LoadedSet], classes: Classes, wanted: Wanted) -> None:
    """See `data.check.Check`."""
    usable = 0
    for dataset in sets:
        _check_number(dataset, classes)
        _check_sizes(dataset)
        if not dataset.records:
            usable += dataset.training
            continue
        if not any("annotations" in record for record in dataset.records):
            _without_annotations(dataset)
            continue
        _check_annotations(dataset, classes)
        count = _count_usable(dataset)
        if dataset.training:
            usable += count
            _check_masks(dataset, wanted)
        else:
            _check_ids(dataset)
        if not count and not dataset.training:
            _warn_of_no_results(dataset.name)
    trained_on = [dataset.name for dataset in sets if dataset.training]
    if trained_on and not usable:
        raise UserError(
            f"data set {', '.join(map(repr, trained_on))} has no object to train on: no annotation "
            "with a box inside of its image that is not a crowd"
        )


def _check_number(dataset: LoadedSet, classes: Classes) -> None:
    number = len(classes_of(dataset.name, "thing_classes"))
    if not number:
        if dataset.training:
            return  # the numbers of its annotations' classes are looked at
        raise UserError(
            f"data set {dataset.name!r} declares no thing_classes; set "
            f"MetadataCatalog.get({dataset.name!r}).thing_classes to the names of its classes"
        )
    text = f"data set {dataset.name!r} has {number} classes"
    if number > classes.number:
        raise UserError(f"{text}; set {classes.key} to that instead of {classes.number}")
    if number < classes.number:
        logger.warning(f"D{text[1:]}, and {classes.key} is {classes.number}: {number} would do")


def _without_annotations(dataset: LoadedSet) -> None:
    if dataset.training:
        raise UserError(
            f"data set {dataset.name!r} has no objects to train a detector on: its records have no "
            "'annotations'"
        )
    _warn_of_no_results(dataset.name)


def _warn_of_no_results(name: str) -> None:
    logger.warning(
        f"Data set {name!r} has no annotations: predictions are written, and nothing is measured"
    )


def _annotations(dataset: LoadedSet) -> Iterator[tuple[dict, dict]]:
    for record in dataset.records:
        for annotation in record.get("annotations", ()):
            yield record, annotation


def _check_annotations(dataset: LoadedSet, classes: Classes) -> None:
    """Detectron2 knows their boxes' format, and their classes are there."""
    declared = len(classes_of(dataset.name, "thing_classes"))
    limit = declared or classes.number
    for record, annotation in _annotations(dataset):
        category, mode = annotation.get("category_id"), annotation.get("bbox_mode")
        if not isinstance(category, numbers.Integral) or not 0 <= category < limit:
            of = "the data set has" if declared else f"{classes.key} says"
            raise UserError(
                f"data set {dataset.name!r}: an object of {record.get('file_name')!r} has "
                f"category_id {category!r}, but {of} {limit} classes, numbered from 0"
            )
        if mode not in _MODES:
            raise UserError(
                f"data set {dataset.name!r}: an object of {record.get('file_name')!r} has bbox_mode"
                f" {mode!r}; it must be BoxMode.XYXY_ABS, XYWH_ABS or XYWHA_ABS"
            )


def _count_usable(dataset: LoadedSet) -> int:
    """Objects that training can learn from; a warning if others are not crowds."""
    usable = unusable = 0
    for record, annotation in _annotations(dataset):
        if annotation.get("iscrowd"):
            continue
        if _is_inside(annotation, record):
            usable += 1
        else:
            unusable += 1
    if unusable and dataset.training:
        logger.warning(
            f"Data set {dataset.name!r}: {unusable} of {usable + unusable} objects take no part in "
            "training, as their boxes have no area or lie outside of the image"
        )
    return usable


def _is_inside(annotation: dict, record: dict) -> bool:
    x, y, *end = annotation["bbox"]
    mode = annotation["bbox_mode"]
    if mode == BoxMode.XYWHA_ABS:
        return end[0] > 0 and end[1] > 0
    right, bottom = (x + end[0], y + end[1]) if mode == BoxMode.XYWH_ABS else end
    width, height = record.get("width"), record.get("height")
    return bool(
        max(x, 0) < (right if width is None else min(right, width))
        and max(y, 0) < (bottom if height is None else min(bottom, height))
    )


def _check_masks(dataset: LoadedSet, wanted: Wanted) -> None:
    if not wanted.mask_format:
        return
    masks = [
        annotation.get("segmentation")
        for _, annotation in _annotations(dataset)
        if not annotation.get("iscrowd")
    ]
    if masks and not any(mask is not None for mask in masks):
        raise UserError(f"data set {dataset.name!r} has no masks; set MODEL.MASK_ON to False")
    if wanted.mask_format == "polygon" and not all(isinstance(mask, list) for mask in masks):
        raise UserError(
            f"data set {dataset.name!r} has masks that are no polygons; set INPUT.MASK_FORMAT to "
            "bitmask"
        )


def _check_sizes(dataset: LoadedSet) -> None:
    """Images have whole numbers of pixels; only training can do without knowing them."""
    for record in dataset.records:
        for side in ("height", "width"):
            length = record.get(side)
            if length is None and dataset.training:
                continue
            if not isinstance(length, numbers.Integral) or length < 1:
                raise UserError(
                    f"data set {dataset.name!r}: {record.get('file_name')!r} has the {side} "
                    f"{length!r}; it must be the whole number of the image's pixels"
                )


def _check_ids(dataset: LoadedSet) -> None:
    """Evaluation tells images apart."""
    if "coco" in str(MetadataCatalog.get(dataset.name).get("evaluator_type")):
        ids = [record.get("image_id") for record in dataset.records]
        if None in ids or len(set(ids)) < len(ids):
            raise UserError(f"data set {dataset.name!r}: each record needs an image_id of its own")
