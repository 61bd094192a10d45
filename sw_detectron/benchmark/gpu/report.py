"""The report of what a GPU measured: Markdown, JSON and a chart."""

import importlib.metadata
import json
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from tabulate import tabulate

from ...analysis import save_figure
from ...files import written_whole
from ..results import describe_machine
from .budget import Outcome
from .chart import make_chart
from .goals import find_goals
from .suite import SuiteRun

REHEARSAL = "rehearsal: the numbers mean nothing"


def describe_gpu(device: torch.device) -> dict[str, object]:
    """The machine, with what the speed of kernels depends on, and the date."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    of_gpu = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        of_gpu = {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "driver": _driver(),
        }
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return describe_machine(device) | of_gpu | {"triton": triton, "date": date}


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def write_report(
    folder: Path, machine: dict[str, object], outcomes: Sequence[Outcome], rehearsal: bool
) -> None:
    """Write `report.md`, `report.json` and, where there is something to draw, `chart.png`.

    Args:
        machine: by `describe_gpu`.
        outcomes: of all parts, those that are yet to come included.
    """
    records = [pair for outcome in outcomes for pair in outcome.records]
    figure = make_chart(records, _title(machine, rehearsal))
    if figure is not None:
        save_figure(figure, folder / "chart.png")
    content = {
        "rehearsal": rehearsal,
        "machine": machine,
        "goals": [goal.record() for goal in find_goals(records)],
        "parts": [
            {"part": o.part, "state": o.state, "seconds": o.seconds, "notes": o.notes}
            for o in outcomes
        ],
        "results": [{"heading": heading, **record.record()} for heading, record in records],
    }
    with written_whole(folder / "report.json") as path:
        path.write_text(json.dumps(content, indent=2) + "\n")
    with written_whole(folder / "report.md") as path:
        path.write_text(_markdown(machine, outcomes, rehearsal, figure is not None))


def _title(machine: dict[str, object], rehearsal: bool) -> str:
    title = f"Switchable Whitening on {machine['gpu'] or machine['cpu']}"
    return f"{title} ({REHEARSAL})" if rehearsal else title


def _markdown(
    machine: dict[str, object], outcomes: Sequence[Outcome], rehearsal: bool, drawn: bool
) -> str:
    records = [pair for outcome in outcomes for pair in outcome.records]
    parts = [
        {"part": o.part, "state": o.state, "seconds": f"{o.seconds:.0f}" if o.seconds else ""}
        for o in outcomes
    ]
    blocks = [f"# {_title(machine, rehearsal)}"]
    names = [name for name in machine if name not in ("device", "command")]
    blocks.append("\n".join(f"- {name.replace('_', ' ')}: {machine[name]}" for name in names))
    blocks += [
        "## Goals",
        _table([goal.row() for goal in find_goals(records)], disable_numparse=True),
    ]
    blocks += ["## Parts", _table(parts)]
    notes = [f"- {o.part}: {note}" for o in outcomes for note in dict.fromkeys(o.notes)]
    if notes:
        blocks.append("\n".join(notes))
    if drawn:
        blocks += ["## Chart", "![time, and bandwidth of the passes](chart.png)"]
    for heading in dict.fromkeys(heading for heading, _ in records):
        shown = [record for its, record in records if its == heading]
        blocks += [f"## {heading}", _table([record.row() for record in shown])]
        failed = [name for r in shown if isinstance(r, SuiteRun) for name in r.failed]
        if failed:
            blocks.append("\n".join(f"- failed: `{name}`" for name in failed))
    return "\n\n".join(blocks) + "\n"


def _table(rows: list[dict[str, object]], **options) -> str:
    rows = [{key.replace("\n", " "): value for key, value in row.items()} for row in rows]
    return tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f", **options)
