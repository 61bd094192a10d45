"""A generated pair of domains: the same scenes flat and clean, or textured, noisy, recoloured."""

import functools
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
from ..segmentation.data import load_records
from ..segmentation.shapes import CLASS_NAMES, generate_labels

HUE_SHIFT = 90  # of 256 that make the circle of colours
NOISE = 16.0  # standard deviation of each channel, of 255

Render = Callable[[np.ndarray, list[np.ndarray], np.random.Generator], np.ndarray]
"""From the picture of a scene (H, W, 3), uint8, RGB, and the masks of its shapes to another one."""


def register_shapes_adaptation(root: str | os.PathLike | None = None) -> None:
    """Register `shapes_flat_train`, the source, and `shapes_textured_train` and
    `shapes_textured_val`, the target. All have label maps.

    They are made when they are loaded for the first time. Registering again is harmless; with
    another root it moves them there.

    Args:
        root: folder of the shapes; see `register_shapes`.
    """
    root = shapes.default_root() if root is None else Path(root)
    for domain, render, split in (
        ("flat", flat, "train"),
        ("textured", textured, "train"),
        ("textured", textured, "val"),
    ):
        name = f"shapes_{domain}_{split}"
        images, labels = root / domain / split, root / "labels" / split
        register_dataset(
            name,
            functools.partial(_load, name, root, split, images, labels, render),
            image_root=str(images),
            sem_seg_root=str(labels),
            evaluator_type="sem_seg",
            generated=True,  # its files need not be there before it is loaded
            stuff_classes=list(CLASS_NAMES),
            ignore_label=255,
        )


def _load(
    name: str, root: Path, split: str, images: Path, labels: Path, render: Render
) -> list[dict]:
    shapes.generate_shapes(root, split, shapes.SPLIT_SIZES[split])
    generate_labels(root, split)
    generate_domain(root, split, images, render)
    return load_records(name, images, labels)


def generate_domain(root: Path, split: str, folder: Path, render: Render) -> None:
    """Write the images of a split of `generate_shapes` anew to `folder/*.png`.

    A folder that is there is left as it is. It appears only when all of it is made.
    """
    if folder.is_dir():
        return
    content = json.loads((root / "annotations" / f"{split}.json").read_text())
    outlines = {image["id"]: [] for image in content["images"]}
    for shape in content["annotations"]:
        outlines[shape["image_id"]].append(shape["segmentation"])
    with whole_folder(folder) as made:
        for image in tqdm(content["images"], desc=str(folder.name), unit="image", delay=2):
            scene = np.asarray(Image.open(root / split / image["file_name"]))
            masks = [_mask(outline, scene.shape) for outline in outlines[image["id"]]]
            rng = np.random.default_rng(image["id"])
            Image.fromarray(render(scene, masks, rng)).save(made / image["file_name"])


def flat(scene: np.ndarray, masks: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Each shape, and the background, in its mean colour."""
    picture = np.empty_like(scene)
    picture[:] = np.rint(scene.mean(axis=(0, 1)))
    for mask in masks:
        picture[mask] = np.rint(scene[mask].mean(axis=0))
    return picture


def textured(scene: np.ndarray, masks: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """With its texture, in other hues, under noise."""
    hsv = np.array(Image.fromarray(scene).convert("HSV"))
    hsv[..., 0] += HUE_SHIFT  # modulo 256
    picture = np.asarray(Image.fromarray(hsv, mode="HSV").convert("RGB"))
    noise = rng.normal(0, NOISE, picture.shape)
    return np.clip(np.rint(picture + noise), 0, 255).astype(np.uint8)


def _mask(outline: list[list[float]], shape: tuple[int, ...]) -> np.ndarray:
    return mask_util.decode(mask_util.merge(mask_util.frPyObjects(outline, *shape[:2]))).astype(
        bool
    )
