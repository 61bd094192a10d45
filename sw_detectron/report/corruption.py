"""The results of `tools/corruption_benchmark.py`: numbers, tables and pictures."""

import json
from collections.abc import Mapping
from pathlib import Path

from ..analysis.corruption import (
    Condition,
    Robustness,
    corruption_figure,
    markdown_tables,
    mean_names,
    metrics_of,
)
from ..analysis.drawing import save_figure
from .tables import finite, write_text


def save_corruption(
    folder: Path,
    dataset: str,
    images: int,
    measured: Mapping[str, Mapping[str, Mapping[Condition, float]]],
    summed_up: Mapping[str, Mapping[str, Robustness]],
) -> None:
    """Write `results.json`, `results.md`, and `corruptions.png` of the first metric; that of a
    further one is `corruptions_<metric>.png`.

    Args:
        dataset, images: what the models were evaluated on.
        measured, summed_up: by model and metric, in percent.

    Raises:
        UserError: a file cannot be written.
    """
    record = {
        "data set": dataset,
        "images": images,
        "models": {
            name: {
                metric: _as_json(summary, measured[name][metric])
                for metric, summary in metrics.items()
            }
            for name, metrics in summed_up.items()
        },
    }
    write_text(folder / "results.json", json.dumps(record, indent=2, allow_nan=False) + "\n")
    head = f"{images} images of `{dataset}`, in percent.\n\n"
    write_text(folder / "results.md", head + markdown_tables(summed_up) + "\n")
    for number, metric in enumerate(metrics_of(measured)):
        lines = {name: metrics[metric] for name, metrics in measured.items() if metric in metrics}
        name = "corruptions" if number == 0 else f"corruptions_{metric.replace(' ', '_')}"
        save_figure(corruption_figure(lines, metric), folder / f"{name}.png")


def _as_json(summary: Robustness, values: Mapping[Condition, float]) -> dict:
    mean, relative = mean_names(summary.complete)
    corruptions = {
        corruption: {str(severity): v for (c, severity), v in values.items() if c == corruption}
        for corruption in summary.by_corruption
    }
    return finite(
        {
            "P_clean": summary.clean,
            mean: summary.mean,
            relative: summary.relative,
            "mean over severities": summary.by_corruption,
            "by severity": corruptions,
        }
    )
