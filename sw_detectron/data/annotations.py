"""Which annotations of objects can be used, and COCO's files made safe to read."""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pycocotools.mask as mask_util
from detectron2.data import MetadataCatalog
from detectron2.structures import BoxMode
from pycocotools.coco import COCO

from ..errors import UserError

_FARTHEST = 1e6
"""Pixels from the image's corner; what draws polygons takes memory by their coordinates."""

NO_BOX = "have no box of four finite numbers"
NO_MASK = "have no mask (three points or more, or an RLE of the image's size)"


def has_box(annotation: dict) -> bool:
    """Whether `bbox` is a list of four finite numbers, or of five if `bbox_mode` has an angle."""
    try:
        wanted = 5 if annotation.get("bbox_mode") == BoxMode.XYWHA_ABS else 4
        return len(annotation["bbox"]) == wanted and math.isfinite(sum(annotation["bbox"]))
    except (KeyError, TypeError, OverflowError, ValueError):
        return False


def usable_mask(segmentation: object, height: int | None, width: int | None) -> object:
    """The part of a segmentation that can be drawn; None if there is none.

    Args:
        segmentation: polygons, an RLE (compressed or not), or a bool array (height, width).
        height, width: of the image; None if the mask alone knows.
    """
    if isinstance(segmentation, np.ndarray):
        fits = segmentation.ndim == 2 and height in (None, segmentation.shape[0])
        return segmentation if fits and width in (None, segmentation.shape[1]) else None
    if isinstance(segmentation, dict):
        return segmentation if _rle_fits(segmentation, height, width) else None
    if not isinstance(segmentation, (list, tuple)):
        return None
    polygons = [polygon for polygon in segmentation if _is_polygon(polygon)]
    return (segmentation if len(polygons) == len(segmentation) else polygons) or None


def _is_polygon(points: object) -> bool:
    try:
        return (
            len(points) >= 6
            and len(points) % 2 == 0
            and math.isfinite(sum(points))  # NaN, which max and min may pass over
            and max(points) <= _FARTHEST
            and min(points) >= -_FARTHEST
        )
    except (TypeError, OverflowError, ValueError):
        return False


def _rle_fits(rle: dict, height: int | None, width: int | None) -> bool:
    """Whether its runs fill the image; decoding others would read what is not theirs."""
    try:
        counts, (rows, columns) = rle["counts"], rle["size"]
        if height not in (None, rows) or width not in (None, columns):
            return False
        runs = np.array(counts) if isinstance(counts, (list, tuple)) else _run_lengths(counts)
        return runs.dtype.kind == "i" and runs.min() >= 0 and runs.sum() == rows * columns
    except (KeyError, TypeError, OverflowError, ValueError, IndexError):
        return False


def _run_lengths(counts: str | bytes) -> np.ndarray:
    """The runs of COCO's compressed RLE: base 32, and from the fourth on less the last but one."""
    text = np.frombuffer(counts.encode() if isinstance(counts, str) else counts, np.uint8)
    digits = text.astype(np.int64) - 48
    if digits.min() < 0 or digits.max() > 63 or digits[-1] & 32:
        raise ValueError("no compressed RLE")
    last = np.flatnonzero(digits & 32 == 0)
    first = np.concatenate([[0], last[:-1] + 1])
    if (last - first).max() > 6:
        raise ValueError("a run that no image has")
    place = np.arange(len(digits)) - np.repeat(first, last - first + 1)
    runs = np.add.reduceat((digits & 31) << (5 * place), first)
    runs -= np.where(digits[last] & 16, 1 << (5 * (last - first + 1)), 0)  # the sign
    runs[1::2], runs[2::2] = runs[1::2].cumsum(), runs[2::2].cumsum()
    return runs


def drop_unusable(
    records: list[dict], masks: bool, mended: bool
) -> tuple[list[dict], Counter[str]]:
    """Records without the annotations that no detector can read, and how many these were.

    Args:
        records: in Detectron2's format; those that change are copied.
        masks: whether masks are wanted too. If no annotation has one, all are kept.
        mended: the masks that are there have been looked at.
    """
    dropped, kept = Counter(), []
    if masks:
        masks = any("segmentation" in a for r in records for a in r.get("annotations", ()))
    for record in records:
        usable = [
            a
            for a in record.get("annotations", ())
            if (reason := _defect(a, record, masks, mended)) is None or dropped.update([reason])
        ]
        if len(usable) != len(record.get("annotations", ())):
            record = record | {"annotations": usable}
        kept.append(record)
    return kept, dropped


def _defect(annotation: dict, record: dict, masks: bool, mended: bool) -> str | None:
    if not has_box(annotation):
        return NO_BOX
    if not masks or annotation.get("iscrowd") or (mended and "segmentation" in annotation):
        return None
    size = record.get("height"), record.get("width")
    return None if usable_mask(annotation.get("segmentation"), *size) is not None else NO_MASK


@contextmanager
def mended_coco_files(name: str) -> Iterator[list[Counter[str]]]:
    """While it lasts, pycocotools reads annotation files through `mend_coco`.

    Args:
        name: of the data set, for errors.

    Yields:
        What was left out of each file that has been read.
    """
    metadata = MetadataCatalog.get(name)
    metadata = MetadataCatalog.get(metadata.get("sliced_from", name))
    where = f"data set {name!r}: {metadata.get('json_file', 'its annotation file')}"
    create_index, found = COCO.createIndex, []

    @functools.wraps(create_index)
    def create_mended_index(coco: COCO) -> None:
        found.append(mend_coco(coco.dataset, where))
        create_index(coco)

    with mock.patch.object(COCO, "createIndex", create_mended_index):
        yield found


def mend_coco(content: dict, where: str) -> Counter[str]:
    """Make the content of an annotation file of COCO's format safe to read, in place.

    Annotations that cannot be used are left out, and masks that cannot be drawn. The others get
    what pycocotools takes for granted, and ids from 1 on: evaluation takes 0 for "no match".

    Args:
        where: the file, for errors.

    Returns:
        How many annotations were left out, or lost their mask, by reason.

    Raises:
        UserError: images, categories and annotations contradict each other.
    """
    images = _list_of(content, "images", where)
    categories = _list_of(content, "categories", where)
    if not categories:
        raise UserError(f"{where} has no categories; list the classes under 'categories'")
    _check_ids(images, "images", where, (int, str))
    _check_ids(categories, "categories", where, (int,))
    for category in categories:
        if not isinstance(category.get("name"), str):
            raise UserError(f"{where}: the category with id {category['id']!r} has no name")
    sizes = {image["id"]: _check_image(image, where) for image in images}
    if "annotations" not in content:  # as of COCO's test images
        return Counter()
    annotations = _list_of(content, "annotations", where, of_objects=False)
    left_out, kept, unknown = Counter(), [], Counter()
    categories = content["categories"] = _without_heading(categories, annotations)
    known = {category["id"] for category in categories}
    for annotation in annotations:
        reason = _coco_defect(annotation, sizes)
        if reason:
            left_out[reason] += 1
            continue
        category = annotation.get("category_id")
        if not isinstance(category, (int, float)) or category not in known:
            unknown[repr(category)] += 1
        kept.append(annotation)
    if unknown:
        first, count = unknown.most_common(1)[0]
        raise UserError(
            f"{where} has {count} annotations of category_id {first}, which is not among its "
            f"{len(known)} categories; add the category, or take the annotations out"
        )
    if "minival" not in where:  # COCO 2014's have ids twice; Detectron2 lets them pass too
        _check_unique([a["id"] for a in kept if "id" in a], "annotations", where)
    for number, annotation in enumerate(kept, start=1):
        annotation["id"] = number
        if not _complete(annotation, *sizes[annotation["image_id"]]):
            left_out[f"{NO_MASK}, and count as boxes alone"] += 1
    content["annotations"] = kept
    return left_out


def _without_heading(categories: list[dict], annotations: list) -> list[dict]:
    """Without the project's name, which Roboflow puts among the classes as what is above them."""
    above = [category.get("supercategory") for category in categories]
    used = [a.get("category_id") for a in annotations if isinstance(a, dict)]
    return [
        category
        for category in categories
        if category.get("supercategory") != "none"
        or category["name"] not in above
        or category["id"] in used
    ]


def _list_of(content: dict, key: str, where: str, of_objects: bool = True) -> list:
    items = content.get(key)
    if not isinstance(items, list) or (
        of_objects and not all(isinstance(item, dict) for item in items)
    ):
        raise UserError(f"{where} has no list of {key!r}: it is not of COCO's format")
    return items


def _check_ids(items: list[dict], what: str, where: str, kinds: tuple[type, ...]) -> None:
    found = {type(item.get("id")) for item in items}
    if len(found) > 1 or not found <= set(kinds):
        raise UserError(f"{where}: {what} without an 'id', or with ids that are no whole numbers")
    _check_unique([item["id"] for item in items], what, where)


def _check_unique(ids: list, what: str, where: str) -> None:
    try:
        ids, times = zip(*Counter(ids).most_common(1)) if ids else ((None,), (1,))
    except TypeError:
        raise UserError(f"{where}: {what} with ids that are no whole numbers") from None
    if times[0] > 1:
        raise UserError(
            f"{where} has {times[0]} {what} with the id {ids[0]!r}; give each an id of its own"
        )


def _check_image(image: dict, where: str) -> tuple[int, int]:
    """Its height and width, made whole numbers."""
    if not isinstance(image.get("file_name"), str) or not image["file_name"]:
        raise UserError(f"{where}: the image with id {image['id']!r} has no file_name")
    for side in ("height", "width"):
        length = image.get(side)
        number = isinstance(length, (int, float)) and not isinstance(length, bool)
        if not (number and 0 < length < math.inf and length == int(length)):
            raise UserError(
                f"{where}: {image['file_name']!r} has the {side} {length!r}; it must be the whole "
                "number of the image's pixels"
            )
        image[side] = int(length)
    return image["height"], image["width"]


def _coco_defect(annotation: object, sizes: dict) -> str | None:
    if not isinstance(annotation, dict):
        return "are no objects with keys"
    image = annotation.get("image_id")
    if not isinstance(image, (int, float, str)) or image not in sizes:
        return "belong to none of its images"
    if not has_box(annotation):
        return NO_BOX
    if annotation.get("iscrowd") not in (None, 0, 1):
        return "have an iscrowd other than 0 and 1"
    return None


def _complete(annotation: dict, height: int, width: int) -> bool:
    """Fill in what may be missing; whether the mask, if there is one, can be drawn."""
    # What is to be ignored is neither right nor wrong when found, as a crowd.
    ignored = annotation.pop("ignore", 0)
    annotation["iscrowd"] = int(bool(annotation.get("iscrowd") or ignored))
    segmentation = annotation.pop("segmentation", None)
    usable = usable_mask(segmentation, height, width) if segmentation else None
    if usable is not None:
        annotation["segmentation"] = usable
    area = annotation.get("area")
    if not isinstance(area, (int, float)) or not math.isfinite(area):
        annotation["area"] = _area(annotation, height, width)
    return usable is not None or not segmentation


def _area(annotation: dict, height: int, width: int) -> float:
    if "segmentation" not in annotation:
        return annotation["bbox"][2] * annotation["bbox"][3]
    mask = mask_util.frPyObjects(annotation["segmentation"], height, width)
    return float(mask_util.area(mask_util.merge(mask) if isinstance(mask, list) else mask))
