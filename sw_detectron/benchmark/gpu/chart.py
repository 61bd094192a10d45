"""The chart of what a GPU measured."""

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from ...analysis.drawing import PALETTE, shorten
from ..drawing import bar_styles, plot_bars, scale_ratios, style_bars
from ..results import BASELINE, Result
from .profiling import ALL, COPY, KernelTime


def make_chart(records: Iterable[tuple[str, object]], title: str) -> Figure | None:
    """Times of layers and of training steps relative to BN's, and the bandwidth of the passes.

    A panel for each dtype and format of the layers, one for the steps, one for the passes; those of
    which nothing was measured are not there. None if that is all of them.
    """
    records = list(records)
    panels = _ratio_panels(records)
    passes = [r for _, r in records if isinstance(r, KernelTime) and r.share and r.kernel != COPY]
    count = len(panels) + bool(passes)
    if not count:
        return None
    groups = max([len(p["cases"]) * len(p["styles"]) for p in panels] + [len(passes)])
    figure = Figure(figsize=(max(8.0, 2 + 0.3 * groups), 0.8 + 3.4 * count), layout="constrained")
    figure.suptitle(title, fontsize=12)
    rows = figure.subplots(count, 1, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels):
        plot_bars(axes, panel["timings"], panel["cases"], panel["styles"])
        shown = [t for (_, name), t in panel["timings"].items() if name != BASELINE]
        scale_ratios(axes, shown)
        axes.set_title(panel["title"], fontsize=11)
        axes.set_ylabel(f"time / time of {BASELINE}")
        handles = [Patch(label=name, **style) for name, style in panel["styles"].items()]
        axes.legend(handles=handles, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    if passes:
        _plot_passes(rows[-1], passes)
    return figure


def _ratio_panels(records: list[tuple[str, object]]) -> list[dict]:
    """What is in each panel of ratios: title, cases, timings by (case, contender), and styles."""
    panels: dict[str, dict] = {}
    for heading, result in records:
        if not isinstance(result, Result):
            continue
        if heading.startswith("Layers"):
            what = "forward+backward"
            title, case = f"{heading}, {result.memory_format}: {what}", result.case
        elif heading == "Training steps":
            what, title = "training step", heading
            case = "\n".join([*result.case.split(), result.memory_format])
        else:
            continue
        panel = panels.setdefault(title, {"title": title, "timings": {}})
        # A step has SW at some of its layers, as many as its network has.
        name = "SW" if what == "training step" and result.contender != BASELINE else None
        panel["timings"][case, name or result.contender] = result.timings[what]
    for panel in panels.values():
        cases, names = (list(dict.fromkeys(keys)) for keys in zip(*panel["timings"]))
        panel["cases"] = cases
        panel["styles"] = bar_styles([name for name in names if name != BASELINE])
    return [panel for panel in panels.values() if panel["styles"]]


def _plot_passes(axes: Axes, passes: list[KernelTime]) -> None:
    """Bars of the share of a copy's bandwidth; pale: all kernels of a layer."""
    contenders = list(dict.fromkeys(p.contender for p in passes))
    for place, one in enumerate(passes):
        color = PALETTE[contenders.index(one.contender) % len(PALETTE)]
        axes.bar(place, one.share, 0.7, color=color, alpha=0.5 if one.kernel == ALL else 1.0)
        axes.annotate(
            f"{one.share:.0%}",
            (place, one.share),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.axhline(0.8, color="black", linewidth=0.8, linestyle="--")
    labels = [f"{shorten(p.kernel, 24)}\n{p.case.split(' ', 1)[1]}" for p in passes]
    axes.set_xticks(range(len(passes)), labels, rotation=90, fontsize=8)
    axes.set_xlim(-0.7, len(passes) - 0.3)
    axes.set_ylim(0, max(1.0, *(p.share for p in passes)) * 1.12)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("of a copy's bandwidth")
    axes.set_title(
        "Feature maps read and written in the time of a kernel; dashed: the goal", fontsize=11
    )
    handles = [
        Patch(label=name, color=PALETTE[index % len(PALETTE)])
        for index, name in enumerate(contenders)
    ]
    axes.legend(handles=handles, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    style_bars(axes)
