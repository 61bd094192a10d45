"""The page of a run: what was trained and what came of it, as one HTML file that needs no other."""

from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path

from detectron2.evaluation.testing import flatten_results_dict
from matplotlib.figure import Figure
from torch import nn

from ..analysis.drawing import PALETTE, plot_series, style_iterations
from ..analysis.importance import final_ratios, importance_curves
from ..analysis.importance_figures import final_ratios_figure, importance_curves_figure
from ..analysis.metrics import Series, read_metrics
from ..files import written_whole
from ..modeling.summary import sw_table
from .curves import losses_figure
from .html import pre_html, svg_html, table_html

_STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; }
img { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #ccc; padding: 0.2em 0.8em; text-align: left; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


def write_page(
    folder: Path,
    model: nn.Module,
    results: dict | None,
    config: str,
    task_sections: Mapping[str, str],
) -> Path:
    """Write `report.html` to the folder of a run, whole or not at all.

    It holds the config, the table of SW layers, the curves of losses, evaluations and importance
    ratios, the results, and what the task shows. All pictures are inside; it refers to nothing
    outside.

    Args:
        folder: with the run's `metrics.json`.
        model: with its final weights.
        results: of the last evaluation, by task, or by data set and task; None or empty if there
            was none.
        config: all keys of the run.
        task_sections: HTML by headline, as `Task.page_sections` returns it.

    Returns:
        The path of the file.

    Raises:
        UserError: the run has no records.
    """
    series = read_metrics(folder)
    results = flatten_results_dict(results or {})
    sections = {
        "Results": _results_tables(results),
        **task_sections,
        "Losses": svg_html(losses_figure(series), "losses by iteration"),
        "Evaluations": _evaluation_curves(series, results),
        "SW layers": pre_html(sw_table(model)),
        "Importance ratios": _importance_figures(series),
        "Config": f"<details><summary>all keys</summary>{pre_html(config)}</details>",
    }
    title = escape(folder.resolve().name)
    body = "\n".join(f"<h2>{name}</h2>\n{text}" for name, text in sections.items() if text)
    path = folder / "report.html"
    with written_whole(path) as unfinished:
        unfinished.write_text(
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            f"{body}\n</body>\n</html>\n",
            encoding="utf-8",
        )
    return path


def _importance_figures(series: dict[str, Series]) -> str:
    curves = importance_curves(series)
    if not curves:
        return ""
    return svg_html(importance_curves_figure(curves), "importance ratios by iteration") + svg_html(
        final_ratios_figure(final_ratios(curves)), "final importance ratios"
    )


def _results_tables(results: dict[str, float]) -> str:
    """A row for each task, and below it those of its single categories."""
    text = ""
    for task, metrics in _by_task(results).items():
        main = {name: value for name, value in metrics.items() if not _of_category(name)}
        categories = [
            (name.partition("-")[2], _number(value))
            for name, value in metrics.items()
            if _of_category(name)
        ]
        if main:
            text += table_html([(task, *map(_number, main.values()))], ["task", *main])
        if categories:
            table = table_html(categories, ["category", task])
            text += f"<details><summary>{escape(task)} by category</summary>{table}</details>"
    return text


def _evaluation_curves(series: dict[str, Series], results: dict[str, float]) -> str:
    """A panel for each task; nothing if the run was evaluated only once."""
    panels: dict[str, dict[str, Series]] = {}
    for task, metrics in _by_task(results).items():
        curves = {
            name: series[f"{task}/{name}"]
            for name in metrics
            if not _of_category(name) and len(series.get(f"{task}/{name}", ((),))[0]) > 1
        }
        if curves:
            panels[task] = curves
    if not panels:
        return ""
    figure = Figure(figsize=(12, 3.4 * len(panels)), layout="constrained")
    column = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (task, curves) in zip(column, panels.items()):
        for index, (name, (iterations, values)) in enumerate(curves.items()):
            color = PALETTE[index % len(PALETTE)]
            plot_series(axes, iterations, values, color=color, label=name)
        axes.set_title(task, fontsize=11)
        axes.set_xlabel("iteration")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
        style_iterations(axes, ticks=6)
    return svg_html(figure, "evaluations by iteration")


def _by_task(results: dict[str, float]) -> dict[str, dict[str, float]]:
    tasks: dict[str, dict[str, float]] = defaultdict(dict)
    for key, value in results.items():
        task, _, metric = key.rpartition("/")
        tasks[task][metric] = value
    return tasks


def _of_category(metric: str) -> bool:
    """As in "AP-person"; evaluators have no other metrics with a dash."""
    return "-" in metric


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
