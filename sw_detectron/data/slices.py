"""The first images of a registered data set, by a name such as "coco_2017_train[:8]"."""

import re

from detectron2.data import DatasetCatalog, MetadataCatalog

_SLICE = re.compile(r"(?P<base>.+)\[(?P<start>\d*):(?P<stop>\d*)\]")


def register_slice(name: str) -> None:
    """Register `BASE[START:STOP]` if `name` is of that form and BASE is registered.

    The slice has BASE's metadata, but for the annotation file: evaluation then takes the ground
    truth of the sliced images alone. Other names, and slices that are there, are left alone.
    """
    match = _SLICE.fullmatch(name)
    if not match or match["base"] not in DatasetCatalog.list() or name in DatasetCatalog.list():
        return
    base = match["base"]
    part = slice(*(int(bound) if bound else None for bound in match.group("start", "stop")))
    DatasetCatalog.register(name, lambda: DatasetCatalog.get(base)[part])
    metadata = MetadataCatalog.get(base).as_dict()
    del metadata["name"]
    metadata.pop("json_file", None)
    MetadataCatalog.get(name).set(**metadata, sliced_from=base)
