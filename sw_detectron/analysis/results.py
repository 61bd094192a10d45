"""Writes a figure together with its numbers."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..files import written_whole
from .drawing import save_figure

PRINT_DPI = 200


def save_result(
    folder: Path, name: str, figure: Figure, header: Sequence[str], rows: Iterable[Sequence]
) -> None:
    """Write `name`.png, `name`.svg and, with the numbers that the figure shows, `name`.csv."""
    save_figure(figure, folder / f"{name}.png", dpi=PRINT_DPI)
    save_figure(figure, folder / f"{name}.svg")
    with (
        written_whole(folder / f"{name}.csv") as unfinished,
        open(unfinished, "w", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
