"""Several runs in one figure: recorded metrics, and what their SW layers chose on average."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import UserError
from .drawing import STATISTIC_COLORS, plot_series, shorten, style_iterations
from .importance import MOMENTS, importance_curves
from .metrics import Series

# Apart from the colours of the statistics. Line styles tell runs apart in the panels of ratios.
_RUN_COLORS = ("#444444", "#CC79A7", "#882255", "#999999")
_RUN_STYLES = ("-", "--", ":", "-.")
_MOMENT_TITLES = {"mean": "ω, mean over layers", "cov": "ω′, mean over layers"}


def comparison_figure(runs: dict[str, dict[str, Series]], metrics: Sequence[str]) -> Figure:
    """A panel for each metric with a curve for each run, and, where runs have SW layers, panels of
    their ω and ω', averaged over the layers.

    Args:
        runs: what each recorded, by name; see `metrics.read_metrics`.
        metrics: keys, such as "total_loss"; a run without one has no curve in its panel.

    Raises:
        UserError: no run recorded one of the metrics.
    """
    for key in metrics:
        if not any(key in series for series in runs.values()):
            known = sorted(
                {k for series in runs.values() for k in series if "/" in k or "loss" in k}
            )
            raise UserError(
                f"no run recorded {key!r}; there are "
                f"{', '.join(k for k in known if not k.startswith('sw/'))}"
            )
    averages = {name: average_curves(series) for name, series in runs.items()}
    moments = [m for m in MOMENTS if any(m in average for average in averages.values())]
    num_panels = len(metrics) + len(moments)
    figure = Figure(figsize=(1 + 3.6 * num_panels, 3.8), layout="constrained")
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    styles = {
        name: {"color": _RUN_COLORS[i % 4], "linestyle": _RUN_STYLES[(i + i // 4) % 4]}
        for i, name in enumerate(runs)
    }
    for axes, key in zip(panels, metrics):
        for name, series in runs.items():
            if key in series:
                plot_series(axes, *series[key], linewidth=1.4, **styles[name])
        _finish(axes, key)
    for axes, moment in zip(panels[len(metrics) :], moments):
        for name, average in averages.items():
            for statistic, curve in average.get(moment, {}).items():
                style = {"color": STATISTIC_COLORS[statistic], "linewidth": 1.4}
                plot_series(axes, *curve, **style, linestyle=styles[name]["linestyle"])
        axes.set_ylim(-0.03, 1.03)
        _finish(axes, _MOMENT_TITLES[moment])
    shown = {s for average in averages.values() for curves in average.values() for s in curves}
    figure.legend(
        handles=[Line2D([], [], label=shorten(name, 40), **styles[name]) for name in runs]
        + [
            Line2D([], [], color=color, linewidth=4, label=statistic)
            for statistic, color in STATISTIC_COLORS.items()
            if statistic in shown
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    return figure


def average_curves(series: dict[str, Series]) -> dict[str, dict[str, Series]]:
    """The importance ratios by moment ("mean", "cov") and statistic, averaged over the SW layers.

    In each iteration over the layers that it has records of: a run that was resumed with another
    placement has different ones. Layers that do not have a statistic count as 0. Empty without SW
    layers.
    """
    layers = importance_curves(series)
    averages: dict[str, dict[str, Series]] = {}
    for moment in MOMENTS:
        num_layers: Counter[float] = Counter()
        sums: dict[str, Counter[float]] = defaultdict(Counter)
        for curves in (layer[moment] for layer in layers.values() if moment in layer):
            num_layers.update({i for iterations, _ in curves.values() for i in iterations})
            for statistic, (iterations, values) in curves.items():
                for iteration, value in zip(iterations, values):
                    sums[statistic][iteration] += value
        for statistic in (name for name in STATISTIC_COLORS if name in sums):
            iterations = np.array(sorted(sums[statistic]))
            means = np.array([sums[statistic][i] / num_layers[i] for i in iterations])
            averages.setdefault(moment, {})[statistic] = (iterations, means)
    return averages


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("iteration")
    style_iterations(axes, ticks=4)
