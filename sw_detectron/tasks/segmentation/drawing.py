"""Pictures of a segmentor's results: label maps on images."""

import numpy as np
from detectron2.data import Metadata
from matplotlib.colors import hsv_to_rgb
from PIL import Image, ImageDraw

_LEGEND_WIDTH = 160  # px
_LEGEND_ROW = 15  # px, for Pillow's own font


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
