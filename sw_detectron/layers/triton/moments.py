"""First launch of a forward pass: moments of chunks of pixels."""

from .common import EXACT_PRODUCT, Chunks, Map, load_tile, locate, split, store_matrix, tl, triton
from .launch import Launch


@triton.jit(do_not_specialize=["groups", "chunks"])
def _moments_kernel(
    x_ptr,
    mean_ptr,  # (N, g, chunks, G)
    cov_ptr,  # (N, g, chunks, G, G)
    groups,
    chunks,
    chunk_length,
    length,
    stride_sample,
    stride_channel,
    stride_pixel,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean and covariance of each chunk, relative to a provisional mean, that of its first tile.

    Deviations from it are small even if the mean is large, so that sums of their products keep
    their digits; the exact mean then comes as a small correction.
    """
    sample, group, chunk = locate(groups, chunks)
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)

    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    rows = x_ptr + sample * stride_sample + (group * G + channel) * stride_channel
    pixel = begin + tl.arange(0, BLOCK)
    tile = load_tile(rows, pixel, stride_pixel, in_group & (pixel < end)[None, :])
    # The padding of the tile is zero, and counts in the sum only.
    shift = tl.sum(tile.to(tl.float32), axis=1) / tl.minimum(end - begin, BLOCK).to(tl.float32)

    total = tl.zeros((GP,), dtype=tl.float32)
    scatter = tl.zeros((GP, GP), dtype=tl.float32)
    mixed = tl.zeros((GP, GP), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        deviation = tile.to(tl.float32) - shift[:, None]
        deviation = tl.where((pixel < end)[None, :], deviation, 0.0)
        # The next tile is on its way while this one is multiplied. After the last one the mask
        # is empty and nothing is read.
        pixel += BLOCK
        tile = load_tile(rows, pixel, stride_pixel, in_group & (pixel < end)[None, :])
        total += tl.sum(deviation, axis=1)
        # deviation deviation^T = high high^T + high low^T + (high low^T)^T + negligible.
        high, low = split(deviation)
        scatter = tl.dot(high, tl.trans(high), scatter, input_precision=EXACT_PRODUCT)
        mixed = tl.dot(high, tl.trans(low), mixed, input_precision=EXACT_PRODUCT)

    scatter += mixed + tl.trans(mixed)
    count = (end - begin).to(tl.float32)
    offset = total / count
    cov = scatter / count - offset[:, None] * offset[None, :]
    # Rounding must not make the variance of a constant channel negative.
    diagonal = channel[:, None] == channel[None, :]
    cov = tl.where(diagonal & (cov < 0.0), 0.0, cov)

    part = (sample * groups + group) * chunks + chunk
    tl.store(mean_ptr + part * G + channel, shift + offset, mask=channel < G)
    store_matrix(cov_ptr + part * G * G, cov, G, GP)


def moments(map: Map, chunks: Chunks) -> Launch:
    """Biased mean and covariance of chunks of each sample and group, from one reading of x."""
    return Launch(
        _moments_kernel,
        map.samples * map.groups * chunks.number,
        map.groups,
        chunks.number,
        chunks.length,
        map.length,
        *map.strides,
        G=map.num_pergroup,
        GP=map.side,
        BLOCK=chunks.block,
        # The (GP, GP) sum has GP / 16 warps' worth of tensor core tiles: more warps would compute
        # the same tiles again.
        num_warps=map.side // 16,
    )
