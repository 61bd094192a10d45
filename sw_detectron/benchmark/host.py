"""What a layer costs the host: time and operators where there is next to nothing to compute."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .arguments import format_shape
from .backends import WHITENING_METHODS
from .layers import DEFAULT_SETS, backend_of, forward_backward, make_layers
from .results import BASELINE, Result
from .timing import Run, summarize, time_rounds


def benchmark_host(
    device: torch.device,
    statistics: Sequence[Sequence[str]] = DEFAULT_SETS,
    whitenings: Sequence[str] = WHITENING_METHODS,
    num_pergroup: int = 16,
    rounds: int = 25,
    warmup: int = 3,
) -> list[Result]:
    """The host's time for "forward+backward" of the layers, and the operators that they run.

    On a GPU that is the time until all is launched, not until it is computed.

    Args:
        statistics, whitenings, num_pergroup: see `layers.benchmark_layers`.
    """
    # InstanceNorm takes no fewer pixels.
    x = torch.randn(2, 4 * num_pergroup, 1, 2, device=device, requires_grad=True)
    dy = torch.ones_like(x)
    runs = {
        name: partial(forward_backward, layer, backend_of(name), x, dy)
        for name, layer in make_layers(x, statistics, whitenings, num_pergroup).items()
    }
    # The CPU's clock, which does not wait for a GPU.
    times = time_rounds(runs, torch.device("cpu"), rounds, warmup, title="host")
    return [
        Result(
            format_shape(x.shape),
            "contiguous",
            name,
            {"forward+backward": summarize(times[name], times[BASELINE])},
            operators=count_operators(run),
        )
        for name, run in runs.items()
    ]


def count_operators(run: Run) -> int:
    """The operators of PyTorch that a run calls, apart from views and bare allocations.

    Each starts a kernel on a GPU, or a few. Kernels that Triton starts are not among them.
    """
    with _Counter() as counter:
        run()
    return counter.count


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not (function.is_view or "empty" in function.__name__)
        return function(*args, **(kwargs or {}))
