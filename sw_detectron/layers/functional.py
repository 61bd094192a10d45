"""Switchable Whitening as one differentiable function.

Shape shorthand in this module:
    N: samples;  C: channels;  H, W: height, width;  L = H * W: pixels of a sample
    g: channel groups;  G = num_pergroup: channels in a group;  C = g * G
    K: number of statistics in the set
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .inverse_sqrt import eigh_inverse_sqrt, newton_inverse_sqrt
from .moments import batch_moments, instance_moments, layer_moments

STATISTICS = ("bw", "iw", "bn", "in", "ln")
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

    Returns:
        (N, C, H, W).
    """
    if x.numel() == 0:
        return _empty_output(x, weight, bias, mean_weight, var_weight)
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(x.dtype, torch.float32)
        diagonal = not {"bw", "iw"} & set(statistics)
        omega_mean = mean_weight.to(dtype).softmax(dim=0)
        omega_cov = omega_mean if var_weight is None else var_weight.to(dtype).softmax(dim=0)

        shape = (x.shape[0], -1, num_pergroup, x.shape[2] * x.shape[3])
        pixels = x.to(dtype).reshape(shape)
        mean = cov = batch_mean = batch_cov = None
        if training or {"iw", "in", "ln"} & set(statistics):
            mean, cov = instance_moments(pixels, diagonal)
        if {"bw", "bn"} & set(statistics):
            if training:
                batch_mean, batch_cov = batch_moments(mean, cov)
                update_running(running_mean, running_cov, batch_mean, batch_cov, momentum)
            else:
                batch_mean, batch_cov = running_mean[..., 0].to(dtype), running_cov.to(dtype)
                if diagonal:
                    batch_cov = batch_cov.diagonal(dim1=-2, dim2=-1)
        mixed_mean, mixed_cov = mix_statistics(
            statistics, omega_mean, omega_cov, mean, cov, batch_mean, batch_cov
        )
        gamma = None if weight is None else weight.to(dtype).view(-1, num_pergroup)
        centred = pixels - mixed_mean[..., None]
        if diagonal:
            scale = (mixed_cov + eps).rsqrt()
            y = centred * (scale if gamma is None else scale * gamma)[..., None]
        else:
            identity = torch.eye(num_pergroup, dtype=dtype, device=x.device)
            mixed_cov = mixed_cov + eps * identity
            if whitening == "newton":
                matrix = newton_inverse_sqrt(mixed_cov, num_iterations)
            else:
                matrix = eigh_inverse_sqrt(mixed_cov, floor=eps)
            y = (matrix if gamma is None else matrix * gamma[..., None]) @ centred
        if bias is not None:
            y = y + bias.to(dtype).view(-1, num_pergroup, 1)
    y = y.view(x.shape).to(x.dtype)
    return y.contiguous(memory_format=memory_format(x))


def mix_statistics(
    statistics: Sequence[str],
    omega_mean: Tensor,
    omega_cov: Tensor,
    mean: Tensor | None,
    cov: Tensor | None,
    batch_mean: Tensor | None,
    batch_cov: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The mixed mean μ̂ and covariance Σ̂, without ε (Eq. 6).

    Args:
        statistics: the K names.
        omega_mean, omega_cov: ω and ω', (K,).
        mean, cov: of each sample, (N, g, G) and (N, g, G, G), or variances (N, g, G).
        batch_mean, batch_cov: of the batch, the same without N.

    Returns:
        μ̂ (N, g, G) and Σ̂ (N, g, G, G), or its diagonal (N, g, G) if variances were given.
        The first dimension is 1 where no statistic of the set depends on the sample.
    """
    diagonal = (batch_cov is None or batch_cov.dim() == 2) and (cov is None or cov.dim() == 3)

    def keep_diagonal(matrix: Tensor) -> Tensor:
        return matrix if diagonal else matrix.diagonal(dim1=-2, dim2=-1).diag_embed()

    mixed_mean: Tensor | float = 0.0
    mixed_cov: Tensor | float = 0.0
    for k, name in enumerate(statistics):
        if name == "bw":
            mean_k, cov_k = batch_mean[None], batch_cov[None]
        elif name == "iw":
            mean_k, cov_k = mean, cov
        elif name == "bn":
            mean_k, cov_k = batch_mean[None], keep_diagonal(batch_cov)[None]
        elif name == "in":
            mean_k, cov_k = mean, keep_diagonal(cov)
        else:
            variance = cov if diagonal else cov.diagonal(dim1=-2, dim2=-1)
            layer_mean, layer_variance = layer_moments(mean, variance)
            mean_k = layer_mean.expand_as(mean)
            cov_k = layer_variance.expand_as(mean)
            if not diagonal:
                cov_k = cov_k.diag_embed()
        mixed_mean = mixed_mean + omega_mean[k] * mean_k
        mixed_cov = mixed_cov + omega_cov[k] * cov_k
    return mixed_mean, mixed_cov


@torch.no_grad()
def update_running(
    running_mean: Tensor, running_cov: Tensor, mean: Tensor, cov: Tensor, momentum: float
) -> None:
    """running ← (1 - momentum) running + momentum batch (Algorithm 1, lines 7 and 8).

    Args:
        running_mean, running_cov: (g, G, 1) and (g, G, G), changed in place.
        mean: (g, G).
        cov: (g, G, G), or variances (g, G): then only the diagonal of `running_cov` changes.
    """
    running_mean.lerp_(mean[..., None].to(running_mean.dtype), momentum)
    target = running_cov if cov.dim() == 3 else running_cov.diagonal(dim1=-2, dim2=-1)
    target.lerp_(cov.to(running_cov.dtype), momentum)


def memory_format(x: Tensor) -> torch.memory_format:
    """channels_last if `x` (N, C, H, W) is that and not plainly contiguous, else contiguous."""
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _empty_output(x: Tensor, *parameters: Tensor | None) -> Tensor:
    # No pixel has passed, so each parameter's gradient is zero, but it is there: optimizers and
    # DistributedDataParallel expect it.
    zero = sum(p.sum() for p in parameters if p is not None) * 0
    return x + zero.to(x.dtype)
