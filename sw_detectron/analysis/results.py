"""Writes a figure together with its numbers."""

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..errors import UserError
from ..files import written_whole
from .drawing import save_figure

PRINT_DPI = 200


def make_folder(path: str | os.PathLike) -> Path:
    """The folder of the results, made if it is missing.

    Raises:
        UserError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {str(path)!r}: {error.strerror}") from None
    return Path(path)


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
