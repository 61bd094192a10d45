"""Curves of a run: its losses, and the importance ratios of its SW layers.

The figures are made without pyplot, and so leave its state and backend alone.
"""

import os

import numpy as np
from cycler import cycler
from matplotlib.figure import Figure, SubFigure

from ..analysis.drawing import PALETTE, plot_series, save_figure, style_iterations
from ..analysis.importance import importance_curves
from ..analysis.importance_figures import curves_height, draw_importance_curves
from ..analysis.metrics import Series, read_metrics

_LOSSES_HEIGHT = 3.4  # inches


def plot_training_curves(
    metrics_json_path: str | os.PathLike, output_path: str | os.PathLike
) -> None:
    """Write a PNG of the losses and, where recorded, of the importance ratios of SW layers.

    See `training_curves_figure` for the arguments and errors.
    """
    save_figure(training_curves_figure(metrics_json_path), output_path)


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
