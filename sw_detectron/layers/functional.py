"""Switchable Whitening as one differentiable function.

Shape shorthand in this module:
    N: samples;  C: channels;  H, W: height, width
    g: channel groups;  G = num_pergroup: channels in a group;  C = g * G
    K: number of statistics in the set
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import small_kernels
from .composed import composed_switch_whiten
from .fused import FusedSwitchWhiten
from .options import Options
from .whitening import takes_small_kernels

WHITENING_METHODS = ("newton", "eigh")


def switch_whiten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor | None,
    running_mean: Tensor,
    running_cov: Tensor,
    *,
    statistics: Sequence[str],
    num_pergroup: int,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    whitening: str = "newton",
    num_iterations: int = 5,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Whiten each sample with a learned mixture of statistics (Eqs. 5 and 6).

        y = γ ⊙ Σ̂^(-1/2) (x - μ̂) + β,   μ̂ = Σ_k ω_k μ_k,   Σ̂ = Σ_k ω'_k Σ_k + ε I

    Statistics are computed in float32, or in float64 for a float64 input, whatever the autocast
    state. The result has the dtype and the memory format of `x`.

    Args:
        x: (N, C, H, W), any floating dtype; N may be 0.
        weight, bias: γ and β, (C,), or None.
        mean_weight: λ, (K,): ω = softmax(λ).
        var_weight: λ', (K,): ω' = softmax(λ'); None for ω' = ω.
        running_mean, running_cov: (g, G, 1) and (g, G, G); updated in place when `training` and
            the set contains "bw" or "bn", and used in the batch's place when not `training`.
        statistics: the K names of the set, in the order of `STATISTICS`.
        num_pergroup: G.
        training: take the statistics of the batch, as opposed to the running ones.
        momentum: the share of the batch in the running statistics' update.
        eps: ε > 0.
        whitening: "newton" or "eigh".
        num_iterations: T of Newton's iteration.
        group: the ranks over which the batch's statistics are taken; None for this rank alone.

    Returns:
        (N, C, H, W).
    """
    options = Options(
        tuple(statistics), num_pergroup, momentum, eps, whitening, num_iterations, group
    )
    running = None
    if options.of_batch and not training:
        running = _running_values(running_mean, running_cov, x.dtype, options)
    parameters = (weight, bias, mean_weight, var_weight)
    plain = _needs_plain_operations()
    if plain:
        with torch.autocast(x.device.type, enabled=False):
            y, batch_mean, batch_cov = composed_switch_whiten(x, *parameters, running, options)
        count = x.shape[0]
    elif x.numel() > 0:
        pixels = x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
        y, batch_mean, batch_cov, count = FusedSwitchWhiten.apply(
            pixels, *parameters, running, options
        )
    elif group is not None and training and options.of_batch:
        # The other ranks wait for this one, in backward too.
        y, batch_mean, batch_cov, count = FusedSwitchWhiten.apply(
            x[:0], *parameters, running, options
        )
        y = y.reshape(x.shape)
    else:
        return _empty_output(x, *parameters)
    if batch_mean is not None:
        tensors = (running_mean, running_cov, batch_mean, batch_cov)
        by_kernels = not plain and takes_small_kernels(options, *tensors)
        update = small_kernels.update_running if by_kernels else _update_running
        update(*tensors, count, momentum)
    return y


def _needs_plain_operations() -> bool:
    """Whether someone looks into the computation, whom an opaque function would stop."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


def _running_values(
    running_mean: Tensor, running_cov: Tensor, dtype: torch.dtype, options: Options
) -> tuple[Tensor, Tensor]:
    """The running mean (g, G) and covariance (g, G, G), or its diagonal if that is all it takes."""
    dtype = torch.promote_types(dtype, torch.float32)
    mean, cov = running_mean[..., 0].to(dtype), running_cov.to(dtype)
    return mean, cov.diagonal(dim1=-2, dim2=-1) if options.diagonal else cov


@torch.no_grad()
def _update_running(
    running_mean: Tensor,
    running_cov: Tensor,
    mean: Tensor,
    cov: Tensor,
    count: int | Tensor,
    momentum: float,
) -> None:
    """running ← (1 - momentum) running + momentum batch (Algorithm 1, lines 7 and 8).

    Args:
        running_mean, running_cov: (g, G, 1) and (g, G, G), changed in place.
        mean: (g, G).
        cov: (g, G, G), or variances (g, G): then only the diagonal of `running_cov` changes.
        count: pixels of the batch; nothing changes if it is 0.
    """
    if isinstance(count, Tensor):
        momentum = momentum * (count > 0).to(running_mean.dtype)
    running_mean.lerp_(mean[..., None].to(running_mean.dtype), momentum)
    target = running_cov if cov.dim() == 3 else running_cov.diagonal(dim1=-2, dim2=-1)
    target.lerp_(cov.to(running_cov.dtype), momentum)


def _empty_output(x: Tensor, *parameters: Tensor | None) -> Tensor:
    # No pixel has passed, so each parameter's gradient is zero, but it is there: optimizers and
    # DistributedDataParallel expect it.
    zero = sum(p.sum() for p in parameters if p is not None) * 0
    return x + zero.to(x.dtype)
