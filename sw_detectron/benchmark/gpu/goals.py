"""What the layer is meant to cost on a GPU, and what it does."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..results import BASELINE, Result
from .parts import IMAGENET_COUNTS
from .profiling import ALL, MAPS, KernelTime
from .suite import SuiteRun

LARGE = 8_000_000  # values of a feature map
SMALLEST = min(IMAGENET_COUNTS, key=math.prod)

Records = Iterable[tuple[str, object]]


class Value(NamedTuple):
    """A measured value, and of what."""

    value: float
    of: str


@dataclass(frozen=True)
class Goal:
    """A bound, and what was measured of it.

    Attributes:
        bound: what no value may exceed, or fall below where `at_least`.
        form: how a value is written.
    """

    name: str
    bound: float
    values: tuple[Value, ...]
    at_least: bool = False
    form: str = ".2f"

    @property
    def missed(self) -> list[Value]:
        """The values beyond the bound, the worst first."""
        if self.at_least:
            return sorted(v for v in self.values if v.value < self.bound)
        return sorted((v for v in self.values if v.value > self.bound), reverse=True)

    @property
    def state(self) -> str:
        if not self.values:
            return "not measured"
        return f"MISSED by {len(self.missed)} of {len(self.values)}" if self.missed else "met"

    @property
    def worst(self) -> Value | None:
        choose = min if self.at_least else max
        return choose(self.values, default=None)

    def row(self) -> dict[str, object]:
        worst = self.worst
        return {
            "goal": f"{self.name} {'≥' if self.at_least else '≤'} {self.bound:{self.form}}",
            "state": self.state,
            "worst": f"{worst.value:{self.form}}" if worst else "",
            "of": worst.of if worst else "",
        }

    def record(self) -> dict[str, object]:
        return {
            "name": self.name,
            "bound": self.bound,
            "at_least": self.at_least,
            "state": self.state,
            "missed": [value._asdict() for value in self.missed],
        }

    def line(self) -> str:
        """What is printed of a goal that is not met."""
        row = self.row()
        return f"{row['goal']}: {row['state']}" + (
            f", {row['worst']} for {row['of']}" if self.values else ""
        )


def find_goals(records: Records) -> list[Goal]:
    """The goals, with what the records have of each."""
    records = list(records)
    sizes = list(_sizes(records))
    steps = list(_steps(records))
    kernels = [record for _, record in records if isinstance(record, KernelTime)]
    passes = [
        Value(kernel.share, f"{kernel.kernel}, {kernel.contender}, {kernel.case}")
        for kernel in kernels
        if kernel.share is not None and any(kernel.kernel.startswith(name) for name in MAPS)
    ]
    launches = [
        Value(kernel.launches, f"{kernel.contender}, {kernel.case}")
        for kernel in kernels
        if kernel.kernel == ALL and kernel.contender != BASELINE
    ]
    failed = [
        Value(len(record.failed), f"{record.passed} that passed, {record.row()['ran']}")
        for _, record in records
        if isinstance(record, SuiteRun) and record.status != 5
    ]
    return [
        Goal("tests that fail", 0, tuple(failed), form=".0f"),
        Goal(
            f"layer, map of {LARGE // 10**6} M values or more, time / BN's",
            1.25,
            tuple(value for size, value in sizes if size >= LARGE),
        ),
        Goal(
            "layer, smallest map of ResNet-50, time / BN's",
            2.0,
            tuple(value for size, value in sizes if size == math.prod(SMALLEST)),
        ),
        Goal(
            "ResNet-50's layers, memory kept / BN's",
            1.05,
            tuple(_memory_kept(records)),
        ),
        Goal(
            "ResNet-50 step, time / BN's",
            1.05,
            tuple(value for model, value in steps if model == "resnet50"),
        ),
        Goal(
            "Mask R-CNN step, time / BN's",
            1.01,
            tuple(value for model, value in steps if model == "mask_rcnn"),
            form=".3f",
        ),
        Goal("pass, share of a copy's bandwidth", 0.8, tuple(passes), at_least=True),
        Goal("launches, forward and backward", 7, tuple(launches), form=".0f"),
    ]


def _layers(records: Records) -> Iterator[tuple[str, Result]]:
    for heading, record in records:
        if heading.startswith("Layers") and not record.contender.endswith(" plain"):
            yield heading.removeprefix("Layers, "), record


def _shape(result: Result) -> tuple[int, ...]:
    return tuple(map(int, result.case.split("x")))


def _sizes(records: Records) -> Iterator[tuple[int, Value]]:
    """The ratio of each SW layer, with the size of its input."""
    for dtype, result in _layers(records):
        if result.contender != BASELINE:
            of = f"{result.contender}, {result.case} {dtype} {result.memory_format}"
            yield math.prod(_shape(result)), Value(result.timings["forward+backward"].ratio, of)


def _steps(records: Records) -> Iterator[tuple[str, Value]]:
    for heading, result in records:
        if heading == "Training steps" and result.contender != BASELINE:
            of = f"{result.case} {result.memory_format}"
            yield result.case.split()[0], Value(result.timings["training step"].ratio, of)


def _memory_kept(records: Records) -> Iterator[Value]:
    """Of the seven layers together, by set of statistics, dtype and format, where all are there."""
    kept: dict[tuple[str, str, str], dict[tuple[int, ...], float]] = {}
    for dtype, result in _layers(records):
        shape = _shape(result)
        if shape in IMAGENET_COUNTS:
            of = (result.contender, dtype, result.memory_format)
            size = math.prod(shape) * IMAGENET_COUNTS[shape]
            kept.setdefault(of, {})[shape] = size * result.memory["retained_per_input"]
    for (contender, dtype, memory_format), sizes in kept.items():
        if contender != BASELINE and len(sizes) == len(IMAGENET_COUNTS):
            baseline = kept[BASELINE, dtype, memory_format]
            ratio = sum(sizes.values()) / sum(baseline.values())
            yield Value(ratio, f"{contender}, {dtype} {memory_format}")
