"""Last launch of a forward pass: y = A (x - μ̂) + β."""

import torch
from torch import Tensor

from ..mixing import Statistics
from ..options import Options, Parameters, Running
from .common import (
    identity_matrix,
    launch,
    load_matrix,
    load_tile,
    load_vector,
    locate,
    mapping_plan,
    multiply,
    newton,
    padded,
    store_matrix,
    store_tile,
    store_vector,
    sum_matrix,
    times,
    tl,
    triton,
)
from .mixture import layer_moments, mix, omegas, positions, sample_moments
from .running import all_finite, bump_versions, move_matrix, move_vector


@triton.jit(do_not_specialize=["groups", "chunks", "moment_chunks", "moment_length"])
def _whiten_kernel(
    x_ptr,
    y_ptr,
    mean_weight_ptr,  # (K,)
    var_weight_ptr,  # (K,), None if tied
    weight_ptr,  # (C,), None if there is no γ and β
    bias_ptr,  # (C,), likewise
    mean_ptr,  # (N, g, moment_chunks, G), None if nothing depends on the sample
    cov_ptr,  # (N, g, moment_chunks, G, G), likewise
    batch_mean_ptr,  # (g, G), None if nothing depends on the batch
    batch_cov_ptr,  # (g, G, G), likewise
    running_mean_ptr,  # (g, G, 1), None if they are not to be moved here
    running_cov_ptr,  # (g, G, G), likewise
    center_ptr,  # (N', g, G)
    sample_mean_ptr,  # (N, g, G), None if there is only one moment_chunk
    sample_cov_ptr,  # (N, g, G, G), likewise
    layer_ptr,  # (N, 2), None without "ln"
    groups,
    chunks,
    chunk_length,
    length,
    moment_chunks,
    moment_length,
    x_stride_sample,
    x_stride_channel,
    x_stride_pixel,
    y_stride_sample,
    y_stride_channel,
    y_stride_pixel,
    eps,
    momentum,
    T: tl.constexpr,
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
    """Every program mixes its statistics and whitens its pixels with them.

    To do so again for every chunk costs less than a launch of its own. What the backward needs is
    stored by the programs of first chunks.
    """
    sample, group, chunk = locate(groups, chunks)
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)
    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    x_rows = x_ptr + sample * x_stride_sample + (group * G + channel) * x_stride_channel
    y_rows = y_ptr + sample * y_stride_sample + (group * G + channel) * y_stride_channel
    # The first pixels are on their way while the matrix is made.
    pixel = begin + tl.arange(0, BLOCK)
    x = load_tile(x_rows, pixel, x_stride_pixel, in_group & (pixel < end)[None, :])

    index = sample * groups + group
    mean = None
    cov = None
    batch_mean = None
    batch_cov = None
    layer_mean = 0.0
    layer_variance = 0.0
    if batch_mean_ptr is not None:
        batch_mean = load_vector(batch_mean_ptr + group * G, G, GP)
        batch_cov = load_matrix(batch_cov_ptr + group * G * G, G, GP)
    if mean_ptr is not None:
        mean, cov = sample_moments(
            mean_ptr, cov_ptr, index, moment_chunks, moment_length, length, G, GP
        )
    if layer_ptr is not None:
        layer_mean, layer_variance = layer_moments(
            mean_ptr, cov_ptr, sample, groups, moment_chunks, moment_length, length, G
        )
    omega, omega_cov = omegas(mean_weight_ptr, var_weight_ptr, K)
    center, mixed = mix(
        omega,
        omega_cov,
        mean,
        cov,
        batch_mean,
        batch_cov,
        layer_mean,
        layer_variance,
        eps,
        BW,
        IW,
        BN,
        IN,
        LN,
        G,
        GP,
    )
    identity = identity_matrix(G, GP)
    trace = sum_matrix(mixed * identity)
    matrix = newton(mixed / trace, identity, None, T, GP * GP) / tl.sqrt(trace)
    bias = tl.zeros((GP,), dtype=tl.float32)
    if weight_ptr is not None:
        matrix *= load_vector(weight_ptr + group * G, G, GP)[:, None]
        bias = load_vector(bias_ptr + group * G, G, GP)

    if chunk == 0:
        if mean_ptr is not None:
            store_vector(center_ptr + index * G, center, G, GP)
        else:
            if sample == 0:
                store_vector(center_ptr + group * G, center, G, GP)
        if sample_mean_ptr is not None:
            store_vector(sample_mean_ptr + index * G, mean, G, GP)
            store_matrix(sample_cov_ptr + index * G * G, cov, G, GP)
        if layer_ptr is not None:  # noqa: SIM102
            if group == 0:
                tl.store(layer_ptr + 2 * sample, layer_mean)
                tl.store(layer_ptr + 2 * sample + 1, layer_variance)
        if running_mean_ptr is not None:  # noqa: SIM102
            if sample == 0:
                finite = all_finite(batch_cov_ptr, groups * G, G)
                move_vector(running_mean_ptr + group * G, batch_mean, momentum, finite, G, GP)
                move_matrix(running_cov_ptr + group * G * G, batch_cov, momentum, finite, G, GP)

    centred = x_ptr.dtype.element_ty == tl.float32
    if not centred:
        # 16-bit values are exact without being centred: what cancellation there is in float32 is
        # far below the rounding of x.
        bias -= times(matrix, center)
    for start in range(begin, end, BLOCK):
        if centred:
            x -= center[:, None]
        y = multiply(matrix, x, tl.zeros((GP, BLOCK), dtype=tl.float32)) + bias[:, None]
        pixel = start + tl.arange(0, BLOCK)
        store_tile(y_rows, pixel, y_stride_pixel, in_group & (pixel < end)[None, :], y)
        pixel += BLOCK
        x = load_tile(x_rows, pixel, x_stride_pixel, in_group & (pixel < end)[None, :])


def whiten(
    x: Tensor,
    statistics: Statistics,
    moment_length: int,
    parameters: Parameters,
    running: Running | None,
    options: Options,
) -> tuple[Tensor, Statistics, Tensor, Tensor | None]:
    """Whiten with the mixture of statistics (Eqs. 5 and 6).

    Args:
        x: (N, C, H, W), N >= 1, contiguous or channels_last.
        statistics: mean (N, g, chunks, G) and covariance (N, g, chunks, G, G) of chunks of the
            samples, mean (g, G) and covariance (g, G, G) of the batch; None those that the set does
            not need.
        moment_length: pixels of those chunks.
        running: to be moved towards the batch's statistics, or None.

    Returns:
        y, the statistics with those of whole samples (N, g, G) and (N, g, G, G), μ̂ (N', g, G), and
        with "ln" the mean and variance of each sample (N, 2).
    """
    y = torch.empty_like(x)
    pixels = x.flatten(2)
    y_pixels = y.view(pixels.shape)
    n, channels, length = pixels.shape
    num_pergroup = options.num_pergroup
    groups, side = channels // num_pergroup, padded(num_pergroup)
    block, chunk_length, chunks = mapping_plan(length, n * groups, side)

    def empty(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    center = empty(n if options.of_sample else 1, groups, num_pergroup)
    layer = empty(n, 2) if "ln" in options.statistics else None
    moment_chunks = 1 if statistics.mean is None else statistics.mean.shape[2]
    of_samples = (None, None)
    if moment_chunks > 1:
        of_samples = empty(n, groups, num_pergroup), empty(n, groups, num_pergroup, num_pergroup)
    launch(
        _whiten_kernel,
        n * groups * chunks,
        pixels,
        y_pixels,
        parameters.mean_weight,
        parameters.var_weight,
        parameters.weight,
        parameters.bias,
        *statistics,
        *(running or (None, None)),
        center,
        *of_samples,
        layer,
        groups,
        chunks,
        chunk_length,
        length,
        moment_chunks,
        moment_length,
        *pixels.stride(),
        *y_pixels.stride(),
        options.eps,
        options.momentum,
        T=options.num_iterations,
        **positions(options.statistics),
        G=num_pergroup,
        GP=side,
        BLOCK=block,
        num_warps=4,
    )
    if running is not None:
        bump_versions(running)
    if statistics.mean is not None and moment_chunks == 1:
        of_samples = statistics.mean.squeeze(2), statistics.cov.squeeze(2)
    return y, Statistics(*of_samples, *statistics[2:]), center, layer
