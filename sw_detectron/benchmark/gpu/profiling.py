"""The kernels of a layer: how many are launched, how long they run, how fast they move memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ...errors import UserError
from ..arguments import MEMORY_FORMATS, Shape, format_shape
from ..layers import forward_backward, make_layers
from ..timing import Run, time_rounds

# Feature maps that a pass reads and writes. Each pass is one kernel, known by its name's beginning.
MAPS = {
    "_moments_kernel": 1,  # reads x
    "_whiten_kernel": 2,  # reads x, writes y
    "_cross_moments_kernel": 2,  # reads dy and x
    "_input_gradient_kernel": 3,  # reads dy and x, writes dx
}
ALL = "all kernels"
COPY = "copy"

_SHOWN = 12  # kernels of a layer, the longest ones


@dataclass(frozen=True)
class KernelTime:
    """A kernel in a forward and backward pass of a layer; or `ALL` of them; or a `COPY`.

    Attributes:
        case: shape, dtype and memory format of the input.
        launches: of the kernel in one call.
        us: microseconds that they take together.
        gb_per_s: of feature maps read and written; None of a kernel that passes over none.
        share: of the bandwidth of a copy on the same device.
    """

    case: str
    contender: str
    kernel: str
    launches: float
    us: float
    gb_per_s: float | None = None
    share: float | None = None

    def record(self) -> dict[str, object]:
        return asdict(self)

    def row(self) -> dict[str, object]:
        return {
            "input": self.case,
            "norm": self.contender,
            "kernel": self.kernel,
            "launches": f"{self.launches:g}",
            "µs": self.us,
            "GB/s": self.gb_per_s,
            "of a copy's": None if self.share is None else f"{self.share:.0%}",
        }


def copy_time(device: torch.device, size: int, rounds: int, warmup: int) -> KernelTime:
    """The copy of `size` bytes, which reads and writes them, as the median of the rounds."""
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    times = sorted(time_rounds({COPY: copy}, device, rounds, warmup, title=COPY)[COPY])
    ms = times[len(times) // 2]
    return KernelTime(
        f"{size / 1e6:.0f} MB", "torch", COPY, 1, 1e3 * ms, 2 * size / ms / 1e6, share=1.0
    )


def kernel_times(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: str,
    statistics: Sequence[Sequence[str]],
    how: str,
    copy: KernelTime,
    calls: int = 10,
    warmup: int = 3,
) -> list[KernelTime]:
    """The kernels of BN and of SW by Newton's iteration, forward and backward.

    On a CPU, PyTorch's operators stand for kernels.

    Args:
        statistics: the sets of SW.
        how: the backend of SW.
        copy: by `copy_time`.

    Raises:
        UserError: the profiler does not work here.
    """
    x = torch.randn(shape, device=device).to(dtype)
    x = x.contiguous(memory_format=MEMORY_FORMATS[memory_format]).requires_grad_()
    dy = torch.randn_like(x)
    case = f"{format_shape(shape)} {str(dtype).removeprefix('torch.')} {memory_format}"
    layers = make_layers(x, statistics, ["newton"], num_pergroup=16, others=False)
    size = x.numel() * x.element_size()
    rows = []
    for name, layer in layers.items():
        if name.endswith(" plain"):
            continue  # some 150 small operations
        kernels = profile_calls(partial(forward_backward, layer, how, x, dy), device, calls, warmup)
        if not kernels:
            raise UserError("PyTorch's profiler sees no kernel on this machine")
        rows += [
            _row(case, name, _short(kernel), *times, _maps(kernel), size, copy)
            for kernel, times in list(kernels.items())[:_SHOWN]
        ]
        # BN moves as much: x three times with y, and five times dy, x and dx.
        total = map(sum, zip(*kernels.values()))
        rows.append(_row(case, name, ALL, *total, sum(MAPS.values()), size, copy))
    return rows


def profile_calls(
    run: Run, device: torch.device, calls: int, warmup: int
) -> dict[str, tuple[float, float]]:
    """Launches of each kernel and its microseconds in one call, the longest first."""
    for _ in range(warmup):
        run()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(calls):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return sum_kernels(profiler.events(), device, calls)


def sum_kernels(
    events: Iterable, device: torch.device, calls: int
) -> dict[str, tuple[float, float]]:
    """Launches and microseconds of one call by the kernel's name, of the profiler's events."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    durations = defaultdict(list)
    for event in events:
        if event.device_type == kind:
            durations[event.name].append(event.time_range.elapsed_us())
    times = {name: (len(us) / calls, sum(us) / calls) for name, us in durations.items()}
    return dict(sorted(times.items(), key=lambda item: -item[1][1]))


def _short(kernel: str) -> str:
    """The beginning of a name, which of kernels made from C++ templates is a page long."""
    return kernel if len(kernel) <= 48 else f"{kernel[:47]}…"


def _maps(kernel: str) -> int | None:
    return next((maps for name, maps in MAPS.items() if kernel.startswith(name)), None)


def _row(
    case: str,
    contender: str,
    kernel: str,
    launches: float,
    us: float,
    maps: int | None,
    size: int,
    copy: KernelTime,
) -> KernelTime:
    """Of a kernel that moves so many feature maps of `size` bytes."""
    if not maps or not us:
        return KernelTime(case, contender, kernel, launches, us)
    rate = maps * size / us / 1e3
    return KernelTime(case, contender, kernel, launches, us, rate, rate / copy.gb_per_s)
