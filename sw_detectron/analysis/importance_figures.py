"""Figures of importance ratios: learning curves, final ratios, and averages over layers."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from .drawing import (
    STATISTIC_COLORS,
    label_layers,
    layers_width,
    plot_series,
    shorten,
    style_iterations,
)
from .importance import MOMENTS, Curves, Ratios

_MOMENT_STYLES = {"cov": "-", "mean": "--"}
_MOMENT_TITLES = {"mean": "mean, ω", "cov": "covariance, ω′"}


def importance_curves_figure(curves: Curves) -> Figure:
    """The learning curves of ω and ω' (Figs. 6 and 7), a panel for each of at least one layer."""
    figure = Figure(figsize=(12, curves_height(len(curves))), layout="constrained")
    draw_importance_curves(figure, curves)
    return figure


def draw_importance_curves(figure: Figure | SubFigure, curves: Curves) -> None:
    """Fill a figure with the panels of `importance_curves_figure`: solid lines are ω' (the
    covariance's ratios), dashed ones ω (the mean's)."""
    columns = _grid_columns(len(curves))
    rows = -(-len(curves) // columns)
    for index, (name, moments) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        for moment, by_statistic in moments.items():
            for statistic, (iterations, ratio) in by_statistic.items():
                style = {"linestyle": _MOMENT_STYLES[moment], "color": STATISTIC_COLORS[statistic]}
                plot_series(axes, iterations, ratio, linewidth=1.4, **style)
        axes.set_title(shorten(name, 28), fontsize=9)
        axes.set_ylim(-0.03, 1.03)
        axes.set_yticks((0, 0.5, 1))
        style_iterations(axes, ticks=4)
        lowest_of_column = index + columns >= len(curves)
        axes.tick_params(labelsize=8, labelbottom=lowest_of_column, labelleft=index % columns == 0)

    figure.supxlabel("iteration", fontsize=10)
    shown = {moment for moments in curves.values() for moment in moments}
    used = _used_statistics(curves)
    figure.legend(
        handles=[
            Line2D([], [], color=STATISTIC_COLORS[name], linewidth=3, label=name) for name in used
        ]
        + [
            Line2D([], [], color="black", linestyle=style, label=label)
            for moment, style, label in (("cov", "-", "covariance"), ("mean", "--", "mean"))
            if moment in shown
        ],
        title="Importance ratios of the statistics in each SW layer",
        title_fontsize=11,
        loc="outside upper center",
        ncols=len(STATISTIC_COLORS) + len(_MOMENT_STYLES),
        frameon=False,
    )


def curves_height(num_layers: int) -> float:
    """Height in inches that `draw_importance_curves` needs on 12 inches of width."""
    rows = -(-num_layers // _grid_columns(num_layers))
    return 0.9 + rows * (2.6 if rows == 1 else 1.8)


def final_ratios_figure(ratios: Ratios) -> Figure:
    """The final ω and ω' of each layer, as stacked bars in the order of the network."""
    figure = Figure(figsize=(layers_width(len(ratios)), 5.6), layout="constrained")
    panels = figure.subplots(len(MOMENTS), 1, sharex=True)
    used = _used_statistics(ratios)
    for axes, moment in zip(panels, MOMENTS):
        layers = [layer.get(moment, {}) for layer in ratios.values()]
        values = np.array([[layer.get(name, 0.0) for layer in layers] for name in used])
        _stack(axes.bar, used, values, width=0.8)
        axes.set_title(_MOMENT_TITLES[moment], fontsize=10)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.spines[["top", "right"]].set_visible(False)
    label_layers(panels[-1], list(ratios))
    _legend(figure, used)
    return figure


def average_ratios_figure(averages: dict[str, dict[str, dict[str, float]]]) -> Figure:
    """The average ratios of several networks side by side (Figs. 1b and 8).

    Args:
        averages: by the name of the network, as `importance.average_ratios` returns them.
    """
    names = list(averages)
    figure = Figure(figsize=(11, 1.5 + 0.36 * len(names)), layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)  # between 100% of one panel and 0% of the next
    panels = figure.subplots(1, len(MOMENTS), sharey=True)
    used = _used_statistics(averages)
    for axes, moment in zip(panels, MOMENTS):
        values = np.array(
            [[run[moment].get(name, 0.0) for run in averages.values()] for name in used]
        )
        _stack(axes.barh, used, values, height=0.76)
        _write_shares(axes, used, values)
        axes.set_title(_MOMENT_TITLES[moment], fontsize=10)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), [shorten(name, 36) for name in names], fontsize=9)
    panels[0].set_ylim(len(names) - 0.4, -0.6)  # the first on top
    _legend(figure, used)
    return figure


def _stack(bars, used: list[str], values: np.ndarray, **size) -> None:
    """Bars at 0, 1, …, of the statistics' values (K, bars) on top of each other."""
    bottoms = np.cumsum(values, axis=0) - values
    start = "left" if "height" in size else "bottom"
    for name, value, bottom in zip(used, values, bottoms):
        bars(
            range(len(value)),
            value,
            **{start: bottom},
            **size,
            color=STATISTIC_COLORS[name],
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )


def _write_shares(axes: Axes, used: list[str], values: np.ndarray) -> None:
    """Write each share that has room for it into its bar."""
    bottoms = np.cumsum(values, axis=0) - values
    for name, shares, starts in zip(used, values, bottoms):
        dark = np.dot(to_rgb(STATISTIC_COLORS[name]), (0.299, 0.587, 0.114)) < 0.5
        for position, (share, start) in enumerate(zip(shares, starts)):
            if share >= 0.07:
                axes.text(
                    start + share / 2,
                    position,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else "black",
                )


def _legend(figure: Figure, used: list[str]) -> None:
    figure.legend(
        handles=[Patch(color=STATISTIC_COLORS[name], label=name) for name in used],
        loc="outside upper center",
        ncols=len(used),
        frameon=False,
    )


def _used_statistics(by_name: dict[str, dict[str, dict]]) -> list[str]:
    """The statistics that occur, in the order of their colours."""
    found = {
        statistic
        for moments in by_name.values()
        for by_statistic in moments.values()
        for statistic in by_statistic
    }
    return [name for name in STATISTIC_COLORS if name in found]


def _grid_columns(num_panels: int) -> int:
    """Few large panels, or many small ones that still have room for their titles."""
    if num_panels <= 4:
        return num_panels
    return 3 if num_panels <= 6 else 4 if num_panels <= 16 else 5
