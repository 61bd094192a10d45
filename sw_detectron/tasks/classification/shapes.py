"""A small classification data set that needs no download: one coloured shape on each image."""

import logging
import os
import zlib
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from ...data.registration import datasets_root, whole_folder
from ...data.shapes import CLASS_NAMES, draw_single_shape
from .data import find_images, register_images

logger = logging.getLogger(__name__)

SPLIT_SIZES = {"train": 2000, "val": 400}
"""Images in each split that `register_shape_classes` makes."""
IMAGE_SIZE = 48  # pixels


def generate_shape_classes(
    folder: str | os.PathLike, split: str, num_images: int, seed: int = 0, size: int = IMAGE_SIZE
) -> None:
    """Write images to `folder/CLASS/<index>.png`, all of them or none.

    A folder that is already there is left as it is. When several processes generate the same
    split, the first one to finish wins.

    Args:
        folder: of this split.
        split: its name; splits of different names hold different images.
        seed: the same arguments give the same files, bit for bit.
        size: side of the square images in pixels.
    """
    folder = Path(folder)
    if folder.is_dir():
        return
    logger.info(f"Generating {num_images} images of single shapes in {folder}")
    with whole_folder(folder) as images:
        for name in CLASS_NAMES:
            (images / name).mkdir()
        # The bar shows only when the work takes longer than a moment.
        for index in tqdm(range(num_images), desc=f"shapes_cls_{split}", unit="image", delay=2):
            rng = np.random.default_rng([seed, zlib.crc32(b"class " + split.encode()), index])
            pixels, label = draw_single_shape(rng, size)
            Image.fromarray(pixels).save(images / CLASS_NAMES[label] / f"{index:06d}.png")


def register_shape_classes(root: str | os.PathLike | None = None) -> None:
    """Register `shapes_cls_train` and `shapes_cls_val`; loading one generates it if it is missing.

    Args:
        root: folder of both. By default `shapes_cls` in the folder that the environment variable
            `DETECTRON2_DATASETS` names at the time of the call, or in `datasets`.
    """
    root = datasets_root() / "shapes_cls" if root is None else Path(root)
    for split in SPLIT_SIZES:
        _register_split(root / split, split)


def _register_split(folder: Path, split: str) -> None:
    def load() -> list[dict]:
        generate_shape_classes(folder, split, SPLIT_SIZES[split])
        return find_images(folder)

    register_images(
        f"shapes_cls_{split}",
        folder,
        load,
        lambda: tuple(sorted(CLASS_NAMES)),
        generated=True,  # its files need not be there before it is loaded
    )
