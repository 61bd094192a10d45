"""Third launch of a backward pass: sums of gradients over samples and groups."""

from ..options import Options
from .common import OF_USERS, Map, store_vector, tl, triton
from .launch import Launch
from .mixture import SLOTS, omegas, pick, positions, weigh


@triton.jit
def _softmax_backward(omega, grad):
    return omega * (grad - tl.sum(omega * grad, axis=0))


@triton.jit
def _sum_importance(
    omega,
    omega_cov,
    inner_ptr,
    grad_mean_weight_ptr,
    grad_var_weight_ptr,
    matrices,
    K: tl.constexpr,
):
    """The gradients of the importance weights."""
    ROWS: tl.constexpr = 512
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
def _sum_samples(
    omega,
    omega_cov,
    of_weight_ptr,
    of_bias_ptr,
    of_center_ptr,
    of_mixed_ptr,
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
        if of_weight_ptr is not None:
            weight += tl.load(of_weight_ptr + index, mask=inside, other=0.0)
            bias += tl.load(of_bias_ptr + index, mask=inside, other=0.0)
        if grad_batch_mean_ptr is not None:
            center += tl.load(of_center_ptr + index, mask=inside, other=0.0)
            rows = of_mixed_ptr + index[:, None] * G + column[None, :]
            mixed += tl.load(rows, mask=inside[:, None] & (column < G)[None, :], other=0.0)
    if of_weight_ptr is not None:
        tl.store(grad_weight_ptr + channel, tl.sum(weight, axis=0))
        tl.store(grad_bias_ptr + channel, tl.sum(bias, axis=0))
    if grad_batch_mean_ptr is not None:
        omega_mean = pick(omega, BW) + pick(omega, BN)
        tl.store(grad_batch_mean_ptr + channel, omega_mean * tl.sum(center, axis=0))
        on_diagonal = tl.where(column == channel % G, 1.0, 0.0)
        grad_cov = weigh(omega_cov, tl.sum(mixed, axis=0), on_diagonal, BW, BN)
        store_vector(grad_batch_cov_ptr + channel.to(tl.int64) * G, grad_cov, G, GP)


@triton.jit(do_not_specialize=["samples", "groups"], do_not_specialize_on_alignment=OF_USERS)
def _sum_gradients_kernel(
    mean_weight_ptr,  # (K,)
    var_weight_ptr,  # (K,), None if tied
    of_weight_ptr,  # (N', g, G), None if there is no γ and β
    of_bias_ptr,  # (N', g, G)
    of_center_ptr,  # (N', g, G)
    of_mixed_ptr,  # (N', g, G, G)
    inner_ptr,  # (N', g, 2, SLOTS)
    grad_weight_ptr,  # (C,)
    grad_bias_ptr,  # (C,)
    grad_mean_weight_ptr,  # (K,)
    grad_var_weight_ptr,  # (K,)
    grad_batch_mean_ptr,  # (g, G), None if the batch's statistics are constants
    grad_batch_cov_ptr,  # (g, G, G), likewise
    samples,
    groups,
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
    """The first program takes the importance weights, each other one a channel."""
    program = tl.program_id(0)
    omega, omega_cov = omegas(mean_weight_ptr, var_weight_ptr, K)
    if program == 0:
        _sum_importance(
            omega,
            omega_cov,
            inner_ptr,
            grad_mean_weight_ptr,
            grad_var_weight_ptr,
            samples * groups,
            K,
        )
    else:
        _sum_samples(
            omega,
            omega_cov,
            of_weight_ptr,
            of_bias_ptr,
            of_center_ptr,
            of_mixed_ptr,
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


def sum_gradients(map: Map, samples: int, options: Options) -> Launch:
    """The gradients of the parameters and of the batch's moments, from those of N' samples."""
    return Launch(
        _sum_gradients_kernel,
        1 + map.channels,
        samples,
        map.groups,
        **positions(options.statistics),
        **map.rows,
    )
