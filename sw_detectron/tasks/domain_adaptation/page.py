"""What the page of a run shows of domain adaptation: predictions on the target, and the game of the
two networks."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
from detectron2.data import DatasetCatalog, MetadataCatalog
from matplotlib.figure import Figure

from ...analysis.drawing import PALETTE, plot_series, style_iterations
from ...analysis.metrics import Series, read_metrics
from ...data.images import read_image
from ...data.slices import spread
from ...report.html import image_html, svg_html
from ..segmentation.data import read_labels
from ..segmentation.drawing import overlay_class_map

logger = logging.getLogger(__name__)

PREDICTIONS = Path("inference/sem_seg_predictions.json")
_ROWS = 4


def adaptation_sections(
    keys: Mapping, test_datasets: Sequence[str], folder: Path
) -> dict[str, str]:
    """See `Task.page_sections`; empty for a Python config, which has no keys of this task."""
    if "MODEL" not in keys:
        return {}
    sections, compare_with = {}, keys["MODEL"]["DA"]["COMPARE_WITH"]
    if test_datasets and (folder / PREDICTIONS).is_file():
        runs = {"this run": folder}
        if compare_with:
            runs = {Path(compare_with).name: Path(compare_with)} | runs
        try:
            figure = predictions_figure(test_datasets[-1], runs)
            text = f"target images with truth and predictions on {test_datasets[-1]}"
            sections["Predictions"] = image_html(figure, "png", "image/png", text)
        except (OSError, ValueError) as error:
            logger.warning(f"No picture of predictions: {error}")
    accuracy = read_metrics(folder).get("discriminator_accuracy")
    if accuracy:
        figure = accuracy_figure(accuracy)
        text = "the discriminator's accuracy by iteration"
        sections["Discriminator"] = svg_html(figure, text)
    return sections


def predictions_figure(dataset_name: str, runs: dict[str, Path]) -> Figure:
    """A row for each of a few images: the image, its labels, and what each run predicts.

    Args:
        runs: folders by the name that is shown.

    Raises:
        OSError: predictions of a run are not there.
        ValueError: they are not of this data set.
    """
    metadata = MetadataCatalog.get(dataset_name)
    records = spread(DatasetCatalog.get(dataset_name), _ROWS)
    predictions = {name: _read(run / PREDICTIONS) for name, run in runs.items()}
    columns = ["image", "truth", *runs]
    figure = Figure(figsize=(3.4 * len(columns), 2.6 * len(records)), layout="constrained")
    axes = figure.subplots(len(records), len(columns), squeeze=False)
    for row, record in zip(axes, records):
        pixels = read_image(record["file_name"], "RGB")
        ignore, ids = metadata.ignore_label, record.get("label_ids", ())
        num_classes = len(metadata.stuff_classes)
        truth = read_labels(record["sem_seg_file_name"], num_classes, ignore, np.int64, ids)
        maps = [truth]
        for name, of_run in predictions.items():
            if record["file_name"] not in of_run:
                raise ValueError(f"run {name!r} has no prediction for {record['file_name']!r}")
            maps.append(_class_map(of_run[record["file_name"]], truth.shape))
        pictures = [pixels, *(overlay_class_map(pixels, labels, metadata) for labels in maps)]
        for axis, picture in zip(row, pictures):
            axis.imshow(picture)
            axis.set_axis_off()
    for axis, title in zip(axes[0], columns):
        axis.set_title(title, fontsize=10)
    return figure


def _read(path: Path) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for entry in json.loads(path.read_text()):
        found.setdefault(entry["file_name"], []).append(entry)
    return found


def _class_map(entries: list[dict], shape: tuple[int, ...]) -> np.ndarray:
    labels = np.zeros(shape, np.int64)
    for entry in entries:
        mask = mask_util.decode(entry["segmentation"]).astype(bool)
        if mask.shape != shape:
            raise ValueError(f"a prediction for {entry['file_name']!r} has another size")
        labels[mask] = entry["category_id"]
    return labels


def accuracy_figure(accuracy: Series) -> Figure:
    """The share of patches of which the discriminator knows the domain; 0.5 is to guess."""
    figure = Figure(figsize=(12, 2.6), layout="constrained")
    axes = figure.subplots()
    plot_series(axes, *accuracy, color=PALETTE[0])
    axes.axhline(0.5, color="black", linewidth=0.8)
    axes.set_ylim(0, 1)
    axes.set_ylabel("accuracy")
    style_iterations(axes, 10)
    return figure
