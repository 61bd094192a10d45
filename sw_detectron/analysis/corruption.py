"""What a model keeps of its performance under corruptions: mPC, rPC, their tables and pictures.

The definitions are those of Michaelis et al. (arXiv:1907.07484), section 3.3: P is the performance
on the clean test data, P_c,s that under corruption c in severity s,

    mPC = mean over c of the mean over s of P_c,s,    rPC = mPC / P.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.figure import Figure
from tabulate import tabulate

from ..data.corruptions import CORRUPTIONS, SEVERITIES
from .drawing import PALETTE, shorten, style_axes

Condition = tuple[str, int]
"""A corruption and a severity."""

CLEAN: Condition = ("clean", 0)

# What a task's evaluation is summed up by: the result's task, its metric, and the name here.
_MAIN = (
    ("bbox", "AP", "box AP"),
    ("segm", "AP", "mask AP"),
    ("keypoints", "AP", "keypoint AP"),
    ("panoptic_seg", "PQ", "PQ"),
    ("sem_seg", "mIoU", "mIoU"),
)


def main_metrics(results: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """The metrics by which a model's robustness is measured, in percent, higher being better.

    Args:
        results: of an evaluation, by task and metric.

    Returns:
        By name, such as "box AP"; of a classifier the "accuracy", 100 minus the top-1 error. What
        was not measured, such as the AP where there is no object, is NaN.
    """
    found = {
        name: results[task][metric]
        for task, metric, name in _MAIN
        if metric in results.get(task, {})
    }
    error = results.get("classification", {}).get("top1_error")
    if error is not None:
        found["accuracy"] = 100 - error
    return {name: math.nan if value is None else float(value) for name, value in found.items()}


def values_by_metric(
    results: Mapping[Condition, Mapping[str, Mapping[str, float | None]]],
) -> dict[str, dict[Condition, float]]:
    """The main metrics of the clean images, each by condition.

    Evaluators give a detector that finds nothing no AP. If it has one on the clean images, it is 0.

    Args:
        results: of each evaluation, by condition, `CLEAN` among them.
    """
    values = {condition: main_metrics(tasks) for condition, tasks in results.items()}

    def value(condition: Condition, metric: str) -> float:
        found = values[condition].get(metric, math.nan)
        missed = math.isnan(found) and not math.isnan(values[CLEAN][metric])
        return 0.0 if missed else found

    return {metric: {c: value(c, metric) for c in results} for metric in values[CLEAN]}


@dataclass(frozen=True)
class Robustness:
    """A metric of a model, summed up.

    Attributes:
        clean: P.
        by_corruption: mean over the severities.
        mean: over the corruptions; the mPC if `complete`.
        relative: `mean / clean`; the rPC if `complete`. NaN if `clean` is 0.
        complete: all 15 corruptions in all 5 severities were measured.
    """

    clean: float
    by_corruption: dict[str, float]
    mean: float
    relative: float
    complete: bool


def robustness(values: Mapping[Condition, float]) -> Robustness:
    """Sum up a metric that was measured clean, and in the same severities of each corruption.

    Args:
        values: by condition, `CLEAN` among them.
    """
    clean = values[CLEAN]
    by_corruption = {
        corruption: fmean(v for (name, _), v in values.items() if name == corruption)
        for corruption in dict.fromkeys(name for name, _ in values if name != CLEAN[0])
    }
    mean = fmean(by_corruption.values())
    relative = mean / clean if clean else math.nan
    complete = {(c, s) for c in CORRUPTIONS for s in SEVERITIES} <= values.keys()
    return Robustness(clean, by_corruption, mean, relative, complete)


def markdown_tables(models: Mapping[str, Mapping[str, Robustness]]) -> str:
    """For each metric a table with a row for each model: clean, mean, relative; and one of the
    corruptions, with a column for each model.

    Args:
        models: by name and metric.
    """
    parts = []
    for metric in metrics_of(models):
        rows = {name: metrics[metric] for name, metrics in models.items() if metric in metrics}
        names = ("P_clean", *mean_names(next(iter(rows.values())).complete))
        summary = [
            {"model": name}
            | dict(zip(names, (_text(r.clean), _text(r.mean), _percent(r.relative))))
            for name, r in rows.items()
        ]
        corruptions = next(iter(rows.values())).by_corruption
        single = [
            {metric: c} | {name: _text(r.by_corruption[c]) for name, r in rows.items()}
            for c in corruptions
        ]
        parts += [f"## {metric}", _table(summary), "Mean over the severities:", _table(single)]
    return "\n\n".join(parts)


def mean_names(complete: bool) -> tuple[str, str]:
    """The names of `mean` and `relative`: what is not the whole benchmark is not called so."""
    if complete:
        return "mPC", "rPC"
    return "mean over those measured", "of P_clean"


def metrics_of(models: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The metrics that any of the models has."""
    return list(dict.fromkeys(metric for metrics in models.values() for metric in metrics))


def corruption_figure(models: Mapping[str, Mapping[Condition, float]], metric: str) -> Figure:
    """A metric over the severity, a panel for each corruption and a line for each model.

    Lines begin at 0, the clean images.

    Args:
        models: by name, with `CLEAN` and the same conditions for all; in percent.
        metric: its name.
    """
    conditions = next(iter(models.values()))
    corruptions = list(dict.fromkeys(name for name, _ in conditions if name != CLEAN[0]))
    columns = min(5, len(corruptions))
    rows = math.ceil(len(corruptions) / columns)
    size = (max(4.5, 0.8 + 2.3 * columns), 1.0 + 2.1 * rows + 0.25 * len(models))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for number, (axes, corruption) in enumerate(zip(panels, corruptions)):
        for index, (name, values) in enumerate(models.items()):
            points = [(s, v) for (c, s), v in values.items() if c in (CLEAN[0], corruption)]
            axes.plot(
                *zip(*sorted(points)),
                color=PALETTE[index % len(PALETTE)],
                marker="osD^v"[index % 5],
                markersize=3.5,
                linewidth=1.4,
                label=shorten(name, 60) if number == 0 else None,
            )
        axes.set_title(corruption.replace("_", " "), fontsize=10)
        axes.set_xticks((0, *SEVERITIES), ("clean", *SEVERITIES), fontsize=8)
        style_axes(axes)
        if number + columns >= len(corruptions):  # the last of its column
            axes.set_xlabel("severity", fontsize=9)
            axes.tick_params(labelbottom=True)
    for axes in panels[len(corruptions) :]:
        axes.remove()
    panels[0].set_ylim(bottom=0)
    for axes in panels[: len(corruptions) : columns]:
        axes.set_ylabel(f"{metric} (%)", fontsize=9)
    figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    return figure


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    escaped = [{k.replace("|", r"\|"): v.replace("|", r"\|") for k, v in r.items()} for r in rows]
    return tabulate(escaped, headers="keys", tablefmt="github", disable_numparse=True)


def _text(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "-"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "-"
