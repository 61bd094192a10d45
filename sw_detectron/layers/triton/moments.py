"""First launch of a forward pass: moments of chunks of pixels."""

from .common import EXACT_PRODUCT, Chunks, Map, load_tile, locate, split, store_matrix, tl, triton
from .extent import chunk_count, counts
from .launch import Launch


@triton.jit(do_not_specialize=["groups", "chunks"])
def _moments_kernel(
    x_ptr,
    mean_ptr,  # (N, g, chunks, G)
    cov_ptr,  # (N, g, chunks, G, G)
    extent_ptr,  # (N, 2), None if all pixels count
    groups,
    chunks,
    chunk_length,
    length,
    stride_sample,
    stride_channel,
    stride_pixel,
    width,
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
    inside = pixel < end
    first = tl.minimum(end - begin, BLOCK).to(tl.float32)
    count = (end - begin).to(tl.float32)
    if extent_ptr is not None:
        inside &= counts(extent_ptr, sample, pixel, width)
        first = tl.maximum(tl.sum(inside.to(tl.float32), axis=0), 1.0)
        count = chunk_count(chunk, chunk_length, length, extent_ptr, sample, width)
        count = tl.maximum(count, 1.0)
    tile = load_tile(rows, pixel, stride_pixel, in_group & inside[None, :])
    # The padding of the tile is zero, and counts in the sum only.
    shift = tl.sum(tile.to(tl.float32), axis=1) / first

    total = tl.zeros((GP, BLOCK), dtype=tl.float32)
    scatter = tl.zeros((GP, GP), dtype=tl.float32)
    mixed = tl.zeros((GP, GP), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        deviation = tile.to(tl.float32) - shift[:, None]
        deviation = tl.where(inside[None, :], deviation, 0.0)
        # The next tile is on its way while this one is multiplied. After the last one the mask
        # is empty and nothing is read.
        pixel = start + BLOCK + tl.arange(0, BLOCK)
        inside = pixel < end
        if extent_ptr is not None:
            inside &= counts(extent_ptr, sample, pixel, width)
        tile = load_tile(rows, pixel, stride_pixel, in_group & inside[None, :])
        total += deviation
        # deviation deviation^T = high high^T + high low^T + (high low^T)^T + negligible.
        high, low = split(deviation)
        scatter = tl.dot(high, tl.trans(high), scatter, input_precision=EXACT_PRODUCT)
        mixed = tl.dot(high, tl.trans(low), mixed, input_precision=EXACT_PRODUCT)

    scatter += mixed + tl.trans(mixed)
    offset = tl.sum(total, axis=1) / count
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
        map.width,
        **map.tile,
        BLOCK=chunks.block,
    )
