"""Time and memory of SW and of other normalization layers, in training."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..layers import STATISTICS, SwitchWhiten2d
from .arguments import MEMORY_FORMATS, Shape, format_shape
from .backends import WHITENING_METHODS, ComposedSwitchWhiten2d, backend, has_kernels
from .results import BASELINE, Result
from .timing import peak_bytes, retained_bytes, summarize, time_rounds

DEFAULT_SETS = (("bw", "iw"), STATISTICS)

_PLAIN = " plain"  # ends the names of contenders that do without their Triton kernels


def benchmark_layers(
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    memory_formats: Sequence[str] = ("contiguous",),
    statistics: Sequence[Sequence[str]] = DEFAULT_SETS,
    whitenings: Sequence[str] = WHITENING_METHODS,
    num_pergroup: int = 16,
    rounds: int = 25,
    warmup: int = 3,
    others: bool = True,
) -> list[Result]:
    """Time and memory of SW and of other normalization layers, in training.

    Args:
        shapes: (N, C, H, W) of the inputs.
        dtype: of the inputs; the layers' parameters are float32.
        memory_formats: names out of `MEMORY_FORMATS`.
        statistics: the sets of SW.
        whitenings: the methods of SW.
        num_pergroup: G of SW.
        others: whether to measure more than SW and the baseline.

    Returns:
        Durations of "forward" and of "forward+backward", and the memory retained in between and
        the peak of both, relative to the bytes of the input.

    Raises:
        UserError: the arguments do not fit each other.
    """
    for shape in shapes:  # a mistake shows before anything is timed
        make_layers(torch.empty(shape, device="meta"), statistics, whitenings, num_pergroup)
    results = []
    for shape in shapes:
        for memory_format in memory_formats:
            torch.manual_seed(0)
            x = torch.randn(shape, device=device).to(dtype)
            x = x.contiguous(memory_format=MEMORY_FORMATS[memory_format]).requires_grad_()
            layers = make_layers(x, statistics, whitenings, num_pergroup, others)
            results += _compare(layers, x, memory_format, rounds, warmup)
    return results


def make_layers(
    x: Tensor,
    statistics: Sequence[Sequence[str]],
    whitenings: Sequence[str],
    num_pergroup: int,
    others: bool = True,
) -> dict[str, nn.Module]:
    """The contenders for an input x (N, C, H, W), in training mode.

    Raises:
        UserError: SW does not fit x.
    """
    channels = x.shape[1]
    layers: dict[str, nn.Module] = {BASELINE: nn.BatchNorm2d(channels)}
    if others:
        layers["SyncBN"] = nn.SyncBatchNorm(channels)
        layers["IN"] = nn.InstanceNorm2d(channels, affine=True)
    if others and channels % 32 == 0:
        layers["GN"] = nn.GroupNorm(32, channels)
        if x.is_cuda:
            layers["GN"].to(x.dtype)  # its kernel there wants parameters of the input's dtype
    try:
        if others:
            layers["composed"] = ComposedSwitchWhiten2d(channels, num_pergroup, statistics[0])
        for names in statistics:
            label = "SW{all}" if set(names) == set(STATISTICS) else f"SW{{{','.join(names)}}}"
            layer = SwitchWhiten2d(channels, num_pergroup, names)
            if not layer.whitens:
                layers[label] = layer
                continue
            for whitening in whitenings:
                make = partial(SwitchWhiten2d, channels, num_pergroup, names, whitening)
                layers[f"{label} {whitening}"] = make()
                if whitening == "newton" and has_kernels(x.device):
                    layers[f"{label} {whitening}{_PLAIN}"] = make()
    except ValueError as error:
        raise UserError(f"SW does not fit shape {format_shape(x.shape)}: {error}") from None
    return {name: layer.to(x.device) for name, layer in layers.items()}


def _compare(
    layers: dict[str, nn.Module], x: Tensor, memory_format: str, rounds: int, warmup: int
) -> list[Result]:
    dy = torch.randn_like(x)
    runs = {}
    for name, layer in layers.items():
        how = backend_of(name)
        runs[name, "forward"] = partial(_forward, layer, how, x)
        runs[name, "forward+backward"] = partial(forward_backward, layer, how, x, dy)
    case = format_shape(x.shape)
    times = time_rounds(runs, x.device, rounds, warmup, title=f"{case} {memory_format}")
    results = []
    for name, layer in layers.items():
        timings = {
            what: summarize(times[name, what], times[BASELINE, what])
            for what in ("forward", "forward+backward")
        }
        own = (*layer.parameters(), *layer.buffers())
        _clear_gradients(layer, x)
        retained = retained_bytes(runs[name, "forward"], exclude=own)
        peak = peak_bytes(runs[name, "forward+backward"], x.device)
        _clear_gradients(layer, x)
        size = x.numel() * x.element_size()
        memory = {"retained_per_input": retained / size, "peak_per_input": peak / size}
        results.append(Result(case, memory_format, name, timings, memory))
    return results


def backend_of(contender: str) -> str:
    return "torch" if contender.endswith(_PLAIN) else "auto"


def _forward(layer: nn.Module, how: str, x: Tensor) -> Tensor:
    with backend(how):
        return layer(x)


def forward_backward(layer: nn.Module, how: str, x: Tensor, dy: Tensor) -> None:
    """Both passes by the backend of that name; the gradients of x and of the parameters are new."""
    _clear_gradients(layer, x)
    with backend(how):
        layer(x).backward(dy)


def _clear_gradients(layer: nn.Module, x: Tensor) -> None:
    x.grad = None
    layer.zero_grad(set_to_none=True)
