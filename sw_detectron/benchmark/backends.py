"""The ways to compute SW that are compared: all that the benchmark knows of the layers' insides."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..layers import SwitchWhiten2d, set_backend, triton
from ..layers.backend import get_backend
from ..layers.composed import composed_switch_whiten
from ..layers.functional import WHITENING_METHODS as WHITENING_METHODS
from ..layers.options import Options


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute SW by the backend of this name: "auto", or "torch" for no Triton kernel."""
    before = get_backend()
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def has_kernels(device: torch.device) -> bool:
    """Whether the backend "auto" computes by Triton kernels on this device."""
    return device.type == "cuda" and triton.cannot_run_on(device) is None


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
