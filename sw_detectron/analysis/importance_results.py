"""The figures and numbers of several networks' importance ratios, as files of one folder."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from .importance import Importance, average_ratios
from .importance_figures import (
    average_ratios_figure,
    final_ratios_figure,
    importance_curves_figure,
)
from .results import save_result

_COLUMNS = ("moment", "statistic", "ratio")


def save_importance(folder: Path, runs: Sequence[Importance]) -> list[str]:
    """Write figures of networks, each as PNG, SVG and, with the numbers, CSV.

    For each network NAME, these are NAME_curves (Figs. 6 and 7), if it has learning curves, and
    NAME_layers, the final ratios; for all of them together, average (Figs. 1b and 8).

    Returns:
        The NAME of each network, an end of `Importance.name` that no other one has.
    """
    titles = short_names([run.name for run in runs])
    for title, run in zip(tqdm(titles, unit="run", disable=None), runs):
        _save_network(folder, _file_name(title), run)
    averages = {title: average_ratios(run.ratios) for title, run in zip(titles, runs)}
    figure = average_ratios_figure(averages)
    save_result(folder, "average", figure, ("run", *_COLUMNS), _flatten(averages))
    return [_file_name(title) for title in titles]


def short_names(paths: Sequence[str]) -> list[str]:
    """The ends of paths, as long as is needed to tell them apart; numbered if nothing does."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    names = ["/".join(part[-length:]) for part in parts]
    counts, seen = Counter(map(_file_name, names)), Counter()
    for index, name in enumerate(names):
        if counts[_file_name(name)] > 1:
            seen[_file_name(name)] += 1
            names[index] = f"{name} ({seen[_file_name(name)]})"
    return names


def _save_network(folder: Path, name: str, run: Importance) -> None:
    figure = final_ratios_figure(run.ratios)
    save_result(folder, f"{name}_layers", figure, ("layer", *_COLUMNS), _flatten(run.ratios))
    if not run.curves:
        return
    rows = [
        (layer, moment, statistic, ratio, int(iteration))
        for layer, moment, statistic, series in _flatten(run.curves)
        for iteration, ratio in zip(*series)
    ]
    figure = importance_curves_figure(run.curves)
    save_result(folder, f"{name}_curves", figure, ("layer", *_COLUMNS, "iteration"), rows)


def _flatten(nested: dict[str, dict[str, dict]]) -> list[tuple]:
    """(layer or run, moment, statistic, value) of everything in it."""
    return [
        (name, moment, statistic, value)
        for name, moments in nested.items()
        for moment, by_statistic in moments.items()
        for statistic, value in by_statistic.items()
    ]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_")
