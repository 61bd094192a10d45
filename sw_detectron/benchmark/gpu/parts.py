"""What is measured on a GPU, in parts; each yields its records as they come, best first."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from ..arguments import DTYPES, SHAPE_SETS, Shape, format_shape
from ..host import benchmark_host
from ..layers import DEFAULT_SETS, benchmark_layers
from ..models import benchmark_models
from ..results import Result
from .profiling import KernelTime, copy_time, kernel_times
from .suite import SuiteRun, gpu_tests, run_suite

IMAGENET = tuple((64, *shape) for shape in SHAPE_SETS["imagenet"])
# How many of the seven SW layers of a ResNet-50 have each of these shapes.
IMAGENET_COUNTS = dict(zip(IMAGENET, (1, 1, 2, 3)))


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        layer_shapes: groups of inputs; all dtypes and formats of one group before the next.
        classifying, detecting: (images, (height, width)) of the steps, by what is tried first.
        kernel_shape: too large for a GPU's cache in every dtype.
        copy_size: bytes.
        how: the backend whose kernels are looked at.
        compiler: a backend of `torch.compile`.
        thin: small networks.
        sets: of SW, whose kernels are looked at.
        suite: how many files of tests to run, or None for all that concern a GPU.
    """

    device: torch.device
    folder: Path
    layer_shapes: tuple[tuple[Shape, ...], ...] = (IMAGENET, SHAPE_SETS["table"])
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    formats: tuple[str, ...] = ("channels_last", "contiguous")
    classifying: tuple = ((64, (224, 224)), (32, (224, 224)), (8, (224, 224)))
    detecting: tuple = ((2, (800, 1216)), (1, (800, 1216)), (1, (480, 640)))
    kernel_shape: Shape = IMAGENET[0]
    copy_size: int = 1 << 30
    rounds: int = 15
    step_rounds: int = 25  # the goals of steps are narrow
    warmup: int = 3
    calls: int = 10
    how: str = "auto"
    amp: bool = True
    compiler: str = "inductor"
    thin: bool = False
    sets: tuple[tuple[str, ...], ...] = DEFAULT_SETS
    suite: int | None = None


def rehearsal(folder: Path) -> Scale:
    """Everything as small as it can be, on the CPU; kernels run in Triton's interpreter."""
    return Scale(
        device=torch.device("cpu"),
        folder=folder,
        layer_shapes=(((2, 16, 4, 4),), ((1, 16, 3, 5),)),
        classifying=((1, (64, 64)),),
        detecting=((1, (64, 64)),),
        kernel_shape=(1, 16, 4, 4),
        copy_size=1 << 16,
        rounds=2,
        step_rounds=2,
        warmup=1,
        calls=1,
        how="triton",
        amp=False,
        compiler="eager",
        thin=True,
        sets=DEFAULT_SETS[:1],
        suite=1,
    )


class Part(NamedTuple):
    """A part of the report.

    Attributes:
        share: of the time that is left, in proportion to the shares of the parts that follow.
        measure: gives headings with records, or with lines that say what is missing, for a scale
            and the seconds that it has.
    """

    name: str
    share: float
    measure: Callable[[Scale, float], Iterator[tuple[str, object]]]


def tests(scale: Scale, seconds: float) -> Iterator[tuple[str, SuiteRun]]:
    files = gpu_tests()[: scale.suite]
    processes = 1 if scale.thin else max(1, min(6, (os.cpu_count() or 1) // 2))
    # The rest is for ending them.
    yield "Tests", run_suite(files, 0.95 * seconds - 1, scale.folder / "tests.log", processes)


def kernels(scale: Scale, seconds: float) -> Iterator[tuple[str, KernelTime]]:
    copy = copy_time(scale.device, scale.copy_size, scale.rounds, scale.warmup)
    yield "Kernels", copy
    for dtype, memory_format in zip(scale.dtypes, scale.formats):
        x = (scale.kernel_shape, scale.device, DTYPES[dtype], memory_format)
        for record in kernel_times(*x, scale.sets, scale.how, copy, scale.calls, scale.warmup):
            yield "Kernels", record


def host(scale: Scale, seconds: float) -> Iterator[tuple[str, Result]]:
    rounds = {"rounds": scale.rounds, "warmup": scale.warmup}
    for result in benchmark_host(scale.device, whitenings=["newton"], **rounds):
        yield "Host time", result


def layers(scale: Scale, seconds: float) -> Iterator[tuple[str, Result | str]]:
    options = {"whitenings": ["newton"], "others": False}
    options |= {"rounds": scale.rounds, "warmup": scale.warmup}
    for shapes, dtype, memory_format in product(scale.layer_shapes, scale.dtypes, scale.formats):
        heading = f"Layers, {dtype}"
        for shape in shapes:
            x = ([shape], scale.device, DTYPES[dtype], [memory_format])
            try:
                for result in benchmark_layers(*x, **options):
                    yield heading, result
            except torch.OutOfMemoryError:
                yield heading, f"the memory does not suffice for {format_shape(shape)}"


def steps(
    scale: Scale, seconds: float, model: str, compiled: bool = False
) -> Iterator[tuple[str, Result | str]]:
    heading = "Training steps"
    of_detector = model == "mask_rcnn"
    options = {"rounds": scale.step_rounds, "warmup": scale.warmup, "thin": scale.thin}
    options |= {"amp": scale.amp and not of_detector}
    options |= {"compiler": scale.compiler if compiled else None}
    for memory_format in ["contiguous"] if of_detector else scale.formats:
        for images, size in scale.detecting if of_detector else scale.classifying:
            try:
                for result in benchmark_models(
                    [model], scale.device, images, size, [memory_format], **options
                ):
                    yield heading, result
                break
            except torch.OutOfMemoryError:
                shape = format_shape((images, 3, *size))
                yield heading, f"the memory does not suffice for {model} {shape}"


PARTS = (
    Part("tests", 16, tests),
    Part("kernels", 10, kernels),
    Part("host time", 3, host),
    Part("layers", 22, layers),
    Part("ResNet-50", 8, partial(steps, model="resnet50")),
    Part("Mask R-CNN", 10, partial(steps, model="mask_rcnn")),
    Part("ResNet-50, compiled", 31, partial(steps, model="resnet50", compiled=True)),
)
