"""Reads what a run recorded: Detectron2's `metrics.json`, or TensorBoard's event files."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..errors import UserError

Series = tuple[np.ndarray, np.ndarray]
"""Iterations and values, both of shape (N,); iterations ascend."""


def read_metrics(path: str | os.PathLike) -> dict[str, Series]:
    """Every scalar that a run recorded, by its key.

    Lines of `metrics.json` that a crash cut short are skipped; where a resumed run repeats an
    iteration, the later record counts.

    Args:
        path: a `metrics.json`; an event file; or the folder of a run, whose `metrics.json` is
            taken, or, without one, whose event files are.

    Raises:
        UserError: there is no such file, or it holds no records.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "metrics.json").is_file() and list(path.glob("*tfevents*")):
            return _read_events(path)
        path = path / "metrics.json"
    return _read_events(path) if "tfevents" in path.name else _read_json(path)


def _read_json(path: Path) -> dict[str, Series]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"Cannot read metrics from {path}: {error.strerror}") from None
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for record in _parse_records(lines):
        for key, value in record.items():
            if isinstance(value, (int, float)):
                values[key][record["iteration"]] = value
    return _to_series(values, path)


def _parse_records(lines: Iterable[str]) -> Iterable[dict]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("iteration"), int):
            yield record


def _read_events(path: Path) -> dict[str, Series]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UserError(
            f"Cannot read metrics from {path}: event files need tensorboard (pip install "
            "tensorboard)"
        ) from None
    if not path.exists():
        raise UserError(f"Cannot read metrics from {path}: No such file or directory")
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    values = {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
    return _to_series(values, path)


def _to_series(values: dict[str, dict[int, float]], path: Path) -> dict[str, Series]:
    if not values:
        raise UserError(f"Cannot read metrics from {path}: it holds no record of an iteration.")
    return {
        key: tuple(np.array(sorted(by_iteration.items()), dtype=float).T)
        for key, by_iteration in values.items()
    }
