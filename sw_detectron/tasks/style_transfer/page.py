"""What the page of a run shows of style transfer: the style, and content as training went on."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from matplotlib.figure import Figure

from ...analysis.metrics import read_metrics
from ...data.images import read_image
from ...errors import UserError
from ...report.html import image_html
from .data import style_image
from .evaluator import NUM_SHOWN

logger = logging.getLogger(__name__)

_MAX_STAGES = 4
_EVALUATED = "style_transfer/total_loss"


def style_sections(keys: Mapping, test_datasets: Sequence[str], folder: Path) -> dict[str, str]:
    """See `Task.page_sections`; empty for a Python config, which has no keys of this task."""
    pictures = folder / "inference"
    if len(test_datasets) > 1:
        pictures = pictures / test_datasets[0]
    if not isinstance(keys, CfgNode) or not (pictures / "content").is_dir():
        return {}
    try:
        figure = stages_figure(style_image(keys), pictures, _evaluated(folder))
    except (UserError, OSError) as error:
        logger.warning(f"No picture of stylized images: {error}")
        return {}
    text = "the style, content images, and these stylized after some iterations"
    return {"Stylized images": image_html(figure, "png", "image/png", text)}


def _evaluated(folder: Path) -> set[int]:
    """After how many iterations this run was evaluated; the folder may have pictures of another."""
    series = read_metrics(folder)
    last = int(series["total_loss"][0][-1]) + 1
    iterations = {i for key, (its, _) in series.items() if key.endswith(_EVALUATED) for i in its}
    # The last evaluation comes after the last iteration, and is recorded with the next number.
    return {min(int(i) + 1, last) for i in iterations}


def stages_figure(style: np.ndarray, folder: Path, evaluated: Collection[int]) -> Figure:
    """The style above a row for each content image: as it is, and stylized at each stage.

    Args:
        style: (H, W, 3), uint8, RGB.
        folder: of `StyleEvaluator`'s pictures.
        evaluated: the stages, by how many iterations had been done.
    """
    stages = [f"{number:07d}" for number in sorted(evaluated)]
    shown = np.linspace(0, len(stages) - 1, min(len(stages), _MAX_STAGES)).round().astype(int)
    rows = [n for n in range(NUM_SHOWN) if (folder / "content" / f"{n}.png").is_file()]
    columns = {"content": "content"} | {
        stages[i]: f"after {int(stages[i])} iterations" for i in shown
    }
    figure = Figure(figsize=(2.6 * (len(columns) + 1), 2.7 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns) + 1, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    axes[0, 0].imshow(style)
    axes[0, 0].set_title("style", fontsize=10)
    for row, number in zip(axes, rows):
        for axis, name in zip(row[1:], columns):
            path = folder / name / f"{number}.png"
            if path.is_file():
                axis.imshow(read_image(path, "RGB"))
    for axis, title in zip(axes[0, 1:], columns.values()):
        axis.set_title(title, fontsize=10)
    return figure
