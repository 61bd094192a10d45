"""Which backend computes: the Triton kernels of `triton`, or PyTorch's operations in `plain`.

Both have the functions `forward` and `backward`. The choice is made once for a call, in its forward
pass, and holds for its backward pass too, since what a backend keeps is its own.
"""

import os
from types import ModuleType

from torch import Tensor

from . import plain, triton
from .options import Options, Parameters, Running

BACKENDS = ("auto", "triton", "torch")


def set_backend(name: str) -> None:
    """Choose what computes the layers of this process from now on.

    Args:
        name: "auto": the Triton kernels on GPUs where they can be relied on; "triton": wherever
            there are any, and an error where the device cannot run them; "torch": plain PyTorch.

    The environment variable SW_DETECTRON_BACKEND, read when this module is imported, sets the
    choice that a process starts with. The kernels take whitening sets with Newton's iteration and
    groups of 8 to 64 channels, up to float32; all else is PyTorch's whatever is chosen.

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
    x: Tensor, parameters: Parameters, running: Running, options: Options
) -> ModuleType:
    """`triton` or `plain`.

    Raises:
        RuntimeError: the backend "triton" was chosen, and does not run on the device of x.
    """
    if _chosen != "triton" or not triton.has_kernels(x, parameters, running, options):
        return plain
    reason = triton.cannot_run_on(x.device)
    if reason is not None:
        raise RuntimeError(f"the backend is set to 'triton', but {reason}")
    return triton


_chosen = "auto"
set_backend(os.environ.get("SW_DETECTRON_BACKEND") or "auto")
