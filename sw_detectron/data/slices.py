"""Parts of registered data sets: slices by a name such as "coco_2017_train[:8]", and images spread
evenly."""

import re
from collections.abc import Sequence

from detectron2.data import DatasetCatalog, MetadataCatalog

from ..errors import UserError

SAMPLE = 500
"""Files of a data set that are opened; of larger ones, so many, evenly spread."""

_SLICE = re.compile(r"(?P<base>.+)\[(?P<start>-?\d+|):(?P<stop>-?\d+|)\]", re.DOTALL)


def register_slice(name: str) -> None:
    """Register `BASE[START:STOP]` if `name` is of that form and BASE is registered, or a slice too.

    The slice has BASE's metadata, but for the annotation file: evaluation then takes the ground
    truth of the sliced images alone. Other names, and slices that are there, are left alone.
    Loading a slice without images raises a `UserError`.
    """
    match = _SLICE.fullmatch(name)
    if not match or name in DatasetCatalog.list():
        return
    base = match["base"]
    register_slice(base)
    if base not in DatasetCatalog.list():
        return
    part = slice(*(int(bound) if bound else None for bound in match.group("start", "stop")))

    def load() -> list[dict]:
        records = DatasetCatalog.get(base)
        _copy_metadata(base, name)  # many data sets learn their classes when they are loaded
        sliced = [records[i] for i in range(*part.indices(len(records)))]
        if not sliced:
            raise UserError(f"data set {name!r} is empty: {base!r} has {len(records)} images")
        return sliced

    DatasetCatalog.register(name, load)
    _copy_metadata(base, name)


def register_spread(base: str, number: int) -> str:
    """Register `number` images of a registered data set, spread evenly over it, all if it has no
    more; the new name. Its metadata is as that of a slice."""
    name = f"{base} ({number} images)"
    if name in DatasetCatalog.list():  # BASE may have become another data set since
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)

    def load() -> list[dict]:
        records = DatasetCatalog.get(base)
        _copy_metadata(base, name)
        return spread(records, number)

    DatasetCatalog.register(name, load)
    _copy_metadata(base, name)
    return name


def spread(items: Sequence, number: int = SAMPLE) -> list:
    """All items, or of more than `number` so many, evenly spread."""
    if len(items) <= number:
        return list(items)
    return [items[i * len(items) // number] for i in range(number)]


def _copy_metadata(base: str, name: str) -> None:
    """What the slice does not have yet. `sliced_from` is the data set that has the files."""
    entries = MetadataCatalog.get(base).as_dict()
    entries = {"sliced_from": base} | entries
    there = MetadataCatalog.get(name).as_dict()
    MetadataCatalog.get(name).set(
        **{k: v for k, v in entries.items() if k != "json_file" and k not in there}
    )
