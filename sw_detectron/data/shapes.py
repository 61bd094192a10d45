"""A small instance segmentation data set that needs no download.

Every image shows one to four coloured shapes on a textured background, with COCO annotations of
the parts that can be seen. Colour is drawn independently of the class, so that a detector has to
look at the outline. A scene depends on nothing but the seed, the split, its index and its size.
"""

import json
import logging
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pycocotools.mask as mask_util
from detectron2.data.datasets import load_coco_json
from PIL import Image, ImageDraw
from tqdm import tqdm

from .registration import datasets_root, register_dataset

__all__ = [
    "CLASS_NAMES",
    "SPLIT_SIZES",
    "draw_single_shape",
    "generate_shapes",
    "register_shapes",
]

logger = logging.getLogger(__name__)

CLASS_NAMES = ("circle", "square", "triangle", "star")
SPLIT_SIZES = {"train": 800, "val": 100}
"""Images in each split that `register_shapes` makes."""

_CORNERS = {"circle": 64, "square": 4, "triangle": 3, "star": 10}
_STAR_INNER_RADIUS = 0.45  # of the outer radius
_UPRIGHT = {"circle": 0.0, "square": -np.pi / 4, "triangle": -np.pi / 2, "star": -np.pi / 2}
"""Angle of the first corner, in radians from the image's x axis towards its y axis, downwards."""
_LARGEST_TILT = 0.35  # radians
_RADIUS_RANGE = (0.13, 0.25)  # of the image side; circumscribed circle
_SINGLE_RADIUS_RANGE = (0.25, 0.42)  # of a shape that has the image to itself
_MAX_SHAPES = 4
_PLACEMENT_TRIES = 20
_MIN_VISIBLE = 0.6  # part of each shape that later shapes must leave visible
_MIN_CONTRAST = 100.0  # Euclidean distance in RGB, 0..255 per channel
_SUPERSAMPLING = 4  # sub-pixels along the side of a pixel
_MIN_IMAGE_SIZE = 64  # px; below it the smallest stars are blots


@dataclass
class _Shape:
    class_index: int
    visible: np.ndarray  # bool, (S * size, S * size) sub-pixels, S = _SUPERSAMPLING
    full_area: int  # sub-pixels, hidden ones included


def generate_shapes(
    root: str | os.PathLike, split: str, num_images: int, seed: int = 0, size: int = 128
) -> None:
    """Write one split to `root/<split>/*.png` and `root/annotations/<split>.json`.

    A split that is already complete is left as it is, whatever its number of images, seed and
    size. The files appear only once all of them are made, the annotations last; when several
    processes generate the same split, the first one to finish wins.

    Args:
        root: folder of the data set; it is made if missing.
        split: name of the split. Splits of different names hold different images.
        num_images: number of images, at least 1.
        seed: non-negative; the same arguments give the same files, bit for bit.
        size: side of the square images in pixels, at least 64.

    Raises:
        ValueError: an argument is out of its range.
        OSError: `root` cannot be written.
    """
    if num_images < 1 or seed < 0 or size < _MIN_IMAGE_SIZE:
        raise ValueError(
            f"Need num_images >= 1, seed >= 0 and size >= {_MIN_IMAGE_SIZE}, "
            f"got num_images={num_images}, seed={seed}, size={size}."
        )
    if not split or split != Path(split).name or split == "annotations":
        raise ValueError(f"A split must have a plain name other than 'annotations', got {split!r}.")

    root = Path(root)
    if _is_complete(root, split):
        return
    logger.info(f"Generating {num_images} images of shapes in {root / split}")
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{split}-", dir=root) as staging:
        _write_split(Path(staging), split, num_images, seed, size)
        _publish(Path(staging), root, split)


def register_shapes(root: str | os.PathLike | None = None) -> None:
    """Register `shapes_train` and `shapes_val` in Detectron2's catalogs.

    Nothing is read or written until a data set is loaded; loading generates it if it is missing.
    Registering again is harmless; with another root it moves the data sets there.

    Args:
        root: folder of the data set. By default `shapes` in the folder that the environment
            variable `DETECTRON2_DATASETS` names at the time of the call, or in `datasets`.
    """
    root = default_root() if root is None else Path(root)
    for split in SPLIT_SIZES:
        _register_split(root, split)


def default_root() -> Path:
    """`shapes` in the folder of data sets."""
    return datasets_root() / "shapes"


def draw_single_shape(rng: np.random.Generator, size: int) -> tuple[np.ndarray, int]:
    """Draw an image with one shape; uint8 RGB of shape (size, size, 3), and the shape's class."""
    pixels, (shape,) = _draw_scene(rng, size, 1, _SINGLE_RADIUS_RANGE)
    return pixels, shape.class_index


def _register_split(root: Path, split: str) -> None:
    name = f"shapes_{split}"
    json_file, image_root = str(root / "annotations" / f"{split}.json"), str(root / split)

    def load() -> list[dict]:
        generate_shapes(root, split, SPLIT_SIZES[split])
        return load_coco_json(json_file, image_root, name)

    register_dataset(
        name,
        load,
        json_file=json_file,
        image_root=image_root,
        evaluator_type="coco",
        generated=True,  # its files need not be there before it is loaded
        thing_classes=list(CLASS_NAMES),
        thing_dataset_id_to_contiguous_id={i + 1: i for i in range(len(CLASS_NAMES))},
    )


def _is_complete(root: Path, split: str) -> bool:
    return (root / split).is_dir() and (root / "annotations" / f"{split}.json").is_file()


def _publish(staging: Path, root: Path, split: str) -> None:
    """Move a finished split to its place, unless another process did so in the meantime."""
    if _is_complete(root, split):
        return
    images = root / split
    if images.exists():  # left by a process that ended between the two renames below
        images.rename(staging / "leftover")
    try:
        (staging / split).rename(images)
    except OSError:
        # Another process was quicker by a moment. The same arguments made the same files there.
        if not images.is_dir():
            raise
    os.replace(staging / f"{split}.json", root / "annotations" / f"{split}.json")


def _write_split(folder: Path, split: str, num_images: int, seed: int, size: int) -> None:
    (folder / split).mkdir()
    images, annotations = [], []
    # The bar shows only when the work takes longer than a moment.
    for index in tqdm(range(num_images), desc=f"shapes_{split}", unit="image", delay=2):
        rng = np.random.default_rng([seed, zlib.crc32(split.encode()), index])
        pixels, shapes = _draw_scene(rng, size)
        file_name = f"{index:06d}.png"
        Image.fromarray(pixels).save(folder / split / file_name)
        images.append({"id": index + 1, "file_name": file_name, "height": size, "width": size})
        for shape in shapes:
            ids = {"id": len(annotations) + 1, "image_id": index + 1}
            annotations.append(ids | _annotate(shape, size))
    content = {
        "info": {"description": f"shapes, split {split}, seed {seed}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i + 1, "name": name} for i, name in enumerate(CLASS_NAMES)],
    }
    (folder / f"{split}.json").write_text(json.dumps(content))


def _annotate(shape: _Shape, size: int) -> dict:
    """Outline the visible part of a shape by one polygon, and measure it as the COCO API does."""
    (contour,) = _contours(shape.visible)
    # An error of one sub-pixel cannot be seen, and turns staircases into a few straight edges.
    corners = cv2.approxPolyDP(contour, epsilon=1.0, closed=True).reshape(-1, 2)
    # Contours run through the centres of sub-pixels; COCO counts from the corner of the image.
    polygon = ((corners + 0.5) / _SUPERSAMPLING).ravel().tolist()
    mask = mask_util.merge(mask_util.frPyObjects([polygon], size, size))
    return {
        "category_id": shape.class_index + 1,
        "bbox": mask_util.toBbox(mask).tolist(),
        "area": int(mask_util.area(mask)),
        "segmentation": [polygon],
        "iscrowd": 0,
    }


def _draw_scene(
    rng: np.random.Generator,
    size: int,
    most_shapes: int = _MAX_SHAPES,
    radius_range: tuple[float, float] = _RADIUS_RANGE,
) -> tuple[np.ndarray, list[_Shape]]:
    """Draw one image, uint8 RGB of shape (size, size, 3), and list its shapes, lowest first."""
    background = _draw_background(rng, size)
    canvas = background.copy()
    shapes: list[_Shape] = []
    colours: list[np.ndarray] = []
    for _ in range(rng.integers(1, most_shapes + 1)):
        shape = _place_shape(rng, shapes, size, radius_range)
        if shape is None:
            continue
        coverage = _to_pixels(shape.visible)[..., None]
        behind = (background * coverage).sum((0, 1)) / coverage.sum()
        colours.append(_contrasting_colour(rng, [behind, *colours]))
        canvas += coverage * (colours[-1] - canvas)
        shapes.append(shape)
    canvas += rng.uniform(-6, 6, (size, size, 1))  # grain, on shapes and background alike
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8), shapes


def _draw_background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Sum a colour, a gradient, stripes and smooth noise; float64 (size, size, 3) in 0..255."""
    position = np.linspace(-1, 1, size)
    gradient, stripes = (
        np.cos(angle) * position[:, None] + np.sin(angle) * position
        for angle in rng.uniform(0, 2 * np.pi, 2)
    )
    stripes = np.abs(stripes * rng.uniform(2, 6) % 2 - 1) - 0.5  # triangle wave in -0.5..0.5
    noise = [
        Image.fromarray(rng.uniform(-1, 1, (9, 9)).astype(np.float32)).resize(
            (size, size), Image.Resampling.BICUBIC
        )
        for _ in range(3)
    ]
    return (
        rng.uniform(60, 195, 3)
        + gradient[..., None] * rng.uniform(-25, 25, 3)
        + stripes[..., None] * rng.uniform(-25, 25, 3)
        + np.stack(noise, axis=-1).astype(np.float64) * rng.uniform(5, 18)
    )


def _place_shape(
    rng: np.random.Generator, below: list[_Shape], size: int, radius_range: tuple[float, float]
) -> _Shape | None:
    """Find room for one more shape, and hide what lies below it.

    Every shape below must stay in one piece without holes, so that one polygon can outline it.
    Returns None if no try succeeds.
    """
    for _ in range(_PLACEMENT_TRIES):
        class_index = int(rng.integers(len(CLASS_NAMES)))
        radius = rng.uniform(*radius_range) * size
        centre = rng.uniform(radius, size - radius, 2)
        tilt = rng.uniform(-_LARGEST_TILT, _LARGEST_TILT)
        outline = _outline(CLASS_NAMES[class_index], radius, tilt) + centre
        mask = _rasterize(outline, size)
        left_visible = [shape.visible & ~mask for shape in below]
        if all(
            np.count_nonzero(left) >= _MIN_VISIBLE * shape.full_area and len(_contours(left)) == 1
            for left, shape in zip(left_visible, below, strict=True)
        ):
            for shape, left in zip(below, left_visible, strict=True):
                shape.visible = left
            return _Shape(class_index, mask, int(np.count_nonzero(mask)))
    return None


def _outline(class_name: str, radius: float, tilt: float) -> np.ndarray:
    """Corners (N, 2) in pixels around the origin; `radius` in pixels, `tilt` in radians."""
    corners = _CORNERS[class_name]
    radii = np.full(corners, radius)
    if class_name == "star":
        radii[1::2] *= _STAR_INNER_RADIUS
    angles = _UPRIGHT[class_name] + tilt + 2 * np.pi * np.arange(corners) / corners
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def _rasterize(outline: np.ndarray, size: int) -> np.ndarray:
    """Fill an outline (N, 2) in pixels; bool (S * size, S * size) sub-pixels."""
    image = Image.new("L", (size * _SUPERSAMPLING, size * _SUPERSAMPLING))
    corners = np.rint(outline * _SUPERSAMPLING - 0.5).astype(int)
    ImageDraw.Draw(image).polygon(corners.ravel().tolist(), fill=255)
    return np.asarray(image) > 0


def _to_pixels(mask: np.ndarray) -> np.ndarray:
    """Turn sub-pixels (S * size, S * size) into the covered part of each pixel, (size, size)."""
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.reduce(_SUPERSAMPLING)) / 255


def _contours(mask: np.ndarray) -> tuple[np.ndarray, ...]:
    """All outlines of a mask: one for each piece and one for each hole."""
    contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    return contours


def _contrasting_colour(rng: np.random.Generator, avoid: list[np.ndarray]) -> np.ndarray:
    """Draw an RGB colour that is far from those to avoid, or the farthest one of many."""
    candidates = rng.uniform(15, 240, (32, 3))
    distances = np.linalg.norm(candidates[:, None] - np.stack(avoid), axis=-1).min(axis=1)
    far_enough = distances >= _MIN_CONTRAST
    return candidates[np.argmax(far_enough if far_enough.any() else distances)]
