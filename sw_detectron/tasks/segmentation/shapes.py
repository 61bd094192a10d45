"""The generated shapes as a semantic segmentation data set: the background and four shapes."""

import json
import os
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
from PIL import Image
from tqdm import tqdm

from ...data import shapes
from ...data.registration import register_dataset, whole_folder
from .data import load_records

CLASS_NAMES = ("background", *shapes.CLASS_NAMES)


def register_shapes_segmentation(root: str | os.PathLike | None = None) -> None:
    """Register `shapes_sem_seg_train` and `shapes_sem_seg_val` in Detectron2's catalogs.

    They have the images of the data sets of `register_shapes`, and are made when they are loaded
    for the first time. Registering again is harmless; with another root it moves them there.

    Args:
        root: folder of the images and labels; see `register_shapes`.
    """
    root = shapes.default_root() if root is None else Path(root)
    for split in shapes.SPLIT_SIZES:
        _register_split(root, split)


def _register_split(root: Path, split: str) -> None:
    name = f"shapes_sem_seg_{split}"
    images, labels = root / split, root / "labels" / split

    def load() -> list[dict]:
        shapes.generate_shapes(root, split, shapes.SPLIT_SIZES[split])
        generate_labels(root, split)
        return load_records(name, images, labels)

    register_dataset(
        name,
        load,
        image_root=str(images),
        sem_seg_root=str(labels),
        evaluator_type="sem_seg",
        generated=True,  # its files need not be there before it is loaded
        stuff_classes=list(CLASS_NAMES),
        ignore_label=255,
    )


def generate_labels(root: Path, split: str) -> None:
    """Write the label maps of a split of `generate_shapes` to `root/labels/<split>/*.png`.

    A folder that is there is left as it is. It appears only when all of it is made.
    """
    folder = root / "labels" / split
    if folder.is_dir():
        return
    content = json.loads((root / "annotations" / f"{split}.json").read_text())
    labels = {
        image["id"]: np.zeros((image["height"], image["width"]), dtype=np.uint8)
        for image in content["images"]
    }
    # Outlines are of what can be seen of a shape, so they do not overlap but at their very edges.
    for shape in content["annotations"]:
        label_map = labels[shape["image_id"]]
        mask = mask_util.merge(mask_util.frPyObjects(shape["segmentation"], *label_map.shape))
        label_map[mask_util.decode(mask).astype(bool)] = shape["category_id"]
    with whole_folder(folder) as made:
        for image in tqdm(content["images"], desc=folder.name, unit="image", delay=2):
            Image.fromarray(labels[image["id"]]).save(made / image["file_name"])
