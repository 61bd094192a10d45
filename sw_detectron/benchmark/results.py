"""What was measured: as rows of a table, and as a file with the machine that it was measured on."""

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tabulate import tabulate

from ..analysis import save_figure
from ..files import written_whole
from .backends import has_kernels
from .operations import Growth
from .timing import Timing

BASELINE = "BN"


@dataclass(frozen=True)
class Result:
    """What was measured of one contender in one case.

    Attributes:
        case: the shape of the input, preceded by the model's name if there is one.
        memory_format: "contiguous" or "channels_last".
        contender: a name such as "BN" or "SW{bw,iw} newton".
        timings: by what was timed, such as "forward".
        memory: by quantity; the name tells the unit.
        operators: of PyTorch that a call runs; None if they were not counted.
        launches: of Triton kernels, likewise.
    """

    case: str
    memory_format: str
    contender: str
    timings: dict[str, Timing]
    memory: dict[str, float] = field(default_factory=dict)
    operators: int | None = None
    launches: int | None = None

    def record(self) -> dict[str, object]:
        """What `results.json` holds of it."""
        return asdict(self)

    def row(self) -> dict[str, object]:
        """What a table shows of it, by column."""
        row = {"input": self.case, "format": self.memory_format, "norm": self.contender}
        for what, timing in self.timings.items():
            row[f"{what}\nms"] = timing.ms
            row[f"{what}\nvs {BASELINE} (quartiles)"] = str(timing)
        if self.operators is not None:
            row["operators"] = self.operators
        if self.launches is not None:
            row["launches"] = self.launches
        return row | {key.replace("_per_", "\n/ "): size for key, size in self.memory.items()}


def results_table(results: Sequence[Result] | Sequence[Growth]) -> str:
    """The results as text, a row for each."""
    return tabulate([result.row() for result in results], headers="keys", floatfmt=".2f")


def write_results(
    folder: Path,
    name: str,
    results: Sequence[Result] | Sequence[Growth],
    figure: Figure,
    settings: dict[str, object],
    device: torch.device,
) -> None:
    """Write `results.json` and `<name>.png`, the figure, into a folder.

    Args:
        settings: what the benchmark was told.
        device: on which it ran.
    """
    content = {
        "benchmark": name,
        "machine": describe_machine(device),
        "settings": settings,
        "results": [result.record() for result in results],
    }
    text = json.dumps(content, indent=2) + "\n"
    save_figure(figure, folder / f"{name}.png")
    with written_whole(folder / "results.json") as path:
        path.write_text(text)


def describe_machine(device: torch.device) -> dict[str, object]:
    """What the numbers depend on, apart from the settings."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "device": str(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "triton_kernels": has_kernels(device),
        "command": sys.argv,
    }


def _cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
