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

from .backend import backend_of_call
from .compiled import compiled_switch_whiten
from .composed import composed_switch_whiten
from .fused import FusedSwitchWhiten
from .options import Options, Parameters, Running
from .padding import Extent
from .plain import running_values, update_running, without_autocast

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
    extent: Extent | None = None,
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
        extent: the pixels that statistics are of; None for all. All pixels are whitened.

    Returns:
        (N, C, H, W).
    """
    options = Options(
        tuple(statistics), num_pergroup, momentum, eps, whitening, num_iterations, group, training
    )
    parameters = Parameters(weight, bias, mean_weight, var_weight)
    running = Running(running_mean, running_cov)
    if _must_be_seen():
        with without_autocast(x):
            return _composed(x, parameters, running, options, extent)
    if x.numel() > 0:
        pixels = x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
    elif group is not None and options.of_this_batch:
        pixels = x[:0]  # The other ranks wait for this one, in backward too.
    else:
        return _empty_output(x, parameters)
    if torch.compiler.is_compiling() and extent is None:
        return compiled_switch_whiten(pixels, parameters, running, options).reshape(x.shape)
    backend = backend_of_call(x, parameters, running, options, extent is not None)
    y = FusedSwitchWhiten.apply(pixels, *parameters, *running, options, backend, extent)
    return y if x.numel() > 0 else y.reshape(x.shape)


def _must_be_seen() -> bool:
    """Whether the operations are recorded or transformed, so that they have to be PyTorch's."""
    return (
        torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


def _composed(
    x: Tensor,
    parameters: Parameters,
    running: Running,
    options: Options,
    extent: Extent | None,
) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    of_running = options.of_batch and not options.training
    values = running_values(running, dtype, options) if of_running else None
    y, batch_mean, batch_cov, count = composed_switch_whiten(
        x, *parameters, values, options, extent
    )
    if batch_mean is not None:
        update_running(running, batch_mean.detach(), batch_cov.detach(), count, options.momentum)
    return y


def _empty_output(x: Tensor, parameters: Parameters) -> Tensor:
    # No pixel has passed, so each parameter's gradient is zero, but it is there: optimizers and
    # DistributedDataParallel expect it.
    zero = sum(p.sum() for p in parameters if p is not None) * 0
    return x + zero.to(x.dtype)
