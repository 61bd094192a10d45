"""Last launch of a forward pass: y = A (x - μ̂) + β."""

from ..options import Options
from .common import (
    OF_USERS,
    Map,
    identity_matrix,
    load_matrix,
    load_tile,
    load_vector,
    locate,
    mapping_chunks,
    multiply,
    store_matrix,
    store_tile,
    store_vector,
    sum_matrix,
    times,
    tl,
    triton,
)
from .launch import Launch
from .mixture import CHUNKS_IN_PLACE, layer_moments, mix, omegas, positions, sample_moments
from .newton import newton
from .running import all_finite, move_matrix, move_vector


@triton.jit(
    do_not_specialize=["groups", "chunks", "moment_chunks", "moment_length"],
    do_not_specialize_on_alignment=OF_USERS,
)
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
    extent_ptr,  # (N, 2), None if all pixels count
    groups,
    chunks,
    chunk_length,
    length,
    moment_chunks,
    moment_length,
    stride_sample,
    stride_channel,
    stride_pixel,
    width,
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
    rows = sample * stride_sample + (group * G + channel) * stride_channel
    # The first pixels are on their way while the matrix is made.
    pixel = begin + tl.arange(0, BLOCK)
    x = load_tile(x_ptr + rows, pixel, stride_pixel, in_group & (pixel < end)[None, :])

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
            mean_ptr,
            cov_ptr,
            index,
            moment_chunks,
            moment_length,
            length,
            extent_ptr,
            sample,
            width,
            G,
            GP,
        )
    if layer_ptr is not None:
        layer_mean, layer_variance = layer_moments(
            mean_ptr,
            cov_ptr,
            sample,
            groups,
            moment_chunks,
            moment_length,
            length,
            extent_ptr,
            width,
            G,
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
                if extent_ptr is not None:  # and there may be no pixel
                    finite &= tl.load(batch_cov_ptr + groups * G * G) > 0
                move_vector(running_mean_ptr + group * G, batch_mean, momentum, finite, G, GP)
                move_matrix(running_cov_ptr + group * G * G, batch_cov, momentum, finite, G, GP)

    if x_ptr.dtype.element_ty != tl.float32:
        # 16-bit values are exact without being centred: what cancellation there is in float32 is
        # far below the rounding of x.
        bias -= times(matrix, center)
    for start in range(begin, end, BLOCK):
        if x_ptr.dtype.element_ty == tl.float32:
            x -= center[:, None]
        y = multiply(matrix, x, tl.zeros((GP, BLOCK), dtype=tl.float32)) + bias[:, None]
        pixel = start + tl.arange(0, BLOCK)
        store_tile(y_ptr + rows, pixel, stride_pixel, in_group & (pixel < end)[None, :], y)
        pixel += BLOCK
        x = load_tile(x_ptr + rows, pixel, stride_pixel, in_group & (pixel < end)[None, :])


def whiten(map: Map, moment_chunks: int, moment_length: int, options: Options) -> Launch:
    """Whiten with the mixture of statistics (Eqs. 5 and 6); y has the strides of x.

    Args:
        moment_chunks: of a sample, whose moments are given.
        moment_length: pixels of those chunks.

    Raises:
        ValueError: there are more than CHUNKS_IN_PLACE chunks.
    """
    if moment_chunks > CHUNKS_IN_PLACE.value:
        raise ValueError(f"{moment_chunks} chunks are more than a program puts together")
    chunks = mapping_chunks(map)
    return Launch(
        _whiten_kernel,
        map.samples * map.groups * chunks.number,
        map.groups,
        chunks.number,
        chunks.length,
        map.length,
        moment_chunks,
        moment_length,
        *map.strides,
        map.width,
        float(options.eps),
        float(options.momentum),
        T=options.num_iterations,
        **positions(options.statistics),
        **map.tile,
        BLOCK=chunks.block,
    )
