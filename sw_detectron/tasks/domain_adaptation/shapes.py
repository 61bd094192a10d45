"""A generated pair of domains: the same scenes flat and clean, or textured, noisy, recoloured."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from ...data import shapes
from ...data.registration import whole_folder
from ..segmentation.shapes import mask_of, register_labelled_shapes

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
        images = root / domain / split
        make = functools.partial(generate_domain, root, split, images, render)
        register_labelled_shapes(f"shapes_{domain}_{split}", root, split, images, make)


def generate_domain(root: Path, split: str, folder: Path, render: Render) -> None:
    """Write the images of a split of `generate_shapes` anew to `folder/*.png`.

    A folder that is there is left as it is. It appears only when all of it is made.
    """
    if folder.is_dir():
        return
    content = json.loads((root / "annotations" / f"{split}.json").read_text())
    shapes_of = {image["id"]: [] for image in content["images"]}
    for shape in content["annotations"]:
        shapes_of[shape["image_id"]].append(shape)
    with whole_folder(folder) as made:
        for image in tqdm(content["images"], desc=folder.name, unit="image", delay=2):
            scene = np.asarray(Image.open(root / split / image["file_name"]))
            masks = [mask_of(shape, *scene.shape[:2]) for shape in shapes_of[image["id"]]]
            rng = np.random.default_rng(image["id"])
            Image.fromarray(render(scene, masks, rng)).save(made / image["file_name"])


def flat(scene: np.ndarray, masks: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Each shape in its mean colour, the background in that of the picture."""
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
