"""The table of average precisions as JSON, and as a row of Markdown."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from ..files import written_whole

METRICS = Mapping[str, float]  # by name: AP, AP50, …, and AP-<class> for single classes
TASKS = Mapping[str, METRICS]  # by name: bbox, segm, …


def write_results(
    results: TASKS | Mapping[str, TASKS],
    folder: str | Path,
    config: str,
    iterations: int | None = None,
) -> None:
    """Write `results.json`, all metrics, and `results.md`, the table without single classes.

    Metrics that are not finite, such as the AP of a class without instances, are null in JSON and
    a dash in Markdown. Each file is written whole or not at all.

    Args:
        results: of an evaluation, by task; or by data set and task, if there were several.
        folder: where the files go.
        config: the config's name.
        iterations: how long the model was trained, if that is known.
    """
    record = {"config": config, "iterations": iterations, "results": finite(results)}
    write_text(Path(folder) / "results.json", json.dumps(record, indent=2, allow_nan=False) + "\n")
    write_text(Path(folder) / "results.md", markdown_table(results, config, iterations) + "\n")


def markdown_table(
    results: TASKS | Mapping[str, TASKS], config: str, iterations: int | None = None
) -> str:
    """Header, separator and a row for each data set; arguments as in `write_results`.

    Columns are the config, the data set if there are several, the iterations if they are known,
    and then "box AP", "box AP50", …, "mask AP", …, with one decimal, errors with two.
    """
    several = any(isinstance(v, Mapping) for tasks in results.values() for v in tasks.values())
    rows = []
    for dataset, tasks in results.items() if several else [("", results)]:
        row = {"config": config}
        if several:
            row["data set"] = dataset
        if iterations is not None:
            row["iterations"] = str(iterations)
        for task, metrics in tasks.items():
            label = task.replace("bbox", "box").replace("segm", "mask").replace("_", " ")
            for name, value in metrics.items():
                if not of_category(name):
                    # As papers give them: average precision in tenths of a percent, errors finer.
                    digits = 2 if name.endswith("error") else 1
                    text = f"{value:.{digits}f}" if math.isfinite(value) else "-"
                    row[f"{label} {name}"] = text
        rows.append(row)
    # A bar would end its cell.
    rows = [{k.replace("|", r"\|"): v.replace("|", r"\|") for k, v in r.items()} for r in rows]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def of_category(metric: str) -> bool:
    """As in "AP-person"; evaluators have no other metrics with a dash."""
    return "-" in metric


def finite(values: Mapping) -> dict:
    """Nested numbers as JSON has them: None for what is not finite."""
    return {
        key: finite(value)
        if isinstance(value, Mapping)
        else (float(value) if math.isfinite(value) else None)
        for key, value in values.items()
    }


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with written_whole(path) as unfinished:
        unfinished.write_text(text)
