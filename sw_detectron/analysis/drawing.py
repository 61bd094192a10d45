"""What the figures of the package have in common: colours, axes, names, and whole files.

The figures are made without pyplot, and so leave its state and backend alone.
"""

import os
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from ..errors import UserError
from ..files import written_whole

# The colours of Okabe and Ito, which stay apart for colour-blind readers. The whitening and the
# standardization over the same axes share a hue: blue for the batch, orange for the instance.
STATISTIC_COLORS = {
    "bw": "#0072B2",
    "iw": "#D55E00",
    "bn": "#56B4E9",
    "in": "#E69F00",
    "ln": "#009E73",
}
"""Colour of each statistic of Switchable Whitening, the same in all pictures."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")


def plot_series(axes: Axes, iterations: np.ndarray, values: np.ndarray, **style) -> None:
    """Draw a curve; where it has a single point, as a dot."""
    axes.plot(iterations, values, marker="o" if len(values) == 1 else None, **style)


def style_axes(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def style_iterations(axes: Axes, ticks: int) -> None:
    """An x axis of iterations, with at most `ticks` intervals."""
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 90k rather than 90000
    style_axes(axes)


def label_layers(axes: Axes, names: list[str]) -> None:
    """An x axis of layers, at 0, 1, …; a few layers stand in the middle of it."""
    axes.set_xticks(
        range(len(names)), [shorten(name, 28) for name in names], rotation=90, fontsize=8
    )
    margin = 0.6 + max(0, 5 - len(names)) / 2
    axes.set_xlim(-margin, len(names) - 1 + margin)


def layers_width(num_layers: int) -> float:
    """Width in inches of a figure in which each layer has a column."""
    return 2.2 + max(4.0, 0.24 * num_layers)


def network_order(name: str) -> tuple:
    """Sort key of layer names: the stem, then the stages, then all else; `res3.2` < `res3.10`."""
    if name.startswith("stem") or "." not in name:  # the authors call the stem's norm "sw1"
        part = 0
    else:
        part = 1 if re.match(r"(res|layer)\d", name) else 2
    return part, [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def shorten(name: str, length: int) -> str:
    """Cut the beginning of a long name; its end tells layers, and runs, apart."""
    return name if len(name) <= length else "…" + name[1 - length :]


def save_figure(figure: Figure, path: str | os.PathLike, dpi: int = 110) -> None:
    """Write a figure, as the file's ending says, so that no reader ever meets half of it.

    Raises:
        UserError: it cannot be written there.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {str(path.parent)!r}: {error.strerror}; give another place"
        ) from None
    kind = path.suffix.removeprefix(".")
    # No date and a fixed salt: the same figure gives the same file.
    metadata = {"Date": None} if kind == "svg" else None
    with (
        written_whole(path) as unfinished,
        mpl.rc_context({"svg.hashsalt": "sw_detectron"}),
    ):
        figure.savefig(
            unfinished,
            format=kind,
            dpi=dpi,
            metadata=metadata,
            bbox_inches="tight",
            pad_inches=0.15,
        )
