"""Which backend computes: the Triton kernels of `triton`, or PyTorch's operations in `plain`.

Both have the functions `forward` and `backward`. The choice is made once for a call, in its forward
pass, and holds for its backward pass too, since what a backend keeps is its own.
"""

import os
import warnings
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import plain, triton
from .check import disagreement
from .options import Options, Parameters, Running

BACKENDS = ("auto", "triton", "torch")


def set_backend(name: str) -> None:
    """Choose what computes the layers of this process from now on.

    Args:
        name: "auto": the Triton kernels on GPUs where they can be relied on; "triton": wherever
            there are any, and an error where the device cannot run them; "torch": plain PyTorch.

    The environment variable SW_DETECTRON_BACKEND, read when this module is imported, sets the
    choice that a process starts with. The kernels take whitening sets with Newton's iteration and
    groups of 8 to 64 channels, up to float32; all else is PyTorch's whatever is chosen. Before they
    are relied on for a kind of call they are compared with PyTorch on a small problem; if they
    fail, "auto" warns and goes on without them, and "triton" makes it an error.

    Raises:
        ValueError: there is no backend of this name.
    """
    if name not in BACKENDS:
        raise ValueError(f"the backend must be one of {BACKENDS}, got {name!r}")
    global _chosen
    _chosen = name


def get_backend() -> str:
    """The name that was last given to `set_backend`, "auto" at first."""
    return _chosen


def backend_of_call(
    x: Tensor, parameters: Parameters, running: Running, options: Options, padded: bool = False
) -> ModuleType:
    """`triton` or `plain`.

    Args:
        padded: whether the call has an extent.

    Raises:
        RuntimeError: the backend "triton" was chosen, and cannot be relied on.
    """
    if _chosen == "torch" or (_chosen == "auto" and not _is_for_kernels(x)):
        return plain
    if not triton.has_kernels(x, parameters, running, options):
        return plain
    reason = _objection(x, options, padded)
    if reason is None:
        return triton
    if _chosen == "triton":
        raise RuntimeError(f"the backend is set to 'triton', but {reason}")
    return plain


def _is_for_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _objection(x: Tensor, options: Options, padded: bool) -> str | None:
    """Why the kernels cannot be relied on for calls like this one; found out at the first one."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    call = (x.device, x.dtype, last, options.num_pergroup, options.statistics)
    call += (options.num_iterations, padded)
    if call not in _objections:
        reason = triton.cannot_run_on(x.device)
        if reason is not None:
            return reason
        if triton.needs_no_check():
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a graph is being captured before the layer was ever called"
        with _disable_current_modes():  # a compiler may be looking
            _objections[call] = _check(x, options, padded)
    return _objections[call]


def _check(x: Tensor, options: Options, padded: bool) -> str | None:
    reason = disagreement(x, options, padded)
    if reason is None:
        return None
    reason = (
        f"Switchable Whitening's kernels failed their check on {x.device} for {x.dtype}, "
        f"{options.num_pergroup} channels in a group, {options.statistics}: {reason}"
    )
    if _chosen == "auto":
        warnings.warn(f"{reason}. PyTorch's own operations are used, which are slower.")
    return reason


# By kind of call; None where nothing speaks against the kernels.
_objections: dict[tuple, str | None] = {}
_chosen = "auto"
set_backend(os.environ.get("SW_DETECTRON_BACKEND") or "auto")
