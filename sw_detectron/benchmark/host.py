"""What a layer costs the host: time, operators and launches where next to nothing is computed."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..layers import triton
from .arguments import format_shape
from .backends import WHITENING_METHODS
from .layers import DEFAULT_SETS, backend_of, forward_backward, make_layers
from .results import BASELINE, Result
from .timing import Run, summarize, time_rounds

_KERNELS = ", kernels"  # ends the names of contenders whose kernels are not started


def benchmark_host(
    device: torch.device,
    statistics: Sequence[Sequence[str]] = DEFAULT_SETS,
    whitenings: Sequence[str] = WHITENING_METHODS,
    num_pergroup: int = 16,
    rounds: int = 25,
    warmup: int = 3,
) -> list[Result]:
    """The host's time for "forward+backward" of the layers, and the operators that they run.

    On a GPU that is the time until all is launched, not until it is computed. On a CPU there are
    also SW's Triton kernels, all but their start: what a GPU would wait for.

    Args:
        statistics, whitenings, num_pergroup: see `layers.benchmark_layers`.
    """
    # InstanceNorm takes no fewer pixels.
    x = torch.randn(2, 4 * num_pergroup, 1, 2, device=device, requires_grad=True)
    dy = torch.ones_like(x)
    layers = make_layers(x, statistics, whitenings, num_pergroup)
    on_cpu = device.type == "cpu"
    if on_cpu and triton.HAS_TRITON:
        newton = {name: layer for name, layer in layers.items() if name.endswith(" newton")}
        layers |= {name + _KERNELS: copy.deepcopy(layer) for name, layer in newton.items()}
    runs = {
        name: partial(forward_backward, layer, _backend_of(name), x, dy)
        for name, layer in layers.items()
    }
    # The CPU's clock, which does not wait for a GPU.
    with triton.replaced_launches(_do_nothing) if on_cpu else nullcontext():
        times = time_rounds(runs, torch.device("cpu"), rounds, warmup, title="host")
    return [
        Result(
            format_shape(x.shape),
            "contiguous",
            name,
            {"forward+backward": summarize(times[name], times[BASELINE])},
            operators=count_operators(run, without_kernels=on_cpu),
            launches=count_launches(run) if name.endswith(_KERNELS) else None,
        )
        for name, run in runs.items()
    ]


def _backend_of(contender: str) -> str:
    return "triton" if contender.endswith(_KERNELS) else backend_of(contender)


def count_launches(run: Run) -> int:
    """The Triton kernels that a run would start; none is."""
    names = []
    with triton.replaced_launches(lambda launch, _: names.append(launch)):
        run()
    return len(names)


def _do_nothing(launch: object, pointers: tuple) -> None:
    pass


def count_operators(run: Run, without_kernels: bool = False) -> int:
    """The operators of PyTorch that a run calls, apart from views and bare allocations.

    Each starts a kernel on a GPU, or a few. Kernels that Triton starts are not among them.
    """
    kernels = triton.replaced_launches(_do_nothing) if without_kernels else nullcontext()
    with kernels, _Counter() as counter:
        run()
    return counter.count


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not (function.is_view or "empty" in function.__name__)
        return function(*args, **(kwargs or {}))
