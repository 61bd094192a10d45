"""The ways to compute SW that are compared: all that the benchmark knows of the layers' insides."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..layers import SwitchWhiten2d, kernels
from ..layers.composed import composed_switch_whiten
from ..layers.functional import WHITENING_METHODS as WHITENING_METHODS
from ..layers.options import Options

_PLAIN = "SW_DETECTRON_PLAIN"  # the environment variable


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute SW by the backend of this name: "auto", or "torch" for no Triton kernel."""
    before = os.environ.get(_PLAIN)
    if name == "torch":
        os.environ[_PLAIN] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ[_PLAIN] = before
        elif name == "torch":
            del os.environ[_PLAIN]


def has_kernels(device: torch.device) -> bool:
    """Whether there are Triton kernels for this device."""
    return kernels.available(torch.empty(1, device=device))


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
        y, mean, cov = composed_switch_whiten(x, *parameters, None, options)
        with torch.no_grad():
            if cov is not None and not options.diagonal:
                self.running_mean[..., 0].lerp_(mean, self.momentum)
                self.running_cov.lerp_(cov, self.momentum)
        return y
