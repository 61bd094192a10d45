"""First launch of a forward pass: moments of chunks of pixels."""

import torch
from torch import Tensor

from .common import (
    chunking,
    launch,
    load_tile,
    locate,
    padded,
    split,
    store_matrix,
    tile_length,
    tl,
    triton,
)

# So many chunks of a sample can be put together where they are read: see `mixture.sample_moments`.
CHUNKS_IN_PLACE = 16


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
        scatter = tl.dot(high, tl.trans(high), scatter, input_precision="tf32")
        mixed = tl.dot(high, tl.trans(low), mixed, input_precision="tf32")

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


def moments(x: Tensor, num_pergroup: int, most_chunks: int) -> tuple[Tensor, Tensor, int]:
    """Biased mean and covariance of chunks of each sample and group, from one reading of x.

    Args:
        x: (N, C, H, W), float32, bfloat16 or float16, contiguous or channels_last.
        num_pergroup: G.
        most_chunks: of a sample.

    Returns:
        mean (N, g, chunks, G), covariance (N, g, chunks, G, G), float32, and the pixels of a chunk;
        the last one has what remains.
    """
    pixels = x.flatten(2)
    n, channels, length = pixels.shape
    groups, side = channels // num_pergroup, padded(num_pergroup)
    block, chunk_length, chunks = summing_plan(length, n * groups, side, most_chunks)
    mean = x.new_empty((n, groups, chunks, num_pergroup), dtype=torch.float32)
    cov = x.new_empty((*mean.shape, num_pergroup), dtype=torch.float32)
    launch(
        _moments_kernel,
        n * groups * chunks,
        pixels,
        mean,
        cov,
        groups,
        chunks,
        chunk_length,
        length,
        *pixels.stride(),
        G=num_pergroup,
        GP=side,
        BLOCK=block,
        num_warps=side // 16,
    )
    return mean, cov, chunk_length


def summing_plan(length: int, matrices: int, side: int, most_chunks: int) -> tuple[int, int, int]:
    """(BLOCK, chunk length, chunks) of a kernel that sums over pixels.

    The (GP, GP) sum has GP / 16 warps' worth of tensor core tiles: more warps would compute the
    same tiles again. A chunk is 16 GP pixels at least, so that its sum, 4 GP^2 bytes, is small
    beside its pixels, 32 GP^2 bytes in a 16-bit dtype.
    """
    block = tile_length(length, 64)
    shortest = max(16 * side, triton.cdiv(length, most_chunks))
    return block, *chunking(length, matrices, block, shortest, max(shortest, length))
