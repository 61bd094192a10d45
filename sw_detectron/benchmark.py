"""What SW costs: time and memory of layers and of training steps, and how operations grow.

Contenders are timed in interleaved rounds: each round runs every one of them once, so that a
machine that slows down slows all of them, and a contender's ratio to the baseline is taken round
by round. The median over the rounds is reported, with its quartiles.
"""

import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from detectron2.modeling import ResNet, build_model
from detectron2.modeling.backbone import BasicStem
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from fvcore.nn import FlopCountAnalysis
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from .engine import load_config
from .errors import UserError
from .files import written_whole
from .layers import STATISTICS, SwitchWhiten2d, set_backend
from .layers import triton as kernels
from .layers.backend import get_backend
from .layers.composed import composed_switch_whiten
from .layers.functional import WHITENING_METHODS
from .layers.options import Options
from .modeling import replace_norms

BASELINE = "BN"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SHAPE_SETS = {
    # A mixture of classification and detection, small enough for a CPU.
    "table": (
        (8, 64, 56, 56),
        (8, 128, 28, 28),
        (8, 256, 14, 14),
        (2, 64, 200, 304),
        (2, 256, 50, 76),
    ),
    # The distinct outputs of the convolutions that have SW in ResNet-50 at 224 px: the stem,
    # res2.1.conv2, res3.{0,2}.conv2 and res4.{0,2,4}.conv2; the batch is a parameter.
    "imagenet": ((64, 112, 112), (64, 56, 56), (128, 28, 28), (256, 14, 14)),
    # The same for two images of 800 x 1216.
    "detection": ((2, 64, 400, 608), (2, 64, 200, 304), (2, 128, 100, 152), (2, 256, 50, 76)),
}
MODELS = ("resnet50", "mask_rcnn", "semantic")
MASK_RCNN_CONFIG = "mask_rcnn_R50_FPN_SW_2x.yaml"
SEMANTIC_CONFIG = "cityscapes_semantic_R50_SW_7layers_newton.yaml"


# A measurement repeats a run until it lasts about this long, well above a clock's noise.
_SHORTEST_MS = 2.0
_MOST_REPEATS = 1000

Shape = tuple[int, int, int, int]
Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Duration over the rounds, and its ratio to the baseline's of the same round.

    Attributes:
        ms: the median, in milliseconds.
        ratio, ratio_low, ratio_high: the median and the quartiles of the ratios.
    """

    ms: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.ratio_low:.2f} to {self.ratio_high:.2f})"


@dataclass(frozen=True)
class Result:
    """What was measured of one contender in one case.

    Attributes:
        case: the shape of the input, preceded by the model's name if there is one.
        memory_format: "contiguous" or "channels_last".
        contender: a name such as "BN" or "SW{bw,iw} newton".
        timings: by what was timed, such as "forward".
        memory: by quantity; the name tells the unit.
    """

    case: str
    memory_format: str
    contender: str
    timings: dict[str, Timing]
    memory: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Growth:
    """How the number of operations grows with one size while the others stay.

    Attributes:
        variable: the size that grows, "N", "C", "G" or "HW".
        regime: what dominates, "HW >> G" or "HW << G".
        sizes: the values of the variable.
        operations: multiply-adds of a forward pass at each of them.
        expected: the exponent of the variable in N C G max(HW, G).
    """

    variable: str
    regime: str
    sizes: tuple[int, ...]
    operations: tuple[float, ...]
    expected: int

    @property
    def exponent(self) -> float:
        """The slope of the operations over the sizes, both logarithmic."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.operations), 1)[0])

    @property
    def agrees(self) -> bool:
        # The term that does not dominate bends the line a little.
        return abs(self.exponent - self.expected) < 0.15


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


def time_rounds(
    runs: dict, device: torch.device, rounds: int, warmup: int, title: str
) -> dict[object, list[float]]:
    """Time every run once in each round, with a progress bar.

    Args:
        runs: functions without arguments, by any key.
        rounds, warmup: rounds that count, and rounds before them that do not; at least 1 each.
        title: of the progress bar.

    Returns:
        By the keys of `runs`, the duration of one call in each round, in milliseconds.
    """
    times = {key: [] for key in runs}
    repeats = dict.fromkeys(runs, 1)
    for index in tqdm(range(-warmup, rounds), desc=title, unit="round", leave=False, disable=None):
        # There and back, so that no contender always comes after the same other one.
        for key in list(runs)[:: 1 if index % 2 else -1]:
            elapsed = _milliseconds(runs[key], repeats[key], device)
            if index >= 0:
                times[key].append(elapsed)
            else:  # the last warm-up round decides, when everything is compiled and cached
                repeats[key] = min(_MOST_REPEATS, max(1, math.ceil(_SHORTEST_MS / elapsed)))
    return times


def _milliseconds(run: Run, repeats: int, device: torch.device) -> float:
    """The duration of one call, averaged over a few in a row.

    On a GPU that is what the GPU sees: a run that keeps it waiting for the host pays for that.
    """
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        begin.record(stream)
        for _ in range(repeats):
            run()
        end.record(stream)
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return 1e3 * (time.perf_counter() - begin) / repeats


def summarize(times: Sequence[float], baseline: Sequence[float]) -> Timing:
    """Median and quartiles of durations (ms) and of their ratios to the baseline's, by round."""
    low, ratio, high = np.quantile(np.divide(times, baseline), (0.25, 0.5, 0.75))
    return Timing(float(np.median(times)), float(ratio), float(low), float(high))


def retained_bytes(forward: Callable[[], Tensor], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that a forward pass keeps for its backward pass.

    Counted are the distinct storages that autograd saves, apart from those of the tensors to
    exclude, such as parameters.
    """
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    for tensor in exclude:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del output  # until here it kept the storages, and so their addresses, apart
    return sum(storages.values())


def peak_bytes(run: Run, device: torch.device) -> int:
    """The most bytes that a run has allocated at a time, beyond what was there before.

    On a CPU, what PyTorch's own allocator hands out is counted, not the work space of a library.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if _is_memory(event)]
    changes.sort(key=lambda change: change[0])
    return max(0, int(np.cumsum([size for _, size in changes]).max(initial=0)))


def _is_memory(event: dict) -> bool:
    return event.get("name") == "[memory]"


# ---------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------


class ComposedSwitchWhiten2d(SwitchWhiten2d):
    """SW as one would write the paper's steps down, with the derivatives left to autograd."""

    def forward(self, x: Tensor) -> Tensor:
        options = Options(
            self.statistics,
            self.num_pergroup,
            self.momentum,
            self.eps,
            self.whitening,
            self.num_iterations,
            group=None,
        )
        parameters = (self.weight, self.bias, self.sw_mean_weight, self.sw_var_weight)
        y, mean, cov, _ = composed_switch_whiten(x, *parameters, None, options)
        with torch.no_grad():
            if cov is not None and not options.diagonal:
                self.running_mean[..., 0].lerp_(mean, self.momentum)
                self.running_cov.lerp_(cov, self.momentum)
        return y


class PlainPath(nn.Module):
    """A layer without its Triton kernels, forward and backward; see `set_backend`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def benchmark_layers(
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    memory_formats: Sequence[str] = ("contiguous",),
    statistics: Sequence[Sequence[str]] = (("bw", "iw"), STATISTICS),
    whitenings: Sequence[str] = WHITENING_METHODS,
    num_pergroup: int = 16,
    rounds: int = 25,
    warmup: int = 3,
) -> list[Result]:
    """Time and memory of SW and of other normalization layers, in training.

    Args:
        shapes: (N, C, H, W) of the inputs.
        dtype: of the inputs; the layers' parameters are float32.
        memory_formats: names out of `MEMORY_FORMATS`.
        statistics: the sets of SW.
        whitenings: the methods of SW.
        num_pergroup: G of SW.

    Returns:
        Durations of "forward" and of "forward+backward", and the memory retained in between and
        the peak of both, relative to the bytes of the input.

    Raises:
        UserError: the arguments do not fit each other.
    """
    _check_rounds(rounds, warmup)
    for shape in shapes:  # a mistake shows before anything is timed
        _layers(torch.empty(shape, device="meta"), statistics, whitenings, num_pergroup)
    results = []
    for shape in shapes:
        for memory_format in memory_formats:
            torch.manual_seed(0)
            x = torch.randn(shape, device=device).to(dtype)
            x = x.contiguous(memory_format=MEMORY_FORMATS[memory_format]).requires_grad_()
            layers = _layers(x, statistics, whitenings, num_pergroup)
            results += _compare_layers(layers, x, memory_format, rounds, warmup)
    return results


def _layers(
    x: Tensor, statistics: Sequence[Sequence[str]], whitenings: Sequence[str], num_pergroup: int
) -> dict[str, nn.Module]:
    """The contenders for an input x (N, C, H, W)."""
    channels = x.shape[1]
    layers: dict[str, nn.Module] = {
        BASELINE: nn.BatchNorm2d(channels),
        "SyncBN": nn.SyncBatchNorm(channels),
        "IN": nn.InstanceNorm2d(channels, affine=True),
    }
    if channels % 32 == 0:
        layers["GN"] = nn.GroupNorm(32, channels)
        if x.is_cuda:
            layers["GN"].to(x.dtype)  # its kernel there wants parameters of the input's dtype
    try:
        layers["composed"] = ComposedSwitchWhiten2d(channels, num_pergroup, statistics[0])
        for names in statistics:
            label = "SW{all}" if set(names) == set(STATISTICS) else f"SW{{{','.join(names)}}}"
            if not {"bw", "iw"} & set(names):  # nothing is whitened
                layers[label] = SwitchWhiten2d(channels, num_pergroup, names)
                continue
            for whitening in whitenings:
                layer = SwitchWhiten2d(channels, num_pergroup, names, whitening)
                layers[f"{label} {whitening}"] = layer
                if x.is_cuda and kernels.cannot_run_on(x.device) is None:
                    twin = SwitchWhiten2d(channels, num_pergroup, names, whitening)
                    layers[f"{label} {whitening} plain"] = PlainPath(twin)
    except ValueError as error:
        raise UserError(f"SW does not fit shape {format_shape(x.shape)}: {error}") from None
    return {name: layer.to(x.device) for name, layer in layers.items()}


def _compare_layers(
    layers: dict[str, nn.Module], x: Tensor, memory_format: str, rounds: int, warmup: int
) -> list[Result]:
    dy = torch.randn_like(x)
    runs = {}
    for name, layer in layers.items():
        runs[name, "forward"] = _LayerRun(layer, x)
        runs[name, "forward+backward"] = _LayerRun(layer, x, dy)
    case = format_shape(x.shape)
    times = time_rounds(runs, x.device, rounds, warmup, title=f"{case} {memory_format}")
    results = []
    for name, layer in layers.items():
        timings = {
            what: summarize(times[name, what], times[BASELINE, what])
            for what in ("forward", "forward+backward")
        }
        run, both = runs[name, "forward"], runs[name, "forward+backward"]
        both.clear_gradients()
        memory = {
            "retained_per_input": retained_bytes(run, (*layer.parameters(), *layer.buffers())),
            "peak_per_input": peak_bytes(both, x.device),
        }
        memory = {key: size / (x.numel() * x.element_size()) for key, size in memory.items()}
        both.clear_gradients()
        results.append(Result(case, memory_format, name, timings, memory))
    return results


class _LayerRun:
    """A forward pass of a layer, and the backward pass if there is a gradient dy to start it."""

    def __init__(self, layer: nn.Module, x: Tensor, dy: Tensor | None = None):
        self.layer, self.x, self.dy = layer, x, dy

    def __call__(self) -> Tensor:
        if self.dy is not None:
            self.clear_gradients()
        with plain_path(isinstance(self.layer, PlainPath)):
            y = self.layer(self.x)
            if self.dy is not None:
                y.backward(self.dy)
        return y

    def clear_gradients(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)


@contextmanager
def plain_path(plain: bool) -> Iterator[None]:
    """Keep SW from its Triton kernels, if `plain`."""
    before = get_backend()
    set_backend("torch" if plain else before)
    try:
        yield
    finally:
        set_backend(before)


# ---------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------


def benchmark_models(
    models: Sequence[str],
    device: torch.device,
    batch: int | None = None,
    size: tuple[int, int] | None = None,
    memory_formats: Sequence[str] = ("contiguous",),
    amp: bool = False,
    rounds: int = 25,
    warmup: int = 3,
) -> list[Result]:
    """Training steps with BN everywhere, and with SW at the seven layers of the paper's ResNet-50;
    for segmentation at its fourteen too.

    A step is a forward pass, a backward pass and an update by SGD, on random images. In one
    process, as here, SyncBN is BN.

    Args:
        models: names out of `MODELS`.
        batch: images; by default 8 for ResNet-50, 1 for Mask R-CNN and 2 for segmentation, on a
            GPU 64, 2 and 2.
        size: height and width in pixels; by default 224 x 224, 320 x 320 and 233 x 233, on a GPU
            800 x 1216 for Mask R-CNN and 713 x 713, Cityscapes' crops, for segmentation.
        memory_formats: names out of `MEMORY_FORMATS`.
        amp: autocast to bfloat16.

    Returns:
        Durations of a "training step", and the peak of its memory beyond parameters and momentum,
        in gigabytes (10^9).
    """
    _check_rounds(rounds, warmup)
    on_gpu = device.type == "cuda"
    defaults = {
        "resnet50": (64 if on_gpu else 8, (224, 224)),
        "mask_rcnn": (2, (800, 1216)) if on_gpu else (1, (320, 320)),
        "semantic": (2, (713, 713) if on_gpu else (233, 233)),
    }
    makers = {"resnet50": _resnet50_step, "mask_rcnn": _mask_rcnn_step, "semantic": _semantic_step}
    results = []
    for model in models:
        shape = (batch or defaults[model][0], 3, *(size or defaults[model][1]))
        for memory_format in memory_formats:
            arguments = (shape, device, MEMORY_FORMATS[memory_format], amp)
            placements = {BASELINE: "none", "7 x SW": "imagenet"}
            if model == "semantic":
                placements["14 x SW"] = "segmentation"
            steps = {name: makers[model](p, *arguments) for name, p in placements.items()}
            case = f"{model} {format_shape(shape)}"
            times = time_rounds(steps, device, rounds, warmup, title=f"{case} {memory_format}")
            for name, step in steps.items():
                timings = {"training step": summarize(times[name], times[BASELINE])}
                memory = {"peak_gb": peak_bytes(step, device) / 1e9}
                results.append(Result(case, memory_format, name, timings, memory))
    return results


def _resnet50_step(
    placement: str,
    shape: Shape,
    device: torch.device,
    memory_format: torch.memory_format,
    amp: bool,
) -> Run:
    torch.manual_seed(0)
    stages = ResNet.make_default_stages(50, norm="BN", stride_in_1x1=False)
    model = ResNet(BasicStem(norm="BN"), stages, num_classes=1000)
    replace_norms(model, placement)
    model.to(device, memory_format=memory_format).train()
    images = torch.randn(shape, device=device).contiguous(memory_format=memory_format)
    labels = torch.randint(1000, (shape[0],), device=device)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(images)["linear"], labels)

    return _training_step(model, loss, device, amp)


def _mask_rcnn_step(
    placement: str,
    shape: Shape,
    device: torch.device,
    memory_format: torch.memory_format,
    amp: bool,
) -> Run:
    torch.manual_seed(0)
    cfg = load_config(
        MASK_RCNN_CONFIG, ["MODEL.SW.PLACEMENT", placement, "MODEL.DEVICE", str(device)]
    )
    model = build_model(cfg).to(memory_format=memory_format).train()
    inputs = [
        {
            "image": torch.randint(256, shape[1:], dtype=torch.uint8),
            "instances": _random_instances(shape[2:], cfg.MODEL.ROI_HEADS.NUM_CLASSES),
        }
        for _ in range(shape[0])
    ]

    def loss() -> Tensor:
        with EventStorage():  # Detectron2's models log into it
            return sum(model(inputs).values())

    return _training_step(model, loss, device, amp)


def _semantic_step(
    placement: str,
    shape: Shape,
    device: torch.device,
    memory_format: torch.memory_format,
    amp: bool,
) -> Run:
    if any(side % 8 != 1 for side in shape[2:]):
        raise UserError("for segmentation, the size must be a multiple of 8, plus 1")
    torch.manual_seed(0)
    cfg = load_config(
        SEMANTIC_CONFIG, ["MODEL.SW.PLACEMENT", placement, "MODEL.DEVICE", str(device)]
    )
    model = build_model(cfg).to(memory_format=memory_format).train()
    inputs = [
        {
            "image": torch.randint(256, shape[1:], dtype=torch.uint8),
            "sem_seg": torch.randint(cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES, shape[2:]),
        }
        for _ in range(shape[0])
    ]
    return _training_step(model, lambda: sum(model(inputs).values()), device, amp)


def _random_instances(size: tuple[int, int], num_classes: int, count: int = 8) -> Instances:
    """Diamonds of a tenth to two thirds of the image's height and width."""
    height, width = size
    extent = torch.tensor([width, height])
    side = (0.1 + 0.55 * torch.rand(count, 2)) * extent
    low = torch.rand(count, 2) * (extent - side)
    boxes = torch.cat([low, low + side], dim=1)
    polygons = [
        [np.array([(x0 + x1) / 2, y0, x1, (y0 + y1) / 2, (x0 + x1) / 2, y1, x0, (y0 + y1) / 2])]
        for x0, y0, x1, y1 in boxes.tolist()
    ]
    return Instances(
        size,
        gt_boxes=Boxes(boxes),
        gt_classes=torch.randint(num_classes, (count,)),
        gt_masks=PolygonMasks(polygons),
    )


def _training_step(
    model: nn.Module, loss: Callable[[], Tensor], device: torch.device, amp: bool
) -> Run:
    # So slow that the network stays about as it is: its predictions decide how much there is to
    # do for the heads of a detector.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------


def measure_growth() -> list[Growth]:
    """Count operations of the layer {bw, iw} while one size at a time grows.

    The paper's Table 1 has O(N C G max(HW, G)); each size is tried where HW dominates, and G also
    where G does.
    """
    sizes = {"N": (1, 2, 4, 8), "C": (64, 128, 256, 512), "G": (8, 16, 32, 64)}
    base = {"N": 1, "C": 64, "G": 16, "HW": 128**2}
    growths = [_grow(variable, "HW >> G", sizes[variable], base, 1) for variable in sizes]
    growths.append(_grow("HW", "HW >> G", (32**2, 64**2, 128**2), base, 1))
    growths.append(_grow("G", "HW << G", (16, 32, 64), base | {"HW": 2**2}, 2))
    return growths


def _grow(
    variable: str, regime: str, sizes: tuple[int, ...], base: dict[str, int], expected: int
) -> Growth:
    operations = tuple(count_operations(**(base | {variable: size})) for size in sizes)
    return Growth(variable, regime, sizes, operations, expected)


def count_operations(N: int, C: int, G: int, HW: int) -> float:
    """Multiply-adds of the matrix products in a forward pass of the layer {bw, iw}, by Newton.

    fvcore traces the layer, which then runs as plain operations. Work on single values, O(N C HW),
    is not counted; the trace has no eigendecomposition either, only Newton's products.

    Args:
        HW: a square number.
    """
    side = math.isqrt(HW)
    layer = SwitchWhiten2d(C, num_pergroup=G)
    counter = FlopCountAnalysis(layer, torch.randn(N, C, side, side))
    counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    counter.tracer_warnings("none").set_op_handle("aten::baddbmm", _baddbmm_operations)
    return counter.total()


def _baddbmm_operations(inputs: Sequence, _outputs: Sequence) -> int:
    """(B, I, J) plus the product of (B, I, K) and (B, K, J)."""
    _, left, right = (value.type().sizes() for value in inputs[:3])
    return math.prod(left) * right[-1]


# ---------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------


def parse_shapes(text: str, batch: int) -> list[Shape]:
    """A set's name, or shapes such as "2x64x50x76,8x64x56x56".

    Args:
        batch: N of the sets that leave it open.

    Raises:
        UserError: it is neither.
    """
    if text in SHAPE_SETS:
        return [shape if len(shape) == 4 else (batch, *shape) for shape in SHAPE_SETS[text]]
    shapes = []
    for part in text.split(","):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", part):
            names = ", ".join(SHAPE_SETS)
            raise UserError(f"shape {part!r} is neither one of {names} nor like 8x64x56x56")
        shapes.append(tuple(map(int, part.split("x"))))
        if shapes[-1][2:] == (1, 1):
            raise UserError(f"shape {part!r} has one pixel, which InstanceNorm cannot take")
    return shapes


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from "800x1216", or from "224" for a square.

    Raises:
        UserError: it is not like that, or too small for the networks.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", text):
        raise UserError(f"size {text!r} is neither like 224 nor like 800x1216")
    height, *width = map(int, text.split("x"))
    size = height, *(width or [height])
    if min(size) < 64:
        raise UserError(f"size {text!r}: the networks want at least 64 pixels a side")
    return size


def parse_statistics(text: str) -> tuple[str, ...]:
    """A set such as "bw,iw".

    Raises:
        UserError: some name is unknown or repeated.
    """
    names = tuple(text.split(","))
    if not set(names) <= set(STATISTICS) or len(set(names)) < len(names):
        raise UserError(f"statistics {text!r}: give distinct names out of {','.join(STATISTICS)}")
    return names


def find_device(name: str | None) -> torch.device:
    """The device of that name; by default a GPU if there is one.

    Raises:
        UserError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is none; use cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there: {torch.cuda.device_count()} GPUs found")
    return device


def format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _check_rounds(rounds: int, warmup: int) -> None:
    if rounds < 1 or warmup < 1:
        raise UserError(f"need at least one round and one to warm up, got {rounds} and {warmup}")


# ---------------------------------------------------------------------------------------------
# Reports
# ---------------------------------------------------------------------------------------------


def results_table(results: Sequence[Result]) -> str:
    """The results as text, a row for each contender in each case."""
    rows = []
    for result in results:
        row = {"input": result.case, "format": result.memory_format, "norm": result.contender}
        for what, timing in result.timings.items():
            row[f"{what}\nms"] = timing.ms
            row[f"{what}\nvs {BASELINE} (quartiles)"] = str(timing)
        row |= {key.replace("_per_", "\n/ "): value for key, value in result.memory.items()}
        rows.append(row)
    return tabulate(rows, headers="keys", floatfmt=".2f")


def growth_table(growths: Sequence[Growth]) -> str:
    """The counts as text, a row for each size that grows."""
    rows = [
        {
            "grows": growth.variable,
            "where": growth.regime,
            "from ... to": " ".join(map(str, growth.sizes)),
            "million multiply-adds": " ".join(f"{count / 1e6:.4g}" for count in growth.operations),
            "exponent": growth.exponent,
            "N C G max(HW, G)": growth.expected,
            "agrees": "yes" if growth.agrees else "NO",
        }
        for growth in growths
    ]
    return tabulate(rows, headers="keys", floatfmt=".2f")


def describe_machine(device: torch.device) -> dict[str, object]:
    """What the numbers depend on, apart from the arguments."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "device": str(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "triton_kernels": device.type == "cuda" and kernels.cannot_run_on(device) is None,
        "command": sys.argv,
    }


def _cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def write_results(
    folder: Path,
    name: str,
    results: Sequence[Result] | Sequence[Growth],
    settings: dict[str, object],
    machine: dict[str, object],
) -> None:
    """Write `results.json` and the chart `<name>.png` into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(result) for result in results]
    if name == "flops":
        records = [asdict(g) | {"exponent": g.exponent, "agrees": g.agrees} for g in results]
    content = {"benchmark": name, "machine": machine, "settings": settings, "results": records}
    text = json.dumps(content, indent=2) + "\n"
    with written_whole(folder / "results.json") as path:
        path.write_text(text)
    figure = growth_figure(results) if name == "flops" else ratio_figure(results)
    with written_whole(folder / f"{name}.png") as path:
        figure.savefig(path, dpi=110)


# The colours of Okabe and Ito, which stay apart for colour-blind readers.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")


def ratio_figure(results: Sequence[Result]) -> Figure:
    """Bars of the durations relative to the baseline's, with quartiles as whiskers.

    A panel for each memory format and each thing that was timed.
    """
    formats = list(dict.fromkeys(result.memory_format for result in results))
    panels = [(memory_format, what) for memory_format in formats for what in results[0].timings]
    cases = list(dict.fromkeys(result.case for result in results))
    names = list(dict.fromkeys(r.contender for r in results if r.contender != BASELINE))
    bars = len(cases) * (len(names) + 1)
    figure = Figure(figsize=(max(7.0, 2 + 0.24 * bars), 0.8 + 3.4 * len(panels)))
    figure.set_layout_engine("constrained")
    styles = _bar_styles(names)
    for axes, (memory_format, what) in zip(
        figure.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0], panels
    ):
        timings = {
            (r.case, r.contender): r.timings[what]
            for r in results
            if r.memory_format == memory_format
        }
        _plot_bars(axes, timings, cases, styles)
        axes.set_title(f"{what}, {memory_format}", fontsize=11)
        axes.set_ylabel(f"time / time of {BASELINE}")
    _scale_ratios(axes, [t for r in results if r.contender != BASELINE for t in r.timings.values()])
    handles = [Patch(label=name, **style) for name, style in styles.items()]
    columns = min(len(names), max(1, int(figure.get_figwidth() / 1.9)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def _bar_styles(names: Sequence[str]) -> dict[str, dict]:
    """A colour for each layer or set of statistics; hatched: eigh; pale: without Triton."""
    families = list(dict.fromkeys(name.split()[0] for name in names))
    return {
        name: {
            "facecolor": _PALETTE[families.index(name.split()[0]) % len(_PALETTE)],
            "alpha": 0.5 if "plain" in name else 1.0,
            "hatch": "///" if "eigh" in name else None,
            "edgecolor": "white",
        }
        for name in names
    }


def _plot_bars(
    axes: Axes,
    timings: dict[tuple[str, str], Timing],
    cases: Sequence[str],
    styles: dict[str, dict],
) -> None:
    """Groups of bars that begin at 1, as a ratio of the baseline to itself is."""
    width = 0.86 / len(styles)
    for i, case in enumerate(cases):
        for j, (name, style) in enumerate(styles.items()):
            timing = timings.get((case, name))
            if timing is None:  # a layer that does not fit this shape
                continue
            place = i + (j - (len(styles) - 1) / 2) * width
            axes.bar(place, timing.ratio - 1, min(width, 0.3), bottom=1, **style)
            axes.vlines(place, timing.ratio_low, timing.ratio_high, color="black", linewidth=1)
            axes.annotate(
                f"{timing.ratio:.2f}",
                (place, max(1, timing.ratio_high)),
                xytext=(0, 3),
                textcoords="offset points",
                rotation=90 if len(styles) > 2 else 0,
                ha="center",
                va="bottom",
                fontsize=8,
            )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_xlim(-0.5, len(cases) - 0.5)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scale_ratios(axes: Axes, timings: Sequence[Timing]) -> None:
    """A logarithmic axis, which panels share, with room for the numbers above the bars."""
    low = min(0.9, *(timing.ratio_low for timing in timings))
    high = max(1.2, *(timing.ratio_high for timing in timings))
    axes.set_yscale("log")
    axes.set_ylim(low / 1.05, high * (high / low) ** 0.25)
    few = high / low < 4
    powers = [m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5)]
    axes.yaxis.set_major_locator(
        MaxNLocator(8, steps=(1, 2, 5, 10)) if few else FixedLocator(powers)
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def growth_figure(growths: Sequence[Growth]) -> Figure:
    """Bars of operations over each size that grows, beside the line that the paper's O(…) is."""
    figure = Figure(figsize=(3.0 * len(growths), 3.4), layout="constrained")
    for axes, growth in zip(figure.subplots(1, len(growths), squeeze=False)[0], growths):
        places = range(len(growth.sizes))
        counts = np.divide(growth.operations, growth.operations[0])
        paper = np.divide(growth.sizes, growth.sizes[0]) ** growth.expected
        axes.bar(places, counts, 0.6, color=_PALETTE[0], label="counted")
        axes.plot(places, paper, "o--", color=_PALETTE[1], label="N C G max(HW, G)")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(bottom=0.5)
        axes.set_xticks(places, growth.sizes)
        axes.set_xlabel(growth.variable)
        axes.set_title(f"{growth.regime}: exponent {growth.exponent:.2f}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("operations, relative to the first")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure
