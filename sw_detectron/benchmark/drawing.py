"""Charts of what was measured."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..analysis.drawing import PALETTE, style_axes
from .operations import Growth
from .results import BASELINE, Result
from .timing import Timing

_NUMBER = FuncFormatter(lambda value, _: f"{value:g}")


def ratio_figure(results: Sequence[Result]) -> Figure:
    """Bars of the durations relative to the baseline's, with quartiles as whiskers.

    A panel for each memory format and each thing that was timed; in it, a group of bars for each
    case, and a container of bars for each contender but the baseline.
    """
    formats, cases, names = (
        list(dict.fromkeys(getattr(result, name) for result in results))
        for name in ("memory_format", "case", "contender")
    )
    names.remove(BASELINE)
    panels = list(itertools.product(formats, results[0].timings))
    size = (max(7.0, 2 + 0.24 * len(cases) * (len(names) + 1)), 0.8 + 3.4 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    styles = bar_styles(names)
    rows = figure.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0]
    for axes, (memory_format, what) in zip(rows, panels):
        shown = [result for result in results if result.memory_format == memory_format]
        timings = {(result.case, result.contender): result.timings[what] for result in shown}
        plot_bars(axes, timings, cases, styles)
        axes.set_title(f"{what}, {memory_format}", fontsize=11)
        axes.set_ylabel(f"time / time of {BASELINE}")
    scale_ratios(axes, [t for r in results if r.contender != BASELINE for t in r.timings.values()])
    handles = [Patch(label=name, **style) for name, style in styles.items()]
    columns = min(len(names), max(1, int(figure.get_figwidth() / 1.9)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def bar_styles(names: Sequence[str]) -> dict[str, dict]:
    """A colour for each layer or set of statistics; hatched: eigh; pale: without Triton."""
    families = list(dict.fromkeys(name.split()[0] for name in names))
    return {
        name: {
            "facecolor": PALETTE[families.index(name.split()[0]) % len(PALETTE)],
            "alpha": 0.5 if "plain" in name else 1.0,
            "hatch": "///" if "eigh" in name else None,
            "edgecolor": "white",
        }
        for name in names
    }


def plot_bars(axes: Axes, timings: dict, cases: list[str], styles: dict[str, dict]) -> None:
    """Groups of bars that begin at 1, as a ratio of the baseline to itself is.

    Args:
        timings: by (case, contender).
    """
    width = 0.86 / len(styles)
    for j, (name, style) in enumerate(styles.items()):
        # Some layers do not fit all shapes.
        at = [i for i, case in enumerate(cases) if (case, name) in timings]
        shown = [timings[cases[i], name] for i in at]
        places = [i + (j - (len(styles) - 1) / 2) * width for i in at]
        heights = [timing.ratio - 1 for timing in shown]
        axes.bar(places, heights, min(width, 0.3), bottom=1, label=name, **style)
        low, high = [t.ratio_low for t in shown], [t.ratio_high for t in shown]
        axes.vlines(places, low, high, color="black", linewidth=1)
        for place, timing in zip(places, shown):
            axes.annotate(
                f"{timing.ratio:.2f}",
                (place, max(1, timing.ratio_high)),
                xytext=(0, 3),
                textcoords="offset points",
                rotation=90 if len(styles) > 2 else 0,
                ha="center",
                va="bottom",
                fontsize=8,
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_xlim(-0.5, len(cases) - 0.5)
    style_bars(axes)


def style_bars(axes: Axes) -> None:
    style_axes(axes)
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)


def scale_ratios(axes: Axes, timings: Sequence[Timing]) -> None:
    """A logarithmic axis, which panels share, with room for the numbers above the bars."""
    low = min(0.9, *(timing.ratio_low for timing in timings))
    high = max(1.2, *(timing.ratio_high for timing in timings))
    axes.set_yscale("log")
    axes.set_ylim(low / 1.05, high * (high / low) ** 0.25)
    near = MaxNLocator(8, steps=(1, 2, 5, 10))
    axes.yaxis.set_major_locator(near if high / low < 4 else LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_NUMBER)


def growth_figure(growths: Sequence[Growth]) -> Figure:
    """Bars of operations over each size that grows, beside the line that the paper's O(…) is."""
    figure = Figure(figsize=(3.0 * len(growths), 3.4), layout="constrained")
    for axes, growth in zip(figure.subplots(1, len(growths), squeeze=False)[0], growths):
        places = range(len(growth.sizes))
        counts = np.divide(growth.operations, growth.operations[0])
        paper = np.divide(growth.sizes, growth.sizes[0]) ** growth.expected
        axes.bar(places, counts, 0.6, color=PALETTE[0], label="counted")
        axes.plot(places, paper, "o--", color=PALETTE[1], label="N C G max(HW, G)")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(_NUMBER)
        axes.set_ylim(bottom=0.5)
        axes.set_xticks(places, growth.sizes)
        axes.set_xlabel(growth.variable)
        axes.set_title(f"{growth.regime}: exponent {growth.exponent:.2f}", fontsize=10)
        style_bars(axes)
    figure.axes[0].set_ylabel("operations, relative to the first")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure
