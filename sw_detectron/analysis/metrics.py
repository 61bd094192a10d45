"""Reads what a run recorded: Detectron2's `metrics.json`, or TensorBoard's event files."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ..errors import UserError

Series = tuple[np.ndarray, np.ndarray]
"""Iterations and values, both of shape (N,); iterations ascend."""

START_ITERATION, START_TIME = "start_iteration", "start_time"
"""Keys of every record of the trainer: the first iteration since the run was started or resumed,
and when that was. The event files have them too, and `read_metrics` uses them up."""


def read_metrics(path: str | os.PathLike) -> dict[str, Series]:
    """Every scalar that a run recorded, by its key.

    A folder may hold the records of several runs, or of one that was resumed. What the last of
    them recorded counts, and of the earlier ones what lies before its first iteration. Lines of
    `metrics.json` that a crash cut short are skipped.

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
    return _to_series(_split_into_runs(_parse_records(lines)), path)


def _parse_records(lines: Iterable[str]) -> Iterable[dict]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("iteration"), int):
            yield {k: v for k, v in record.items() if isinstance(v, (int, float))}


def _split_into_runs(records: Iterable[dict]) -> list[list[dict]]:
    """The records of each run, in the order in which the runs began."""
    runs: dict[object, list[dict]] = {}
    latest: dict[object, int] = {}
    current = None
    for record in records:
        iteration = record["iteration"]
        if START_TIME in record:
            current = record[START_TIME]
        elif iteration <= latest.get(current, -1) and _begins_a_run(record, runs[current]):
            current = object()
        runs.setdefault(current, []).append(record)
        latest[current] = max(iteration, latest.get(current, -1))
    return list(runs.values())


def _begins_a_run(record: dict, run: list[dict]) -> bool:
    """Whether a record cannot belong to the run that the records before it are of.

    Within a run iterations go back too: the writer keeps what was recorded since it last wrote, as
    one line for each iteration, in no order. But then the lines have no keys in common.
    """
    not_before = [r for r in run if r["iteration"] >= record["iteration"]]
    keys = [key for r in (record, *not_before) for key in r if key != "iteration"]
    repeated = record["iteration"] in (r["iteration"] for r in not_before)
    return repeated or len(set(keys)) < len(keys)


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
    runs = []  # a file for each, whose name has the time, and last a number
    files = path.glob("*tfevents*") if path.is_dir() else [path]
    for file in sorted(files, key=lambda f: [int(n) for n in re.findall(r"\d+", f.name)]):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0: all of them
        events.Reload()
        runs.append(
            [
                {"iteration": event.step, tag: event.value}
                for tag in events.Tags()["scalars"]
                for event in events.Scalars(tag)
            ]
        )
    return _to_series(runs, path)


def _to_series(runs: list[list[dict]], path: Path) -> dict[str, Series]:
    records: list[Mapping] = []
    for run in runs:
        start = min(
            (value for r in run for k, value in r.items() if k in ("iteration", START_ITERATION)),
            default=float("inf"),
        )
        records = [record for record in records if record["iteration"] < start] + run
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        for key, value in record.items():
            if key not in (START_ITERATION, START_TIME):
                values[key][record["iteration"]] = value
    values.pop("iteration", None)
    if not values:
        raise UserError(f"Cannot read metrics from {path}: it holds no record of an iteration.")
    return {
        key: tuple(np.array(sorted(by_iteration.items()), dtype=float).T)
        for key, by_iteration in values.items()
    }
