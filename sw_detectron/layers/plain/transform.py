"""What lies between the passes over the pixels: from statistics to the transform, and back.

Shape shorthand in this module:
    N: samples;  C: channels;  g: channel groups;  G: channels in a group;  C = g * G
    K: statistics in the set;  L: pixels of a sample;  M: pixels of the batch

All is small, (N, g, G, G) at most. In a set without "bw" and "iw" every matrix is diagonal and is
held as its diagonal, (…, g, G). A first dimension of 1 stands for N equal samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..inverse_sqrt import (
    eigh_inverse_sqrt_backward,
    eigh_inverse_sqrt_forward,
    newton_inverse_sqrt,
    newton_inverse_sqrt_backward,
)
from ..mixing import Statistics, mix, mix_backward
from ..options import Options, Parameters
from ..sync import spread


class Transform(NamedTuple):
    """y = A (x - μ̂) + β with A = γ ⊙ Σ̂^(-1/2) (Eq. 5).

    Attributes:
        center: μ̂, (N, g, G).
        matrix: A, (N, g, G, G).
        shift: β, (N, g, G).
        saved: what the backward needs besides.
    """

    center: Tensor
    matrix: Tensor
    shift: Tensor
    saved: tuple[Tensor, ...]


def batch_moments(
    mean: Tensor, cov: Tensor, pixels: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Moments over all pixels of this rank (Eq. 2 without its ε) from those of its samples.

    The covariance is that within the samples plus that of their means: no pixel is read.

    Args:
        mean: (N, g, G).
        cov: (N, g, G, G), or the variances (N, g, G).
        pixels: the number of each sample; None if all have the same.

    Returns:
        mean (g, G) and covariance (g, G, G), or variance (g, G); zeros if there is no sample.
    """
    if pixels is not None:
        share = mean.new_tensor(pixels).view(-1, 1, 1) / max(sum(pixels), 1)
        batch_mean = (share * mean).sum(dim=0)
        return batch_mean, spread(mean - batch_mean, cov, share).sum(dim=0)
    share = 1 / max(mean.shape[0], 1)
    batch_mean = mean.sum(dim=0) * share
    offsets = mean - batch_mean
    if cov.dim() == mean.dim():
        return batch_mean, (cov + offsets.square()).sum(dim=0) * share
    between = (offsets[..., :, None] * offsets[..., None, :]).add_(cov)
    return batch_mean, between.sum(dim=0) * share


def whitening_transform(
    statistics: Statistics, parameters: Parameters, dtype: torch.dtype, options: Options
) -> Transform:
    """Mix the statistics, and whiten with the mixture (Eqs. 5 and 6)."""
    omegas = _omegas(parameters, dtype)
    center, cov = mix(options.statistics, *omegas, *statistics, options.eps)
    root, saved = _inverse_sqrt(cov, options)
    if parameters.weight is None:
        return Transform(center, root, torch.zeros_like(center), (root, *saved))
    gamma, beta = (p.to(dtype).view(-1, options.num_pergroup) for p in parameters[:2])
    matrix = root * (gamma if options.diagonal else gamma[..., None])
    return Transform(center, matrix, beta.expand_as(center), (root, *saved))


def whitening_transform_backward(
    product: Tensor,
    total: Tensor,
    saved: tuple[Tensor, ...],
    statistics: Statistics,
    parameters: Parameters,
    options: Options,
) -> tuple[Parameters, Statistics, Tensor]:
    """The gradients of the loss through the transform's center, matrix and shift.

    Args:
        product: D = Σ dy (x - μ̂)ᵀ over the pixels of each sample, (N, g, G, G).
        total: s = Σ dy, (N, g, G).
        saved: of the `Transform`.

    Returns:
        The gradients of the parameters and of the statistics, and A.
    """
    root, *for_root = saved
    omegas = _omegas(parameters, root.dtype)
    grad_weight = grad_bias = None
    grad_root, matrix = product, root
    if parameters.weight is not None:
        grad_weight = (product * root).sum(dim=0 if options.diagonal else (0, -1)).flatten()
        grad_bias = total.sum(dim=0).flatten()
        gamma = parameters.weight.to(root.dtype).view(-1, options.num_pergroup)
        gamma = gamma if options.diagonal else gamma[..., None]
        grad_root, matrix = product * gamma, root * gamma
    if root.shape[0] == 1:  # the same for all samples
        grad_root, total = grad_root.sum(dim=0, keepdim=True), total.sum(dim=0, keepdim=True)

    grad_cov = _inverse_sqrt_backward(root, for_root, grad_root, options)
    grad_center = -times(matrix if options.diagonal else matrix.mT, total)
    *grad_omegas, grad_statistics = mix_backward(
        options.statistics, *omegas, statistics, grad_center, grad_cov
    )
    if parameters.var_weight is None:
        grad_lambdas = (_softmax_backward(omegas[0], grad_omegas[0] + grad_omegas[1]), None)
    else:
        grad_lambdas = map(_softmax_backward, omegas, grad_omegas)
    return Parameters(grad_weight, grad_bias, *grad_lambdas), grad_statistics, matrix


def input_coefficients(
    gradients: Statistics,
    statistics: Statistics,
    center: Tensor,
    length: int | Tensor,
    count: int | Tensor | None,
) -> tuple[Tensor | None, Tensor]:
    """S and t of the part of dx that goes through the statistics, S (x - μ̂) + t.

    A mean's gradient reaches each of its pixels in equal shares, and a covariance's as
    2/L dΣ (x - μ).

    Args:
        gradients: of the statistics; those of the batch None if they are constants.
        center: μ̂, (N, g, G).
        length: L, or the number of pixels of each sample that count, (N, 1, 1).
        count: M, an int or a tensor ().

    Returns:
        S (N, g, G, G), None if it is zero, and t (N, g, G).
    """
    parts = []
    if gradients.mean is not None:
        parts.append((gradients.mean, gradients.cov, statistics.mean, _reciprocal(length)))
    if gradients.batch_mean is not None:
        batch = (gradients.batch_mean, gradients.batch_cov, statistics.batch_mean)
        parts.append((*(t[None] for t in batch), _reciprocal(count)))
    matrix, shift = None, None
    for grad_mean, grad_cov, mean, scale in parts:
        wide = scale[..., None] if isinstance(scale, Tensor) and scale.dim() else scale
        part = grad_cov * (2 * (scale if grad_cov.dim() == mean.dim() else wide))
        offset = times(part, center - mean) + scale * grad_mean
        matrix = part if matrix is None else matrix + part
        shift = offset if shift is None else shift + offset
    return matrix, torch.zeros_like(center) if shift is None else shift


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrices (…, G, G), or diagonals (…, G), times vectors (…, G)."""
    if matrix.dim() == vector.dim():
        return matrix * vector
    # Not a matrix product, which is rounded to tf32 on GPUs where a user allows it.
    return (matrix * vector[..., None, :]).sum(dim=-1)


def _reciprocal(number: int | Tensor) -> float | Tensor:
    """1 / number, of a number of pixels that may be 0."""
    return 1 / (number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1))


def _omegas(parameters: Parameters, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ω and ω', (K,)."""
    omega = parameters.mean_weight.to(dtype).softmax(dim=0)
    if parameters.var_weight is None:
        return omega, omega
    return omega, parameters.var_weight.to(dtype).softmax(dim=0)


def _softmax_backward(omega: Tensor, grad: Tensor) -> Tensor:
    return omega * (grad - (omega * grad).sum())


def _inverse_sqrt(cov: Tensor, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Σ̂^(-1/2), and what its backward needs besides."""
    if options.diagonal:
        return cov.rsqrt(), ()
    if options.whitening == "eigh":
        root, *pairs = eigh_inverse_sqrt_forward(cov, floor=options.eps)
        return root, tuple(pairs)
    return newton_inverse_sqrt(cov, options.num_iterations), (cov,)


def _inverse_sqrt_backward(
    root: Tensor, saved: list[Tensor], grad: Tensor, options: Options
) -> Tensor:
    if options.diagonal:
        return -0.5 * root**3 * grad
    if options.whitening == "eigh":
        return eigh_inverse_sqrt_backward(*saved, grad)
    (cov,) = saved
    flat = (cov.flatten(0, 1), grad.flatten(0, 1))
    return newton_inverse_sqrt_backward(*flat, options.num_iterations).view_as(cov)
