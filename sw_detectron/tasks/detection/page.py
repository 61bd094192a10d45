"""What the page of a run shows of a detector."""

import logging
from collections.abc import Sequence
from pathlib import Path

from detectron2.data import DatasetCatalog

from ...report.html import image_html
from .drawing import predictions_figure

logger = logging.getLogger(__name__)


def predictions_section(test_datasets: Sequence[str], folder: Path) -> str:
    """Ground truth beside predictions for a few images; empty if the evaluation left none.

    Args:
        test_datasets: in the order of their evaluation.
        folder: of the run.
    """
    path = folder / "inference" / "coco_instances_results.json"
    if not test_datasets or not path.is_file():
        return ""
    name = test_datasets[-1]  # each data set overwrites the file of the one before
    if not all("annotations" in image for image in DatasetCatalog.get(name)[:1]):
        return ""
    try:
        figure = predictions_figure(name, path)
    except (OSError, ValueError) as error:
        logger.warning(f"No picture of predictions: {error}")
        return ""
    return image_html(figure, "png", "image/png", f"ground truth beside predictions on {name}")
