"""The generated shapes as a semantic segmentation data set: the background and four shapes."""

import json
import os
from collections.abc import Callable
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
        register_labelled_shapes(f"shapes_sem_seg_{split}", root, split, root / split)


def register_labelled_shapes(
    name: str,
    root: Path,
    split: str,
    images: Path,
    make_images: Callable[[], None] = lambda: None,
) -> None:
    """Register a split of `generate_shapes` as a data set with its label maps.

    Args:
        images: a folder with an image for each of the split's.
        make_images: makes this folder, once the split itself is there.
    """
    labels = root / "labels" / split

    def load() -> list[dict]:
        shapes.generate_shapes(root, split, shapes.SPLIT_SIZES[split])
        generate_labels(root, split)
        make_images()
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
        label_map[mask_of(shape, *label_map.shape)] = shape["category_id"]
    with whole_folder(folder) as made:
        for image in tqdm(content["images"], desc=folder.name, unit="image", delay=2):
            Image.fromarray(labels[image["id"]]).save(made / image["file_name"])


def mask_of(shape: dict, height: int, width: int) -> np.ndarray:
    """The pixels of a shape that can be seen, bool, (height, width), from its annotation."""
    outline = mask_util.merge(mask_util.frPyObjects(shape["segmentation"], height, width))
    return mask_util.decode(outline).astype(bool)
