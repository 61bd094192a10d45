"""Last launch of a backward pass: dx = Aᵀ dy + S (x - μ̂) + t."""

import torch
from torch import Tensor

from ..mixing import Statistics
from ..options import Options, Parameters
from .common import (
    BLOCK,
    identity_matrix,
    launch,
    load_matrix,
    load_tile,
    load_vector,
    locate,
    mapping_plan,
    multiply,
    padded,
    store_tile,
    times,
    tl,
    triton,
)
from .mixture import LAST, SLOTS, omegas, pick, positions, weigh
from .whiten_backward import TransformGradients


@triton.jit
def _sum_slot(pointer, groups):
    """The sum of a slot over the groups of a sample."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, groups, BLOCK):
        group = first + tl.arange(0, BLOCK)
        total += tl.load(pointer + group * 2 * SLOTS, mask=group < groups, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["groups", "chunks"])
def _input_gradient_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    mean_weight_ptr,  # (K,)
    var_weight_ptr,  # (K,), None if tied
    matrix_ptr,  # A, (N', g, G, G)
    center_ptr,  # μ̂, (N', g, G)
    mean_ptr,  # (N, g, G), None if nothing depends on the sample
    batch_mean_ptr,  # (g, G)
    grad_center_ptr,  # (N', g, G)
    grad_mixed_ptr,  # (N', g, G, G)
    inner_ptr,  # (N', g, 2, SLOTS)
    layer_ptr,  # (N, 2), None without "ln"
    grad_batch_mean_ptr,  # (g, G), None if the batch's statistics are constants
    grad_batch_cov_ptr,  # (g, G, G), likewise
    count_ptr,  # M, (1,), None if it is in batch_share
    groups,
    chunks,
    chunk_length,
    length,
    dy_stride_sample,
    dy_stride_channel,
    dy_stride_pixel,
    x_stride_sample,
    x_stride_channel,
    x_stride_pixel,
    dx_stride_sample,
    dx_stride_channel,
    dx_stride_pixel,
    sample_share,  # 1 / L
    batch_share,  # 1 / M
    K: tl.constexpr,
    BW: tl.constexpr,
    IW: tl.constexpr,
    BN: tl.constexpr,
    IN: tl.constexpr,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A mean's gradient reaches each of its pixels in equal shares, and a covariance's as
    2/L dΣ (x - μ). Every program makes S and t of this for its pixels."""
    sample, group, chunk = locate(groups, chunks)
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)
    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    dy_rows = dy_ptr + sample * dy_stride_sample + (group * G + channel) * dy_stride_channel
    x_rows = x_ptr + sample * x_stride_sample + (group * G + channel) * x_stride_channel
    dx_rows = dx_ptr + sample * dx_stride_sample + (group * G + channel) * dx_stride_channel

    index = sample * groups + group
    shared = group  # where all samples have the same transform
    if mean_ptr is not None:
        shared = index
    dy_matrix = tl.trans(load_matrix(matrix_ptr + shared * G * G, G, GP))
    center = load_vector(center_ptr + shared * G, G, GP)
    x_matrix = tl.zeros((GP, GP), dtype=tl.float32)
    bias = tl.zeros((GP,), dtype=tl.float32)
    if mean_ptr is not None:
        omega, omega_cov = omegas(mean_weight_ptr, var_weight_ptr, K)
        identity = identity_matrix(G, GP)
        mean = load_vector(mean_ptr + index * G, G, GP)
        grad_mean = (pick(omega, IW) + pick(omega, IN)) * load_vector(
            grad_center_ptr + index * G, G, GP
        )
        grad_cov = load_matrix(grad_mixed_ptr + index * G * G, G, GP)
        grad_cov = weigh(omega_cov, grad_cov, identity, IW, IN)
        if layer_ptr is not None:
            channels = groups * G
            sums = inner_ptr + sample * groups * 2 * SLOTS + LAST
            to_mean = pick(omega, LN) * _sum_slot(sums, groups) / channels
            to_variance = pick(omega_cov, LN) * _sum_slot(sums + SLOTS, groups) / channels
            offset = mean - tl.load(layer_ptr + 2 * sample)
            grad_mean += to_mean + 2.0 * to_variance * offset
            grad_cov += to_variance * identity
        x_matrix = 2.0 * sample_share * grad_cov
        bias = times(x_matrix, center - mean) + sample_share * grad_mean
    if grad_batch_mean_ptr is not None:
        if count_ptr is not None:
            batch_share = 1.0 / tl.maximum(tl.load(count_ptr), 1.0)
        grad_cov = load_matrix(grad_batch_cov_ptr + group * G * G, G, GP)
        more = 2.0 * batch_share * grad_cov
        offset = center - load_vector(batch_mean_ptr + group * G, G, GP)
        grad_mean = load_vector(grad_batch_mean_ptr + group * G, G, GP)
        x_matrix += more
        bias += times(more, offset) + batch_share * grad_mean

    centred = x_ptr.dtype.element_ty == tl.float32
    if not centred:
        bias -= times(x_matrix, center)  # as in `whiten`
    for start in range(begin, end, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        inside = in_group & (pixel < end)[None, :]
        dy = load_tile(dy_rows, pixel, dy_stride_pixel, inside)
        dx = multiply(dy_matrix, dy, tl.zeros((GP, BLOCK), dtype=tl.float32))
        if (mean_ptr is not None) or (grad_batch_mean_ptr is not None):
            x = load_tile(x_rows, pixel, x_stride_pixel, inside)
            if centred:
                x -= center[:, None]
            dx = multiply(x_matrix, x, dx) + bias[:, None]
        store_tile(dx_rows, pixel, dx_stride_pixel, inside, dx)


def input_gradient(
    dy: Tensor,
    x: Tensor,
    center: Tensor,
    gradients: TransformGradients,
    of_batch: Tensor | None,
    statistics: Statistics,
    layer: Tensor | None,
    count: int | Tensor | None,
    parameters: Parameters,
    options: Options,
) -> Tensor:
    """dx (N, C, H, W), in the dtype and the memory format of x.

    Args:
        dy: (N, C, H, W), float32, bfloat16 or float16; its strides may differ from those of x.
        x: (N, C, H, W), as dy, contiguous or channels_last.
        center: μ̂, (N', g, G).
        gradients: by `whiten_backward`.
        of_batch: by `sum_gradients`, of all ranks.
        statistics, layer: by `whiten`.
        count: M, a number or a tensor (1,).
    """
    dx = torch.empty_like(x)
    dy_pixels, pixels = dy.flatten(2), x.flatten(2)
    n, channels, length = pixels.shape
    dx_pixels = dx.view(pixels.shape)
    groups, num_pergroup = center.shape[1:]
    side = padded(num_pergroup)
    block, chunk_length, chunks = mapping_plan(length, n * groups, side)
    of_ranks = isinstance(count, Tensor)
    launch(
        _input_gradient_kernel,
        n * groups * chunks,
        dy_pixels,
        pixels,
        dx_pixels,
        parameters.mean_weight,
        parameters.var_weight,
        gradients.matrix,
        center,
        statistics.mean,
        statistics.batch_mean,
        gradients.center,
        gradients.mixed,
        gradients.inner,
        layer,
        None if of_batch is None else of_batch[:channels],
        None if of_batch is None else of_batch[channels:],
        count if of_ranks else None,
        groups,
        chunks,
        chunk_length,
        length,
        *dy_pixels.stride(),
        *pixels.stride(),
        *dx_pixels.stride(),
        1.0 / length,
        0.0 if of_ranks or count is None else 1.0 / count,
        **positions(options.statistics),
        G=num_pergroup,
        GP=side,
        BLOCK=block,
        num_warps=4,
    )
    return dx
