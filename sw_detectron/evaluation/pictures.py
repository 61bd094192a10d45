"""Pictures of a trained model: its predictions, and the curves of its training.

Each picture has a function that returns the matplotlib figure and one that writes it to a PNG
file. The figures are made without pyplot, and so leave its state and backend alone.
"""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from cycler import cycler
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog
from detectron2.data.detection_utils import read_image
from detectron2.structures import BoxMode
from detectron2.utils.visualizer import Visualizer
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure, SubFigure
from PIL import Image, ImageDraw

from ..analysis.drawing import (
    PALETTE,
    STATISTIC_COLORS,
    plot_series,
    save_figure,
    style_iterations,
)
from ..analysis.importance import importance_curves
from ..analysis.importance_figures import curves_height, draw_importance_curves
from ..analysis.metrics import Series, read_metrics

__all__ = [
    "STATISTIC_COLORS",
    "draw_predictions",
    "losses_figure",
    "overlay_class_map",
    "overlay_results",
    "plot_training_curves",
    "predictions_figure",
    "training_curves_figure",
]

_LOSSES_HEIGHT = 3.4  # inches
_LEGEND_WIDTH = 160  # px, of class maps
_LEGEND_ROW = 15  # px, for Pillow's own font


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


def plot_training_curves(
    metrics_json_path: str | os.PathLike, output_path: str | os.PathLike
) -> None:
    """Write a PNG of the losses and, where recorded, of the importance ratios of SW layers.

    See `training_curves_figure` for the arguments and errors.
    """
    save_figure(training_curves_figure(metrics_json_path), output_path)


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


def overlay_class_map(pixels: np.ndarray, labels: np.ndarray, metadata: Metadata) -> np.ndarray:
    """Tint each pixel with the colour of its class, and list the classes at the right.

    A class has the same colour in all pictures. The list has those that are there, the largest
    first, as far as there is room.

    Args:
        pixels: (H, W, 3), uint8, RGB.
        labels: (H, W), the numbers of classes, or the data set's label to ignore, which has no
            colour.
        metadata: of the data set, with its `stuff_classes`.

    Returns:
        The picture (H', W', 3), uint8, RGB; its size depends on that of the image alone.

    Raises:
        ValueError: a label is not one of the data set.
    """
    counts = np.bincount(labels.ravel())
    ignored = metadata.get("ignore_label")
    present = [int(k) for k in np.argsort(-counts, kind="stable") if counts[k] and k != ignored]
    wrong = [k for k in present if k >= len(metadata.stuff_classes)]
    if wrong:
        raise ValueError(f"Data set {metadata.name!r} has no class number {wrong[0]}.")
    # Hues that are far apart for successive classes.
    colors = {k: hsv_to_rgb((k * 0.618034 % 1, 0.8, 0.95)) * 255 for k in present}
    tinted = pixels.astype(np.float64)
    for k, color in colors.items():
        tinted[labels == k] = 0.4 * tinted[labels == k] + 0.6 * color
    zoom = max(1, round(_LEGEND_WIDTH * 2 / max(pixels.shape[:2])))  # of small images
    tinted = np.rint(tinted).astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)

    legend = Image.new("RGB", (_LEGEND_WIDTH, len(tinted)), "white")
    draw = ImageDraw.Draw(legend)
    for row, (k, color) in enumerate(colors.items()):
        y = 4 + row * _LEGEND_ROW
        if y + _LEGEND_ROW > legend.height:
            break
        draw.rectangle((6, y, 18, y + 10), fill=tuple(int(value) for value in color))
        draw.text((24, y), _fit(draw, metadata.stuff_classes[k]), fill="black")
    return np.concatenate([tinted, np.asarray(legend)], axis=1)


def _fit(draw: ImageDraw.ImageDraw, text: str) -> str:
    """The beginning of a class's name that has room in the legend."""
    while draw.textlength(text) > _LEGEND_WIDTH - 28:
        text = text[:-1]
    return text


def training_curves_figure(metrics_json_path: str | os.PathLike) -> Figure:
    """Plot the losses and the importance ratios that Detectron2's `metrics.json` recorded.

    The ratios stand under `sw/<layer>/<mean or cov>/<statistic>`. Each layer has a panel of its
    own: solid lines for the covariance, dashed ones for the mean. Lines that a crash cut short
    are skipped; where a resumed run repeats an iteration, the later record counts.

    Returns:
        A figure of the total loss, the component losses, and one axes for each SW layer.

    Raises:
        UserError: the file cannot be read, or holds no records.
    """
    series = read_metrics(metrics_json_path)
    layers = importance_curves(series)
    if not layers:
        return losses_figure(series)
    ratios_height = curves_height(len(layers))
    figure = Figure(figsize=(12, _LOSSES_HEIGHT + ratios_height), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(_LOSSES_HEIGHT, ratios_height))
    _plot_losses(top, series)
    draw_importance_curves(bottom, layers)
    return figure


def losses_figure(series: dict[str, Series]) -> Figure:
    """Plot the total loss and the component losses among a run's records."""
    figure = Figure(figsize=(12, _LOSSES_HEIGHT), layout="constrained")
    _plot_losses(figure, series)
    return figure


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
        categories = [annotation["category_id"] for annotation in annotations]
        visualizer.overlay_instances(
            boxes=np.array(boxes, dtype=float),
            masks=masks if all(masks) else None,
            labels=[_label(annotation, metadata) for annotation in annotations],
            assigned_colors=[mpl.colors.to_rgb(PALETTE[c % len(PALETTE)]) for c in categories],
            alpha=0.4,
        )
    return visualizer.get_output().get_image()


def _label(annotation: dict, metadata: Metadata) -> str:
    name = metadata.thing_classes[annotation["category_id"]]
    return f"{name} {annotation['score']:.0%}" if "score" in annotation else name


def _plot_losses(figure: Figure | SubFigure, series: dict[str, Series]) -> None:
    total_axes, components_axes = figure.subplots(1, 2)
    total_axes.set_title("Total loss", fontsize=11)
    if "total_loss" in series:
        iterations, loss = series["total_loss"]
        plot_series(total_axes, iterations, loss, color=PALETTE[0], alpha=0.3, label="as recorded")
        plot_series(total_axes, iterations, _smooth(loss), color=PALETTE[0], label="smoothed")
        total_axes.legend(loc="upper right", frameon=False, fontsize=9)

    components_axes.set_title("Component losses, smoothed", fontsize=11)
    # Colours recur with another line style when a model has more losses than there are colours.
    components_axes.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * cycler(color=PALETTE))
    components = sorted(key for key in series if key.startswith("loss"))
    for key in components:
        iterations, loss = series[key]
        plot_series(components_axes, iterations, _smooth(loss), linewidth=1.2, label=key)
    if components:  # the legend stands beside the axes, where it cannot hide a curve
        components_axes.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9
        )

    for axes in (total_axes, components_axes):
        axes.set_xlabel("iteration")
        axes.set_ylim(bottom=0)
        style_iterations(axes, ticks=6)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average (N,) over about a twentieth of a curve (N,), or three values.

    Values that are not finite are left out; places that have only such around them give NaN.
    """
    reach = min(max(1, len(values) // 40), (len(values) - 1) // 2)
    window = np.ones(2 * reach + 1)
    finite = np.isfinite(values)
    counts = np.convolve(finite, window, mode="same")
    sums = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)
