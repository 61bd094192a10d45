"""What tests ask of a figure before they look at its numbers."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def shown_texts(figure: Figure) -> list[Text]:
    """All texts of a drawn figure, without the tick labels beyond the limits of their axis."""
    texts = []
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    texts += [tick.label1]
        if axes.get_legend():
            texts += axes.get_legend().get_texts()
    for part in (figure, *figure.subfigs):
        texts += part.texts
        for legend in part.legends:
            texts += [legend.get_title(), *legend.get_texts()]
    return [text for text in texts if text.get_visible() and text.get_text()]


def check_texts(figure: Figure) -> int:
    """Assert that no text overlaps another or leaves the picture; returns how many there are."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = shown_texts(figure)
    boxes = np.array([text.get_window_extent(canvas.get_renderer()).extents for text in shown])
    assert boxes[:, :2].min() >= 0
    assert (boxes[:, 2:] <= canvas.get_width_height()).all()
    low = np.maximum(boxes[:, None, :2], boxes[:, :2])
    high = np.minimum(boxes[:, None, 2:], boxes[:, 2:])
    overlapping = np.triu((high > low).all(axis=-1), k=1)
    assert [(shown[i].get_text(), shown[j].get_text()) for i, j in np.argwhere(overlapping)] == []
    return len(shown)
