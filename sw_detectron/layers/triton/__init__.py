"""The layer as Triton kernels: three launches forward and four backward.

One operation a file, each kernel beside what describes its launch; `common`, `mixture` and
`running` hold the parts that several kernels share, `plan` puts the launches together. The package
`plain` computes the same.
"""

import torch
from torch import Tensor

from ..options import Options, Parameters, Running
from ..padding import Extent
from .common import HAS_TRITON, INTERPRETED, LARGEST_GROUP, SMALLEST_GROUP, cannot_run_on
from .launch import launches_are_replaced, replaced_launches, start_as_triton_does
from .plan import Plan

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "backward",
    "cannot_run_on",
    "forward",
    "has_kernels",
    "kept_size",
    "needs_no_check",
    "plan_of",
    "replaced_launches",
    "start_as_triton_does",
]

# Plans by signature; detectors see many shapes, but not this many that come back.
_MOST_PLANS = 4096
_plans: dict[tuple, Plan] = {}


def has_kernels(x: Tensor, parameters: Parameters, running: Running, options: Options) -> bool:
    """Whether there are kernels for a call, on a device that can run them."""
    return (
        options.whitening == "newton"
        and SMALLEST_GROUP <= options.num_pergroup <= LARGEST_GROUP
        and not options.diagonal
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(t is None or t.is_contiguous() for t in (*parameters, *running))
    )


def plan_of(
    x: Tensor, parameters: Parameters, running: Running, options: Options, padded: bool = False
) -> Plan:
    """The launches for calls like this one, made at the first."""
    # Compiled kernels hold for these dtypes and this alignment.
    dtypes = [None if p is None else p.dtype for p in (*parameters, *running)]
    signature = (
        options,
        padded,
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        x.data_ptr() % 16,
        *dtypes,
    )
    plan = _plans.get(signature)
    if plan is None:
        if len(_plans) == _MOST_PLANS:
            _plans.clear()
        plan = _plans[signature] = Plan(x, parameters, options, padded)
    return plan


def kept_size(x: Tensor, options: Options) -> int:
    """Values of the first tensor that `forward` keeps."""
    n, vector = x.shape[0], x.shape[1]
    matrix = vector * options.num_pergroup
    size = n * (vector + matrix) if options.of_sample else 0
    size += vector + matrix + 1 if options.of_this_batch else 0
    size += (n if options.of_sample else 1) * vector if n > 0 else 0
    return size + (2 * n if "ln" in options.statistics else 0)


def forward(
    x: Tensor,
    parameters: Parameters,
    running: Running,
    options: Options,
    extent: Extent | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Plan]:
    """y, the tensors that `backward` needs, and the plan that it follows.

    Args:
        x: (N, C, H, W), contiguous or channels_last. N is 0 only where other ranks have samples.
        running: updated where the statistics of the batch are taken.
        extent: the pixels that statistics are of; None for all.
    """
    device = x.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return forward(x, parameters, running, options, extent)
    plan = plan_of(x, parameters, running, options, extent is not None)
    sides = None if extent is None else extent.on(device)
    return *plan.forward(x, parameters, running, sides), plan


def backward(
    dy: Tensor,
    x: Tensor,
    parameters: Parameters,
    kept: list[Tensor],
    plan: Plan,
    options: Options,
    needs_dx: bool,
    extent: Extent | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, None if it needs none, and of the parameters.

    Args:
        dy: (N, C, H, W), of any strides.
        kept, plan: by `forward`.
        extent: as given to `forward`.
    """
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return backward(dy, x, parameters, kept, plan, options, needs_dx, extent)
    sides = None if extent is None else extent.on(x.device)
    dx, *grads = plan.backward(dy, x, parameters, kept, needs_dx, sides)
    # Nearly always float32 already, and a call that does nothing costs more than to look.
    return dx, *(
        g if g is None or g.dtype == p.dtype else g.to(p.dtype) for g, p in zip(grads, parameters)
    )


def needs_no_check() -> bool:
    """Whether no GPU is concerned: kernels are interpreted, or not even started."""
    return INTERPRETED or launches_are_replaced()
