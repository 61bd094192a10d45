"""What lies between the passes over the pixels: from statistics to the transform, and back.

Shape shorthand in this module:
    N: samples;  C: channels;  g: channel groups;  G: channels in a group;  C = g * G
    K: statistics in the set;  L: pixels of a sample;  M: pixels of the batch

All is small, (N, g, G, G) at most. In a set without "bw" and "iw" every matrix is diagonal and is
held as its diagonal, (…, g, G). A first dimension of 1 stands for N equal samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels, small_kernels
from .inverse_sqrt import (
    eigh_inverse_sqrt_backward,
    eigh_inverse_sqrt_forward,
    newton_inverse_sqrt,
    newton_inverse_sqrt_backward,
)
from .mixing import mix, mix_backward
from .options import Options


class Statistics(NamedTuple):
    """Means and (co)variances; those that the set does not need are None.

    Attributes:
        mean, cov: of each sample, (N, g, G) and (N, g, G, G).
        batch_mean, batch_cov: of the batch, (g, G) and (g, G, G).
    """

    mean: Tensor | None
    cov: Tensor | None
    batch_mean: Tensor | None
    batch_cov: Tensor | None


class Parameters(NamedTuple):
    """γ and β, (C,) or None; λ, (K,); λ', (K,) or None if tied."""

    weight: Tensor | None
    bias: Tensor | None
    mean_weight: Tensor
    var_weight: Tensor | None


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


def whitening_transform(
    statistics: Statistics, parameters: Parameters, dtype: torch.dtype, options: Options
) -> Transform:
    """Mix the statistics, and whiten with the mixture (Eqs. 5 and 6)."""
    if _by_small_kernels(statistics, parameters, options):
        return Transform(
            *small_kernels.whitening_transform(*statistics, *parameters, *_for_kernels(options))
        )
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
    if _by_small_kernels(statistics, parameters, options):
        weight, _, *lambdas = parameters
        grad_parameters, grad_statistics, matrix = small_kernels.whitening_transform_backward(
            product, total, saved, *statistics, weight, *lambdas, *_for_kernels(options)
        )
        return Parameters(*grad_parameters), Statistics(*grad_statistics), matrix
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
    length: int,
    count: int | Tensor | None,
    options: Options,
) -> tuple[Tensor | None, Tensor]:
    """S and t of the part of dx that goes through the statistics, S (x - μ̂) + t.

    A mean's gradient reaches each of its pixels in equal shares, and a covariance's as
    2/L dΣ (x - μ).

    Args:
        gradients: of the statistics; those of the batch None if they are constants.
        center: μ̂, (N, g, G).
        length: L.
        count: M, an int or a tensor ().

    Returns:
        S (N, g, G, G), None if it is zero, and t (N, g, G).
    """
    if takes_small_kernels(options, center, *gradients):
        return small_kernels.input_coefficients(
            *gradients, statistics.mean, statistics.batch_mean, center, length, count
        )
    parts = []
    if gradients.mean is not None:
        parts.append((gradients.mean, gradients.cov, statistics.mean, 1 / length))
    if gradients.batch_mean is not None:
        scale = 1 / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
        batch = (gradients.batch_mean, gradients.batch_cov, statistics.batch_mean)
        parts.append((*(t[None] for t in batch), scale))
    matrix, shift = None, None
    for grad_mean, grad_cov, mean, scale in parts:
        part = grad_cov * (2 * scale)
        offset = times(part, center - mean) + scale * grad_mean
        matrix = part if matrix is None else matrix + part
        shift = offset if shift is None else shift + offset
    return matrix, torch.zeros_like(center) if shift is None else shift


def takes_small_kernels(options: Options, *tensors: Tensor | None) -> bool:
    return small_kernels.supported(
        options.statistics, options.whitening, options.num_pergroup, *tensors
    )


def _by_small_kernels(statistics: Statistics, parameters: Parameters, options: Options) -> bool:
    return takes_small_kernels(options, *parameters, *statistics)


def _for_kernels(options: Options) -> tuple[tuple[str, ...], float, int]:
    return options.statistics, options.eps, options.num_iterations


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrices (…, G, G), or diagonals (…, G), times vectors (…, G)."""
    if matrix.dim() == vector.dim():
        return matrix * vector
    # Not a matrix product, which is rounded to tf32 on GPUs where a user allows it.
    return (matrix * vector[..., None, :]).sum(dim=-1)


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
    iterate = kernels.newton_inverse_sqrt if kernels.available(cov) else newton_inverse_sqrt
    return iterate(cov, options.num_iterations), (cov,)


def _inverse_sqrt_backward(
    root: Tensor, saved: list[Tensor], grad: Tensor, options: Options
) -> Tensor:
    if options.diagonal:
        return -0.5 * root**3 * grad
    if options.whitening == "eigh":
        return eigh_inverse_sqrt_backward(*saved, grad)
    (cov,) = saved
    if kernels.available(cov):
        return kernels.newton_inverse_sqrt_backward(cov, grad, options.num_iterations)
    flat = (cov.flatten(0, 1), grad.flatten(0, 1))
    return newton_inverse_sqrt_backward(*flat, options.num_iterations).view_as(cov)
