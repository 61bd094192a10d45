"""Pictures of a detector's results: beside the ground truth, and on images of one's own.

The figures are made without pyplot, and so leave its state and backend alone.
"""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog
from detectron2.structures import BoxMode
from detectron2.utils.visualizer import Visualizer
from matplotlib.figure import Figure

from ...analysis.drawing import PALETTE, save_figure
from ...data.images import read_image


def draw_predictions(
    dataset_name: str,
    predictions: str | os.PathLike | Sequence[dict],
    output_path: str | os.PathLike,
    num_images: int = 6,
    score_threshold: float = 0.5,
) -> None:
    """Write a PNG that shows the ground truth and the predictions of some images side by side.

    See `predictions_figure` for the arguments and errors.
    """
    figure = predictions_figure(dataset_name, predictions, num_images, score_threshold)
    save_figure(figure, output_path)


def predictions_figure(
    dataset_name: str,
    predictions: str | os.PathLike | Sequence[dict],
    num_images: int = 6,
    score_threshold: float = 0.5,
) -> Figure:
    """Show the first images of a data set, each with its ground truth and its predictions.

    Args:
        dataset_name: a registered data set with boxes, and masks if it has any.
        predictions: results in COCO's format, or a JSON file of them: dicts with `image_id`,
            `category_id` as in the data set's annotation file, `bbox` (x, y, width, height) in
            pixels, `score`, and possibly `segmentation` as RLE.
        num_images: number of images to show, at least 1; fewer if the data set is smaller.
        score_threshold: lowest score of the predictions to show.

    Returns:
        A figure of two axes an image: ground truth, prediction.

    Raises:
        ValueError: the predictions do not fit the data set, their file holds no JSON list, or
            there is no image to show.
    """
    images = DatasetCatalog.get(dataset_name)[: max(num_images, 0)]
    if not images:
        raise ValueError(f"No image of {dataset_name!r} to show (num_images={num_images}).")
    metadata = MetadataCatalog.get(dataset_name)
    by_image = defaultdict(list)
    for prediction in _load_predictions(predictions):
        if prediction["score"] >= score_threshold:
            by_image[prediction["image_id"]].append(_to_annotation(prediction, metadata))

    pairs_per_row = 1 if len(images) < 3 else 2
    rows = -(-len(images) // pairs_per_row)
    figure = Figure(figsize=(7.0 * pairs_per_row, 3.8 * rows), layout="constrained")
    for index, image in enumerate(images):
        pixels = read_image(image["file_name"], format="RGB")
        contents = {
            "ground truth": image["annotations"],
            f"prediction (score ≥ {score_threshold:g})": by_image[image["image_id"]],
        }
        for column, (title, annotations) in enumerate(contents.items()):
            axes = figure.add_subplot(rows, 2 * pairs_per_row, 2 * index + column + 1)
            axes.imshow(_overlay(pixels, annotations, metadata))
            axes.set_title(f"{Path(image['file_name']).stem}: {title}", fontsize=11)
            axes.set_axis_off()
    return figure


def overlay_results(pixels: np.ndarray, results: Sequence[dict], metadata: Metadata) -> np.ndarray:
    """Draw results in COCO's format on an image.

    Args:
        pixels: (H, W, 3), uint8, RGB.
        results: of this image; see `predictions_figure`.
        metadata: of the data set whose classes they are.

    Returns:
        The picture (H', W', 3), uint8, RGB; larger than the image if that is small.

    Raises:
        ValueError: a category is not one of the data set.
    """
    return _overlay(pixels, [_to_annotation(result, metadata) for result in results], metadata)


def _load_predictions(predictions: str | os.PathLike | Sequence[dict]) -> Sequence[dict]:
    if not isinstance(predictions, (str, os.PathLike)):
        return predictions
    try:
        loaded = json.loads(Path(predictions).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot read predictions from {predictions}: {error}") from error
    if not isinstance(loaded, list):
        raise ValueError(f"Cannot read predictions from {predictions}: it holds no JSON list.")
    return loaded


def _to_annotation(prediction: dict, metadata: Metadata) -> dict:
    """Bring a result in COCO's format into the form that Detectron2 loads the ground truth in."""
    id_map = metadata.get("thing_dataset_id_to_contiguous_id")
    category = prediction["category_id"]
    if id_map is not None:
        if category not in id_map:
            raise ValueError(f"Data set {metadata.name!r} has no category of id {category}.")
        category = id_map[category]
    return prediction | {"category_id": category, "bbox_mode": BoxMode.XYWH_ABS}


def _overlay(pixels: np.ndarray, annotations: list[dict], metadata: Metadata) -> np.ndarray:
    """Draw boxes, masks and labels on an image (H, W, 3), uint8 RGB; small images are scaled up."""
    # Labels keep their size, and would cover a small image.
    scale = max(1.0, 512 / max(pixels.shape[:2]))
    visualizer = Visualizer(pixels, metadata, scale=scale, font_size_scale=1.6)
    if annotations:
        boxes = [
            BoxMode.convert(list(annotation["bbox"]), annotation["bbox_mode"], BoxMode.XYXY_ABS)
            for annotation in annotations
        ]
        masks = [annotation.get("segmentation") for annotation in annotations]
        # Where there is one class, names say nothing, and colours tell objects apart.
        one_class = len(metadata.thing_classes) == 1
        colors = [i if one_class else a["category_id"] for i, a in enumerate(annotations)]
        visualizer.overlay_instances(
            boxes=np.array(boxes, dtype=float),
            masks=masks if all(masks) else None,
            labels=None if one_class else [_label(a, metadata) for a in annotations],
            assigned_colors=[mpl.colors.to_rgb(PALETTE[c % len(PALETTE)]) for c in colors],
            alpha=0.4,
        )
    return visualizer.get_output().get_image()


def _label(annotation: dict, metadata: Metadata) -> str:
    name = metadata.thing_classes[annotation["category_id"]]
    return f"{name} {annotation['score']:.0%}" if "score" in annotation else name
