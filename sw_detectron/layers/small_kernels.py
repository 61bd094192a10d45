"""What lies between the passes over the pixels as a handful of Triton launches.

The functions here equal those of the same names in `moments`, `whitening` and `functional`, for
sets with "bw" or "iw" and Newton's iteration, in float32. There the small tensors go through some
hundred operations, each of which takes a GPU longer to start than to do.

They launch kernels directly, and are no operators of the library as those of `kernels` are: only
the autograd function of `fused` calls them, which neither torch.compile nor autograd looks into,
and an operator costs the CPU more time than the launch itself. For the same reason nothing is
checked or copied here: tensors are those of which `supported` was true, and contiguous.

Shape shorthand in this module:
    N: samples;  C: channels;  g: channel groups;  G: channels in a group;  C = g * G
    N': N, or 1 where no statistic of the set depends on the sample
    K: statistics in the set;  L: pixels of a sample;  M: pixels of the batch
    GP: G padded to a power of two >= 16, the side of a matrix tile; the padding is zero
    T: Newton's iterations

Statistics of samples are None where no statistic of the set depends on the sample, those of the
batch where none depends on the batch. Sums have a fixed order: equal inputs give equal results,
bit by bit.
"""

import os
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .kernels import (
    INTERPRETED,
    _launch,
    _load_matrix,
    _padded,
    _store_matrix,
    available,
    tl,
    triton,
)
from .mixing import OF_BATCH, STATISTICS, WHITENING

# A program holds its inner products with the statistics in a vector: K <= 5 of them, and last a
# plain sum, which "ln" needs.
SLOTS = tl.constexpr(8)
LAST = tl.constexpr(7)

# Values of a vector that a program works on at a time.
BLOCK = tl.constexpr(1024)


def supported(
    statistics: Sequence[str], whitening: str, num_pergroup: int, *tensors: Tensor | None
) -> bool:
    """Whether this module can whiten with these options, and is asked to.

    It has been compiled for GPUs and tested in Triton's interpreter, but has not run on a GPU yet:
    there the environment variable SW_DETECTRON_SMALL_KERNELS=1 asks for it.

    Args:
        tensors: the parameters and the statistics, those that there are.
    """
    if not INTERPRETED and os.environ.get("SW_DETECTRON_SMALL_KERNELS") != "1":
        return False
    present = [tensor for tensor in tensors if tensor is not None]
    return (
        whitening == "newton"
        and not WHITENING.isdisjoint(statistics)
        and available(present[0], num_pergroup)
        and all(t.dtype == torch.float32 and t.is_contiguous() and t.numel() for t in present)
    )


# ---------------------------------------------------------------------------------------------
# Parts of kernels
#
# BW, IW, BN, IN and LN are the indices of the statistics in the set, -1 for those that it lacks:
# their ω is 0, and what they would add to a result is nothing.
# ---------------------------------------------------------------------------------------------


@triton.jit
def _load_vector(pointer, G: tl.constexpr, GP: tl.constexpr):
    """A float32 (G,) vector, padded with zeros to (GP,)."""
    i = tl.arange(0, GP)
    return tl.load(pointer + i, mask=i < G, other=0.0)


@triton.jit
def _store_vector(pointer, vector, G: tl.constexpr, GP: tl.constexpr):
    i = tl.arange(0, GP)
    tl.store(pointer + i, vector, mask=i < G)


@triton.jit
def _identity(G: tl.constexpr, GP: tl.constexpr):
    """I, (G, G), padded with zeros as all matrices are."""
    i = tl.arange(0, GP)
    return tl.where((i[:, None] == i[None, :]) & (i < G)[:, None], 1.0, 0.0)


@triton.jit
def _sum_matrix(matrix):
    return tl.sum(tl.sum(matrix, axis=1), axis=0)


@triton.jit
def _softmax(pointer, K: tl.constexpr):
    """ω of importance weights (K,), padded with zeros to (SLOTS,)."""
    k = tl.arange(0, SLOTS)
    weight = tl.load(pointer + k, mask=k < K, other=-float("inf"))
    exponential = tl.exp(weight - tl.max(weight, axis=0))
    return exponential / tl.sum(exponential, axis=0)


@triton.jit
def _omegas(mean_weight_ptr, var_weight_ptr, K: tl.constexpr):
    """ω and ω'."""
    omega = _softmax(mean_weight_ptr, K)
    omega_cov = omega
    if var_weight_ptr is not None:
        omega_cov = _softmax(var_weight_ptr, K)
    return omega, omega_cov


@triton.jit
def _pick(vector, k: tl.constexpr):
    """Slot k of a vector (SLOTS,), 0 if k is -1."""
    return tl.sum(tl.where(tl.arange(0, SLOTS) == k, vector, 0.0), axis=0)


@triton.jit
def _place(value, k: tl.constexpr):
    """A vector (SLOTS,) with the value in slot k, in none if k is -1."""
    return tl.where(tl.arange(0, SLOTS) == k, value, 0.0)


@triton.jit
def _weigh(omega, cov, identity, WHITENED: tl.constexpr, STANDARDIZED: tl.constexpr):
    """ω cov, of which a standardizing statistic has only the diagonal; its own adjoint."""
    return (_pick(omega, WHITENED) + _pick(omega, STANDARDIZED) * identity) * cov


@triton.jit
def _inner_products(
    grad_center, grad_mixed, mean, cov, identity, WHITENED: tl.constexpr, STANDARDIZED: tl.constexpr
):
    """The gradients of ω and ω' of two statistics, in their slots of vectors (SLOTS,)."""
    of_mean = tl.sum(grad_center * mean, axis=0)
    products = grad_mixed * cov
    of_cov = _sum_matrix(products)
    of_diagonal = _sum_matrix(products * identity)
    return (
        _place(of_mean, WHITENED) + _place(of_mean, STANDARDIZED),
        _place(of_cov, WHITENED) + _place(of_diagonal, STANDARDIZED),
    )


@triton.jit
def _layer_moments(mean_ptr, cov_ptr, sample, channels, G: tl.constexpr):
    """Mean and variance over all channels of a sample, as LN takes them."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        inside = channel < channels
        total += tl.load(mean_ptr + sample * channels + channel, mask=inside, other=0.0)
    layer_mean = tl.sum(total, axis=0) / channels
    scatter = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        inside = channel < channels
        index = sample * channels + channel
        mean = tl.load(mean_ptr + index, mask=inside, other=0.0)
        variance = tl.load(cov_ptr + index * G + channel % G, mask=inside, other=0.0)
        offset = tl.where(inside, mean - layer_mean, 0.0)
        scatter += variance + offset * offset
    return layer_mean, tl.sum(scatter, axis=0) / channels


@triton.jit
def _mix(
    omega,
    omega_cov,
    mean_ptr,  # (N, g, G)
    cov_ptr,  # (N, g, G, G)
    batch_mean_ptr,  # (g, G)
    batch_cov_ptr,  # (g, G, G)
    layer_mean,
    layer_variance,
    index,
    group,
    eps,
    BW: tl.constexpr,
    IW: tl.constexpr,
    BN: tl.constexpr,
    IN: tl.constexpr,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """μ̂ (GP,) and Σ̂ (GP, GP) of a sample and group (Eq. 6)."""
    identity = _identity(G, GP)
    center = tl.where(tl.arange(0, GP) < G, _pick(omega, LN) * layer_mean, 0.0)
    mixed = (_pick(omega_cov, LN) * layer_variance + eps) * identity
    if batch_mean_ptr is not None:
        mean = _load_vector(batch_mean_ptr + group * G, G, GP)
        cov = _load_matrix(batch_cov_ptr + group * G * G, G, 1, G, GP)
        center += (_pick(omega, BW) + _pick(omega, BN)) * mean
        mixed += _weigh(omega_cov, cov, identity, BW, BN)
    if mean_ptr is not None:
        mean = _load_vector(mean_ptr + index * G, G, GP)
        cov = _load_matrix(cov_ptr + index * G * G, G, 1, G, GP)
        center += (_pick(omega, IW) + _pick(omega, IN)) * mean
        mixed += _weigh(omega_cov, cov, identity, IW, IN)
    return center, mixed


@triton.jit
def _newton(normalized, identity, iterates, T: tl.constexpr, SIZE: tl.constexpr):
    """P_T of Newton's iteration for S = `normalized`, of trace 1.

    In the coupled form of `kernels._newton_kernel`, from P_1 = M_0 on, as P_0 = I:

        Y_k = Y_{k-1} M_{k-1},   M_k = (3 I - P_k Y_k) / 2,   P_{k+1} = M_k P_k.

    Y_k and P_k are kept for k = 1 … T - 1, unless `iterates`, pointers to a tile of SIZE values,
    is None.
    """
    step = 1.5 * identity - 0.5 * normalized
    y = normalized
    p = step
    for k in range(T - 1):
        y = tl.dot(y, step, input_precision="ieee")
        if iterates is not None:
            tl.store(iterates + 2 * k * SIZE, y)
            tl.store(iterates + (2 * k + 1) * SIZE, p)
        step = 1.5 * identity - 0.5 * tl.dot(p, y, input_precision="ieee")
        p = tl.dot(step, p, input_precision="ieee")
    return p


@triton.jit
def _newton_backward(normalized, identity, iterates, grad_p, T: tl.constexpr, SIZE: tl.constexpr):
    """The gradient with respect to S, not symmetrized, from that with respect to P_T.

    Transposes are left out: every iterate is symmetric.
    """
    grad_y = tl.zeros_like(normalized)  # Y_T is not used
    for k in range(T - 1):
        y = tl.load(iterates + 2 * (T - 2 - k) * SIZE)
        p = tl.load(iterates + (2 * (T - 2 - k) + 1) * SIZE)
        step = 1.5 * identity - 0.5 * tl.dot(p, y, input_precision="ieee")
        grad_step = tl.dot(y, grad_y, input_precision="ieee")
        grad_step = tl.dot(grad_p, p, grad_step, input_precision="ieee")
        half = -0.5 * grad_step
        grad_p = tl.dot(step, grad_p, input_precision="ieee")
        grad_p = tl.dot(half, y, grad_p, input_precision="ieee")
        grad_y = tl.dot(grad_y, step, input_precision="ieee")
        grad_y = tl.dot(p, half, grad_y, input_precision="ieee")
    # P_1 = M_0 = (3 I - S) / 2 and Y_1 = S M_0.
    grad_step = tl.dot(normalized, grad_y, grad_p, input_precision="ieee")
    step = 1.5 * identity - 0.5 * normalized
    return tl.dot(grad_y, step, -0.5 * grad_step, input_precision="ieee")


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["samples", "groups"])
def _batch_moments_kernel(
    mean_ptr,  # (N, g, G)
    cov_ptr,  # (N, g, G, G)
    batch_mean_ptr,  # (g, G)
    batch_cov_ptr,  # (g, G, G)
    samples,
    groups,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The covariance within the samples plus that of their means, one row in each program."""
    group = (tl.program_id(0) // G).to(tl.int64)
    row = tl.program_id(0) % G
    column = tl.arange(0, GP)
    on_row = column == row
    means = mean_ptr + group * G + column[None, :]
    covs = cov_ptr + (group * G + row) * G + column[None, :]

    # The means' mean comes first: sums of squares would lose the digits that centring keeps.
    total = tl.zeros((ROWS, GP), dtype=tl.float32)
    for first in range(0, samples, ROWS):
        sample = first + tl.arange(0, ROWS)[:, None]
        inside = (sample < samples) & (column < G)[None, :]
        total += tl.load(means + sample.to(tl.int64) * groups * G, mask=inside, other=0.0)
    batch_mean = tl.sum(total, axis=0) / samples

    scatter = tl.zeros((ROWS, GP), dtype=tl.float32)
    for first in range(0, samples, ROWS):
        sample = first + tl.arange(0, ROWS)[:, None]
        inside = (sample < samples) & (column < G)[None, :]
        mean = tl.load(means + sample.to(tl.int64) * groups * G, mask=inside, other=0.0)
        cov = tl.load(covs + sample.to(tl.int64) * groups * G * G, mask=inside, other=0.0)
        offset = tl.where(inside, mean - batch_mean[None, :], 0.0)
        row_offset = tl.sum(tl.where(on_row[None, :], offset, 0.0), axis=1)
        scatter += cov + row_offset[:, None] * offset
    batch_cov = tl.sum(scatter, axis=0) / samples

    tl.store(batch_mean_ptr + group * G + column, batch_mean, mask=on_row)
    _store_vector(batch_cov_ptr + (group * G + row) * G, batch_cov, G, GP)


@triton.jit(do_not_specialize=["groups"])
def _transform_kernel(
    mean_weight_ptr,  # (K,)
    var_weight_ptr,  # (K,), None if tied
    weight_ptr,  # (C,), None if there is no γ and β
    bias_ptr,  # (C,), likewise
    mean_ptr,  # (N, g, G)
    cov_ptr,  # (N, g, G, G)
    batch_mean_ptr,  # (g, G)
    batch_cov_ptr,  # (g, G, G)
    layer_ptr,  # (N, 2), None without "ln"
    center_ptr,  # (N', g, G)
    matrix_ptr,  # (N', g, G, G)
    shift_ptr,  # (N', g, G)
    groups,
    eps,
    T: tl.constexpr,
    K: tl.constexpr,
    BW: tl.constexpr,
    IW: tl.constexpr,
    BN: tl.constexpr,
    IN: tl.constexpr,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """μ̂, A = γ ⊙ Σ̂^(-1/2) and β, one sample and group in each program."""
    index = tl.program_id(0).to(tl.int64)
    sample = index // groups
    group = index % groups

    layer_mean = 0.0
    layer_variance = 0.0
    if layer_ptr is not None:
        # All groups of a sample compute the same, and the first one keeps it.
        layer_mean, layer_variance = _layer_moments(mean_ptr, cov_ptr, sample, groups * G, G)
        tl.store(layer_ptr + 2 * sample, layer_mean, mask=group == 0)
        tl.store(layer_ptr + 2 * sample + 1, layer_variance, mask=group == 0)
    omega, omega_cov = _omegas(mean_weight_ptr, var_weight_ptr, K)
    center, mixed = _mix(
        omega,
        omega_cov,
        mean_ptr,
        cov_ptr,
        batch_mean_ptr,
        batch_cov_ptr,
        layer_mean,
        layer_variance,
        index,
        group,
        eps,
        BW,
        IW,
        BN,
        IN,
        LN,
        G,
        GP,
    )
    identity = _identity(G, GP)
    trace = _sum_matrix(mixed * identity)
    matrix = _newton(mixed / trace, identity, None, T, GP * GP) / tl.sqrt(trace)
    shift = tl.zeros((GP,), dtype=tl.float32)
    if weight_ptr is not None:
        matrix *= _load_vector(weight_ptr + group * G, G, GP)[:, None]
        shift = _load_vector(bias_ptr + group * G, G, GP)
    _store_vector(center_ptr + index * G, center, G, GP)
    _store_matrix(matrix_ptr + index * G * G, matrix, G, GP)
    _store_vector(shift_ptr + index * G, shift, G, GP)


@triton.jit(do_not_specialize=["groups"])
def _transform_backward_kernel(
    product_ptr,  # (N', g, G, G)
    total_ptr,  # (N', g, G)
    mean_weight_ptr,  # (K,)
    var_weight_ptr,  # (K,), None if tied
    weight_ptr,  # (C,), None if there is no γ and β
    mean_ptr,  # (N, g, G)
    cov_ptr,  # (N, g, G, G)
    batch_mean_ptr,  # (g, G)
    batch_cov_ptr,  # (g, G, G)
    layer_ptr,  # (N, 2), None without "ln"
    matrix_ptr,  # (N', g, G, G)
    grad_gamma_ptr,  # (N', g, G), summed over samples later
    grad_center_ptr,  # (N', g, G), likewise; None if nothing depends on the batch
    grad_mixed_ptr,  # (N', g, G, G), likewise
    grad_mean_ptr,  # (N, g, G)
    grad_cov_ptr,  # (N, g, G, G)
    inner_ptr,  # (N', g, 2, SLOTS), the gradients of ω and ω'
    iterates_ptr,  # (N', g, T - 1, 2, GP, GP), scratch
    groups,
    eps,
    T: tl.constexpr,
    K: tl.constexpr,
    BW: tl.constexpr,
    IW: tl.constexpr,
    BN: tl.constexpr,
    IN: tl.constexpr,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """A, and all of its backward that is of one sample and group, one in each program.

    Of the gradients of mean and cov only the part through "ln" is left out.
    """
    index = tl.program_id(0).to(tl.int64)
    sample = index // groups
    group = index % groups

    layer_mean = 0.0
    layer_variance = 0.0
    if layer_ptr is not None:
        layer_mean = tl.load(layer_ptr + 2 * sample)
        layer_variance = tl.load(layer_ptr + 2 * sample + 1)
    omega, omega_cov = _omegas(mean_weight_ptr, var_weight_ptr, K)
    _, mixed = _mix(
        omega,
        omega_cov,
        mean_ptr,
        cov_ptr,
        batch_mean_ptr,
        batch_cov_ptr,
        layer_mean,
        layer_variance,
        index,
        group,
        eps,
        BW,
        IW,
        BN,
        IN,
        LN,
        G,
        GP,
    )
    identity = _identity(G, GP)
    trace = _sum_matrix(mixed * identity)
    normalized = mixed / trace
    i = tl.arange(0, GP)
    iterates = iterates_ptr + index * ((T - 1) * 2 * GP * GP) + i[:, None] * GP + i[None, :]
    p = _newton(normalized, identity, iterates, T, GP * GP)
    # A thread reads below what other threads of the program have written.
    tl.debug_barrier()

    # Through A = γ ⊙ P_T / sqrt(tr Σ̂) and y = A (x - μ̂) + β.
    scale = 1.0 / tl.sqrt(trace)
    matrix = p * scale
    grad_root = _load_matrix(product_ptr + index * G * G, G, 1, G, GP)
    if weight_ptr is not None:
        grad_gamma = tl.sum(grad_root * matrix, axis=1)
        _store_vector(grad_gamma_ptr + index * G, grad_gamma, G, GP)
        gamma = _load_vector(weight_ptr + group * G, G, GP)[:, None]
        matrix *= gamma
        grad_root *= gamma
    _store_matrix(matrix_ptr + index * G * G, matrix, G, GP)
    total = _load_vector(total_ptr + index * G, G, GP)
    grad_center = -tl.sum(matrix * total[:, None], axis=0)

    # Through S = Σ̂ / tr Σ̂.
    root_product = _sum_matrix(grad_root * p)
    grad = _newton_backward(normalized, identity, iterates, grad_root * scale, T, GP * GP)
    grad_trace = -(0.5 * scale * root_product + _sum_matrix(grad * normalized)) / trace
    grad_mixed = 0.5 * (grad + tl.trans(grad)) / trace + grad_trace * identity

    # Through the mixture.
    of_mean = tl.zeros((SLOTS,), dtype=tl.float32)
    of_cov = tl.zeros((SLOTS,), dtype=tl.float32)
    if batch_mean_ptr is not None:
        mean = _load_vector(batch_mean_ptr + group * G, G, GP)
        cov = _load_matrix(batch_cov_ptr + group * G * G, G, 1, G, GP)
        more_mean, more_cov = _inner_products(grad_center, grad_mixed, mean, cov, identity, BW, BN)
        of_mean += more_mean
        of_cov += more_cov
        _store_vector(grad_center_ptr + index * G, grad_center, G, GP)
        _store_matrix(grad_mixed_ptr + index * G * G, grad_mixed, G, GP)
    if mean_ptr is not None:
        mean = _load_vector(mean_ptr + index * G, G, GP)
        cov = _load_matrix(cov_ptr + index * G * G, G, 1, G, GP)
        more_mean, more_cov = _inner_products(grad_center, grad_mixed, mean, cov, identity, IW, IN)
        of_mean += more_mean
        of_cov += more_cov
        grad_mean = (_pick(omega, IW) + _pick(omega, IN)) * grad_center
        grad_cov = _weigh(omega_cov, grad_mixed, identity, IW, IN)
        _store_vector(grad_mean_ptr + index * G, grad_mean, G, GP)
        _store_matrix(grad_cov_ptr + index * G * G, grad_cov, G, GP)
    if layer_ptr is not None:
        center_sum = tl.sum(grad_center, axis=0)
        diagonal_sum = _sum_matrix(grad_mixed * identity)
        of_mean += _place(center_sum * layer_mean, LN) + _place(center_sum, LAST)
        of_cov += _place(diagonal_sum * layer_variance, LN) + _place(diagonal_sum, LAST)
    slot = tl.arange(0, SLOTS)
    tl.store(inner_ptr + 2 * index * SLOTS + slot, of_mean)
    tl.store(inner_ptr + (2 * index + 1) * SLOTS + slot, of_cov)


@triton.jit(do_not_specialize=["samples", "groups", "channel_programs"])
def _reduce_gradients_kernel(
    mean_weight_ptr,  # (K,)
    var_weight_ptr,  # (K,), None if tied
    total_ptr,  # (N', g, G)
    mean_ptr,  # (N, g, G)
    layer_ptr,  # (N, 2), None without "ln"
    grad_gamma_ptr,  # (N', g, G), None if there is no γ and β
    grad_center_ptr,  # (N', g, G), None if nothing depends on the batch
    grad_mixed_ptr,  # (N', g, G, G), likewise
    inner_ptr,  # (N', g, 2, SLOTS)
    grad_weight_ptr,  # (C,)
    grad_bias_ptr,  # (C,)
    grad_mean_weight_ptr,  # (K,)
    grad_var_weight_ptr,  # (K,)
    grad_mean_ptr,  # (N, g, G), completed
    grad_cov_ptr,  # (N, g, G, G), completed
    grad_batch_mean_ptr,  # (g, G)
    grad_batch_cov_ptr,  # (g, G, G)
    samples,
    groups,
    channel_programs,
    K: tl.constexpr,
    BW: tl.constexpr,
    IW: tl.constexpr,
    BN: tl.constexpr,
    IN: tl.constexpr,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """All sums over the results of `_transform_backward_kernel`, which need not wait for another.

    The first program takes the importance weights, as it has most to do; then there is one for
    each channel, and with "ln" one for each sample and group.
    """
    program = tl.program_id(0)
    omega, omega_cov = _omegas(mean_weight_ptr, var_weight_ptr, K)
    if program == 0:
        _reduce_importance(
            omega,
            omega_cov,
            inner_ptr,
            grad_mean_weight_ptr,
            grad_var_weight_ptr,
            samples * groups,
            K,
        )
    elif program <= channel_programs:
        _reduce_samples(
            omega,
            omega_cov,
            total_ptr,
            grad_gamma_ptr,
            grad_center_ptr,
            grad_mixed_ptr,
            grad_weight_ptr,
            grad_bias_ptr,
            grad_batch_mean_ptr,
            grad_batch_cov_ptr,
            program - 1,
            samples,
            groups,
            BW,
            BN,
            G,
            GP,
            ROWS,
        )
    else:
        if layer_ptr is not None:
            _through_layer_moments(
                omega,
                omega_cov,
                mean_ptr,
                layer_ptr,
                inner_ptr,
                grad_mean_ptr,
                grad_cov_ptr,
                program - 1 - channel_programs,
                groups,
                LN,
                G,
                GP,
            )


@triton.jit
def _softmax_backward(omega, grad):
    return omega * (grad - tl.sum(omega * grad, axis=0))


@triton.jit
def _reduce_importance(
    omega,
    omega_cov,
    inner_ptr,
    grad_mean_weight_ptr,
    grad_var_weight_ptr,
    matrices,
    K: tl.constexpr,
):
    """The gradients of the importance weights."""
    ROWS: tl.constexpr = 256
    slot = tl.arange(0, SLOTS)
    of_mean = tl.zeros((ROWS, SLOTS), dtype=tl.float32)
    of_cov = tl.zeros((ROWS, SLOTS), dtype=tl.float32)
    for first in range(0, matrices, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < matrices) & (slot < K)[None, :]
        inner = inner_ptr + row.to(tl.int64) * 2 * SLOTS + slot[None, :]
        of_mean += tl.load(inner, mask=inside, other=0.0)
        of_cov += tl.load(inner + SLOTS, mask=inside, other=0.0)
    grad_omega = tl.sum(of_mean, axis=0)
    grad_omega_cov = tl.sum(of_cov, axis=0)
    if grad_var_weight_ptr is None:
        grad_omega += grad_omega_cov
    else:
        grad = _softmax_backward(omega_cov, grad_omega_cov)
        tl.store(grad_var_weight_ptr + slot, grad, mask=slot < K)
    grad = _softmax_backward(omega, grad_omega)
    tl.store(grad_mean_weight_ptr + slot, grad, mask=slot < K)


@triton.jit
def _reduce_samples(
    omega,
    omega_cov,
    total_ptr,
    grad_gamma_ptr,
    grad_center_ptr,
    grad_mixed_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    grad_batch_mean_ptr,
    grad_batch_cov_ptr,
    channel,
    samples,
    groups,
    BW: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradients of γ, β and the batch's statistics, of one channel."""
    column = tl.arange(0, GP)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    bias = tl.zeros((ROWS,), dtype=tl.float32)
    center = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, GP), dtype=tl.float32)
    for first in range(0, samples, ROWS):
        sample = first + tl.arange(0, ROWS)
        inside = sample < samples
        index = sample.to(tl.int64) * groups * G + channel
        if grad_gamma_ptr is not None:
            weight += tl.load(grad_gamma_ptr + index, mask=inside, other=0.0)
            bias += tl.load(total_ptr + index, mask=inside, other=0.0)
        if grad_center_ptr is not None:
            center += tl.load(grad_center_ptr + index, mask=inside, other=0.0)
            rows = grad_mixed_ptr + index[:, None] * G + column[None, :]
            mixed += tl.load(rows, mask=inside[:, None] & (column < G)[None, :], other=0.0)
    if grad_gamma_ptr is not None:
        tl.store(grad_weight_ptr + channel, tl.sum(weight, axis=0))
        tl.store(grad_bias_ptr + channel, tl.sum(bias, axis=0))
    if grad_center_ptr is not None:
        omega_mean = _pick(omega, BW) + _pick(omega, BN)
        tl.store(grad_batch_mean_ptr + channel, omega_mean * tl.sum(center, axis=0))
        on_diagonal = tl.where(column == channel % G, 1.0, 0.0)
        grad_cov = _weigh(omega_cov, tl.sum(mixed, axis=0), on_diagonal, BW, BN)
        _store_vector(grad_batch_cov_ptr + channel.to(tl.int64) * G, grad_cov, G, GP)


@triton.jit
def _through_layer_moments(
    omega,
    omega_cov,
    mean_ptr,
    layer_ptr,
    inner_ptr,
    grad_mean_ptr,
    grad_cov_ptr,
    program,
    groups,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """Adds what goes through "ln" to the gradients of a sample's and group's mean and cov."""
    index = program.to(tl.int64)
    sample = index // groups
    inner = inner_ptr + sample * groups * 2 * SLOTS + LAST
    of_mean = tl.zeros((BLOCK,), dtype=tl.float32)
    of_variance = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, groups, BLOCK):
        group = first + tl.arange(0, BLOCK)
        of_mean += tl.load(inner + group * 2 * SLOTS, mask=group < groups, other=0.0)
        of_variance += tl.load(inner + (group * 2 + 1) * SLOTS, mask=group < groups, other=0.0)
    channels = groups * G
    to_mean = _pick(omega, LN) * tl.sum(of_mean, axis=0) / channels
    to_variance = _pick(omega_cov, LN) * tl.sum(of_variance, axis=0) / channels

    i = tl.arange(0, GP)
    offset = _load_vector(mean_ptr + index * G, G, GP) - tl.load(layer_ptr + 2 * sample)
    grad_mean = _load_vector(grad_mean_ptr + index * G, G, GP)
    grad_mean += to_mean + 2.0 * to_variance * offset
    _store_vector(grad_mean_ptr + index * G, grad_mean, G, GP)
    diagonal = grad_cov_ptr + index * G * G + i * (G + 1)
    tl.store(diagonal, tl.load(diagonal, mask=i < G, other=0.0) + to_variance, mask=i < G)


@triton.jit(do_not_specialize=["groups"])
def _input_coefficients_kernel(
    center_ptr,  # (N', g, G)
    mean_ptr,  # (N, g, G)
    grad_mean_ptr,  # (N, g, G)
    grad_cov_ptr,  # (N, g, G, G)
    batch_mean_ptr,  # (g, G)
    grad_batch_mean_ptr,  # (g, G)
    grad_batch_cov_ptr,  # (g, G, G)
    count_ptr,  # M, (), None if it is in batch_share
    matrix_ptr,  # (N', g, G, G)
    shift_ptr,  # (N', g, G)
    groups,
    sample_share,  # 1 / L
    batch_share,  # 1 / M
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """S and t of S (x - μ̂) + t, one sample and group in each program."""
    index = tl.program_id(0).to(tl.int64)
    group = index % groups
    center = _load_vector(center_ptr + index * G, G, GP)
    matrix = tl.zeros((GP, GP), dtype=tl.float32)
    shift = tl.zeros((GP,), dtype=tl.float32)
    if grad_mean_ptr is not None:
        more_matrix, more_shift = _coefficients(
            mean_ptr, grad_mean_ptr, grad_cov_ptr, center, sample_share, index, G, GP
        )
        matrix += more_matrix
        shift += more_shift
    if grad_batch_mean_ptr is not None:
        if count_ptr is not None:
            batch_share = 1.0 / tl.maximum(tl.load(count_ptr).to(tl.float32), 1.0)
        more_matrix, more_shift = _coefficients(
            batch_mean_ptr,
            grad_batch_mean_ptr,
            grad_batch_cov_ptr,
            center,
            batch_share,
            group,
            G,
            GP,
        )
        matrix += more_matrix
        shift += more_shift
    _store_matrix(matrix_ptr + index * G * G, matrix, G, GP)
    _store_vector(shift_ptr + index * G, shift, G, GP)


@triton.jit
def _coefficients(
    mean_ptr,
    grad_mean_ptr,
    grad_cov_ptr,
    center,
    share,
    index,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """The part of S and t that goes through one mean and covariance."""
    matrix = 2.0 * share * _load_matrix(grad_cov_ptr + index * G * G, G, 1, G, GP)
    offset = center - _load_vector(mean_ptr + index * G, G, GP)
    grad_mean = _load_vector(grad_mean_ptr + index * G, G, GP)
    return matrix, tl.sum(matrix * offset[None, :], axis=1) + share * grad_mean


@triton.jit(do_not_specialize=["channels"])
def _update_running_kernel(
    running_mean_ptr,  # (g, G, 1)
    running_cov_ptr,  # (g, G, G)
    mean_ptr,  # (g, G)
    cov_ptr,  # (g, G, G)
    count_ptr,  # (), None if it is known not to be 0
    channels,
    momentum,
    G: tl.constexpr,
):
    """Both running values at `BLOCK` places of their memory; there are fewer of the mean."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = channels
    if count_ptr is not None:
        size = tl.where(tl.load(count_ptr) > 0, channels, 0)
    _move_towards(running_mean_ptr + place, mean_ptr + place, momentum, place < size)
    _move_towards(running_cov_ptr + place, cov_ptr + place, momentum, place < size * G)


@triton.jit
def _move_towards(running_ptr, target_ptr, momentum, inside):
    """As `Tensor.lerp_` does, exact for momentum 0 and 1."""
    running = tl.load(running_ptr, mask=inside, other=0.0)
    target = tl.load(target_ptr, mask=inside, other=0.0)
    difference = target - running
    near_running = running + momentum * difference
    near_target = target - (1.0 - momentum) * difference
    tl.store(running_ptr, tl.where(momentum < 0.5, near_running, near_target), mask=inside)


# ---------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------


@lru_cache
def _layout(num_pergroup: int) -> dict[str, int]:
    """G and GP, and enough warps for a (GP, GP) tile."""
    padded = _padded(num_pergroup)
    return {"G": num_pergroup, "GP": padded, "num_warps": min(8, padded // 4)}


@lru_cache
def _row_layout(num_pergroup: int) -> dict[str, int]:
    """G and GP, and ROWS of GP values that make a tile for 4 warps."""
    padded = _padded(num_pergroup)
    return {"G": num_pergroup, "GP": padded, "ROWS": 2048 // padded, "num_warps": 4}


@lru_cache
def _positions(statistics: tuple[str, ...]) -> dict[str, int]:
    """K, and the index of every statistic in the set, -1 for those that are not in it."""
    positions = {name.upper(): -1 for name in STATISTICS}
    positions |= {name.upper(): k for k, name in enumerate(statistics)}
    return {"K": len(statistics), **positions}


def batch_moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Moments over all pixels from those of samples; see `moments.batch_moments`. One launch.

    Args:
        mean: (N, g, G), N >= 1.
        cov: (N, g, G, G).

    Returns:
        mean (g, G) and covariance (g, G, G).
    """
    samples, groups, num_pergroup = mean.shape
    batch_mean = mean.new_empty((groups, num_pergroup))
    batch_cov = mean.new_empty((groups, num_pergroup, num_pergroup))
    _launch(
        _batch_moments_kernel,
        groups * num_pergroup,
        mean,
        cov,
        batch_mean,
        batch_cov,
        samples,
        groups,
        **_row_layout(num_pergroup),
    )
    return batch_mean, batch_cov


def update_running(
    running_mean: Tensor,
    running_cov: Tensor,
    mean: Tensor,
    cov: Tensor,
    count: int | Tensor,
    momentum: float,
) -> None:
    """running ← (1 - momentum) running + momentum batch (Algorithm 1, lines 7 and 8). One launch.

    Args:
        running_mean, running_cov: (g, G, 1) and (g, G, G), changed in place.
        mean, cov: (g, G) and (g, G, G).
        count: pixels of the batch, an int or a tensor (); nothing changes if it is 0.
    """
    of_ranks = isinstance(count, Tensor)
    if not of_ranks and count == 0:
        return
    _launch(
        _update_running_kernel,
        triton.cdiv(cov.numel(), BLOCK.value),
        running_mean,
        running_cov,
        mean,
        cov,
        count if of_ranks else None,
        mean.numel(),
        momentum,
        G=cov.shape[-1],
        num_warps=4,
    )
    # For autograd, if it has kept the values from before for some other call.
    torch.autograd.graph.increment_version((running_mean, running_cov))


def whitening_transform(
    mean: Tensor | None,
    cov: Tensor | None,
    batch_mean: Tensor | None,
    batch_cov: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor | None,
    statistics: tuple[str, ...],
    eps: float,
    num_iterations: int,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Mix the statistics, and whiten with the mixture (Eqs. 5 and 6). One launch.

    Args:
        mean, cov: of each sample, (N, g, G) and (N, g, G, G).
        batch_mean, batch_cov: of the batch, (g, G) and (g, G, G).
        weight, bias: γ and β, (C,), both or none.
        mean_weight, var_weight: λ and λ', (K,); λ' is None if tied.
        statistics: the names of the set.
        eps: ε.
        num_iterations: T.

    Returns:
        μ̂ (N', g, G), A = γ ⊙ Σ̂^(-1/2) (N', g, G, G), β or zeros (N', g, G), and what the
        backward needs besides the arguments: with "ln" mean and variance of each sample, (N, 2).
        Σ̂ and its root are not kept, but computed again.
    """
    like = batch_mean[None] if mean is None else mean
    samples, groups, num_pergroup = like.shape
    center, shift = torch.empty_like(like), torch.empty_like(like)
    matrix = like.new_empty((samples, groups, num_pergroup, num_pergroup))
    layer = like.new_empty((samples, 2)) if "ln" in statistics else None
    _launch(
        _transform_kernel,
        samples * groups,
        mean_weight,
        var_weight,
        weight,
        bias,
        mean,
        cov,
        batch_mean,
        batch_cov,
        layer,
        center,
        matrix,
        shift,
        groups,
        eps,
        T=num_iterations,
        **_positions(statistics),
        **_layout(num_pergroup),
    )
    return center, matrix, shift, () if layer is None else (layer,)


def whitening_transform_backward(
    product: Tensor,
    total: Tensor,
    saved: tuple[Tensor, ...],
    mean: Tensor | None,
    cov: Tensor | None,
    batch_mean: Tensor | None,
    batch_cov: Tensor | None,
    weight: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor | None,
    statistics: tuple[str, ...],
    eps: float,
    num_iterations: int,
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...], Tensor]:
    """The gradients of the loss through the transform's center, matrix and shift. Two launches.

    Args:
        product: D = Σ dy (x - μ̂)ᵀ over the pixels of each sample, (N, g, G, G).
        total: s = Σ dy, (N, g, G).
        saved: by `whitening_transform`; the other arguments are those that it had.

    Returns:
        The gradients of weight, bias, mean_weight and var_weight, those of mean, cov, batch_mean
        and batch_cov, each None where its tensor is None, and A (N', g, G, G).
    """
    if mean is None and product.shape[0] != 1:  # the same transform for all samples
        product, total = product.sum(dim=0, keepdim=True), total.sum(dim=0, keepdim=True)
    samples, groups, num_pergroup = total.shape
    channels, matrices = groups * num_pergroup, samples * groups
    (layer,) = saved or (None,)
    layout, positions = _layout(num_pergroup), _positions(statistics)
    padded = layout["GP"]
    of_batch = not OF_BATCH.isdisjoint(statistics)

    def like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty_like(tensor)

    matrix = torch.empty_like(product)
    inner = total.new_empty((matrices, 2, SLOTS.value))
    iterates = total.new_empty((matrices, num_iterations - 1, 2, padded, padded))
    grad_gamma = None if weight is None else torch.empty_like(total)
    grad_center = torch.empty_like(total) if of_batch else None
    grad_mixed = torch.empty_like(product) if of_batch else None
    grad_mean, grad_cov = like(mean), like(cov)
    _launch(
        _transform_backward_kernel,
        matrices,
        product,
        total,
        mean_weight,
        var_weight,
        weight,
        mean,
        cov,
        batch_mean,
        batch_cov,
        layer,
        matrix,
        grad_gamma,
        grad_center,
        grad_mixed,
        grad_mean,
        grad_cov,
        inner,
        iterates,
        groups,
        eps,
        T=num_iterations,
        **positions,
        **layout,
    )
    grad_weight, grad_bias = like(weight), like(weight)
    grad_mean_weight, grad_var_weight = like(mean_weight), like(var_weight)
    grad_batch_mean, grad_batch_cov = like(batch_mean), like(batch_cov)
    channel_programs = channels if of_batch or weight is not None else 0
    _launch(
        _reduce_gradients_kernel,
        1 + channel_programs + (0 if layer is None else matrices),
        mean_weight,
        var_weight,
        total,
        mean,
        layer,
        grad_gamma,
        grad_center,
        grad_mixed,
        inner,
        grad_weight,
        grad_bias,
        grad_mean_weight,
        grad_var_weight,
        grad_mean,
        grad_cov,
        grad_batch_mean,
        grad_batch_cov,
        samples,
        groups,
        channel_programs,
        **positions,
        **_row_layout(num_pergroup),
    )
    return (
        (grad_weight, grad_bias, grad_mean_weight, grad_var_weight),
        (grad_mean, grad_cov, grad_batch_mean, grad_batch_cov),
        matrix,
    )


def input_coefficients(
    grad_mean: Tensor | None,
    grad_cov: Tensor | None,
    grad_batch_mean: Tensor | None,
    grad_batch_cov: Tensor | None,
    mean: Tensor | None,
    batch_mean: Tensor | None,
    center: Tensor,
    length: int,
    count: int | Tensor | None,
) -> tuple[Tensor | None, Tensor]:
    """S and t of the part of dx that goes through the statistics, S (x - μ̂) + t. One launch.

    Args:
        grad_mean, grad_cov: of the samples' statistics, (N, g, G) and (N, g, G, G).
        grad_batch_mean, grad_batch_cov: of the batch's, (g, G) and (g, G, G); None if those are
            constants.
        mean, batch_mean: (N, g, G) and (g, G).
        center: μ̂, (N', g, G).
        length: L.
        count: M, an int or a tensor (); None if the batch's statistics have no gradient.

    Returns:
        S (N', g, G, G), None if it is zero, and t (N', g, G).
    """
    if grad_mean is None and grad_batch_mean is None:
        return None, torch.zeros_like(center)
    samples, groups, num_pergroup = center.shape
    matrix = center.new_empty((samples, groups, num_pergroup, num_pergroup))
    shift = torch.empty_like(center)
    of_ranks = isinstance(count, Tensor)
    _launch(
        _input_coefficients_kernel,
        samples * groups,
        center,
        mean,
        grad_mean,
        grad_cov,
        batch_mean,
        grad_batch_mean,
        grad_batch_cov,
        count if of_ranks else None,
        matrix,
        shift,
        groups,
        1 / length,
        0.0 if of_ranks or count is None else 1 / max(count, 1),
        **_layout(num_pergroup),
    )
    return matrix, shift
