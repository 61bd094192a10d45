"""The page of a run: what was trained and what came of it, as one HTML file that needs no other."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
from torch import nn

from ..analysis.drawing import PALETTE, plot_series, style_iterations
from ..analysis.importance import final_ratios, importance_curves
from ..analysis.importance_figures import final_ratios_figure, importance_curves_figure
from ..analysis.metrics import Series, read_metrics
from ..files import written_whole
from ..modeling.summary import sw_layers, sw_table
from .curves import losses_figure
from .html import pre_html, svg_html, table_html
from .tables import of_category

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
    results = dict(_by_task(results or {}))
    sections = {
        "Results": _results_tables(results),
        **task_sections,
        "Losses": svg_html(losses_figure(series), "losses by iteration"),
        "Evaluations": _evaluation_curves(series, results),
        "SW layers": pre_html(sw_table(model)),
        "Importance ratios": _importance_figures(series, model),
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


def _importance_figures(series: dict[str, Series], model: nn.Module) -> str:
    names = {row.name for row in sw_layers(model)}  # the folder may have records of another run
    curves = {name: c for name, c in importance_curves(series).items() if name in names}
    if not curves:
        return ""
    return svg_html(importance_curves_figure(curves), "importance ratios by iteration") + svg_html(
        final_ratios_figure(final_ratios(curves)), "final importance ratios"
    )


def _results_tables(results: dict[str, dict[str, float]]) -> str:
    """A row for each task, and below it a row for each of its categories."""
    text = ""
    for task, metrics in results.items():
        main = {name: value for name, value in metrics.items() if not of_category(name)}
        if main:
            text += table_html([(task, *map(_number, main.values()))], ["task", *main])
        # As in "IoU-wall": evaluators name the metric first, and the category may have any name.
        by_category: dict[str, dict[str, str]] = defaultdict(dict)
        for name in filter(of_category, metrics):
            metric, _, category = name.partition("-")
            by_category[category][metric] = _number(metrics[name])
        if by_category:
            columns = list(dict.fromkeys(m for row in by_category.values() for m in row))
            rows = [
                (category, *(row.get(column, "") for column in columns))
                for category, row in by_category.items()
            ]
            table = table_html(rows, ["category", *columns])
            text += f"<details><summary>{escape(task)} by category</summary>{table}</details>"
    return text


def _evaluation_curves(series: dict[str, Series], results: dict[str, dict[str, float]]) -> str:
    """A panel for each task; nothing if the run was evaluated only once."""
    panels: dict[str, dict[str, Series]] = {}
    for task, metrics in results.items():
        curves = {
            name: series[f"{task}/{name}"]
            for name in metrics
            if not of_category(name) and len(series.get(f"{task}/{name}", ((),))[0]) > 1
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


def _by_task(results: Mapping, path: str = "") -> Iterator[tuple[str, Mapping[str, float]]]:
    """The metrics of each task, or of each data set and task: "bbox", "coco_2017_val/bbox"."""
    for name, value in results.items():
        if isinstance(value, Mapping):
            inside = f"{path}{name}"
            nested = any(isinstance(v, Mapping) for v in value.values())
            yield from _by_task(value, f"{inside}/") if nested else [(inside, value)]


def _number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
