"""First launch of a backward pass: Σ dy (x - μ̂)ᵀ and Σ dy over parts of the pixels."""

from typing import NamedTuple

from .common import (
    Chunks,
    Map,
    load_tile,
    load_vector,
    multiply,
    store_matrix,
    store_vector,
    summing_chunks,
    tl,
    triton,
)
from .launch import Launch

# Parts of a matrix' sum, which the next launch adds up in one program: few where there are many
# samples, each with its own sum, and more where all samples have one.
PARTS_OF_SAMPLE, PARTS_OF_BATCH = 64, 128


class Parts(NamedTuple):
    """How a sum over pixels is divided.

    Attributes:
        of_sample: whether every sample has its own sum.
        strips: N of those samples, or into how many strips of samples the batch is divided.
        chunks: of each sample.
        number: of parts of one sum.
    """

    of_sample: bool
    strips: int
    chunks: Chunks
    number: int


def parts_of(map: Map, of_sample: bool) -> Parts:
    if of_sample:
        chunks = summing_chunks(map, PARTS_OF_SAMPLE)
        return Parts(True, map.samples, chunks, chunks.number)
    strips = min(map.samples, PARTS_OF_BATCH)
    chunks = summing_chunks(map, max(1, PARTS_OF_BATCH // strips), strips)
    return Parts(False, strips, chunks, strips * chunks.number)


@triton.jit(do_not_specialize=["samples", "groups", "chunks", "strips"])
def _cross_moments_kernel(
    dy_ptr,
    x_ptr,
    center_ptr,  # (N', g, G)
    product_ptr,  # (N', g, parts, G, G)
    total_ptr,  # (N', g, parts, G)
    samples,
    groups,
    chunks,
    strips,
    chunk_length,
    length,
    dy_stride_sample,
    dy_stride_channel,
    dy_stride_pixel,
    x_stride_sample,
    x_stride_channel,
    x_stride_pixel,
    OF_SAMPLE: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part is a chunk of the pixels of a sample, or, if N' is 1, of every `strips`-th sample.

    Products are summed up transposed.
    """
    group = (tl.program_id(0) % groups).to(tl.int64)
    chunk = tl.program_id(0) // groups % chunks
    strip = tl.program_id(0) // groups // chunks
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)
    if OF_SAMPLE:
        index = strip.to(tl.int64) * groups + group
        part = index * chunks + chunk
    else:
        index = group
        part = (group * strips + strip) * chunks + chunk

    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    center = load_vector(center_ptr + index * G, G, GP)
    total = tl.zeros((GP,), dtype=tl.float32)
    product = tl.zeros((GP, GP), dtype=tl.float32)
    # Sample offsets are int64, as a feature map may exceed 2^31 values.
    first, step = strip.to(tl.int64), strips.to(tl.int64)
    dy_rows = dy_ptr + first * dy_stride_sample + (group * G + channel) * dy_stride_channel
    x_rows = x_ptr + first * x_stride_sample + (group * G + channel) * x_stride_channel
    for _ in range(strip, samples, strips):
        pixel = begin + tl.arange(0, BLOCK)
        inside = in_group & (pixel < end)[None, :]
        dy_tile = load_tile(dy_rows, pixel, dy_stride_pixel, inside)
        x_tile = load_tile(x_rows, pixel, x_stride_pixel, inside)
        for start in range(begin, end, BLOCK):
            # Outside of the chunk dy is zero, so x - center need not be.
            dy = dy_tile
            deviation = x_tile.to(tl.float32) - center[:, None]
            # The next tiles are on their way while these are multiplied, as in `moments`.
            pixel = start + BLOCK + tl.arange(0, BLOCK)
            inside = in_group & (pixel < end)[None, :]
            dy_tile = load_tile(dy_rows, pixel, dy_stride_pixel, inside)
            x_tile = load_tile(x_rows, pixel, x_stride_pixel, inside)
            total += tl.sum(dy.to(tl.float32), axis=1)
            product = multiply(deviation, tl.trans(dy), product)
        dy_rows += step * dy_stride_sample
        x_rows += step * x_stride_sample

    store_vector(total_ptr + part * G, total, G, GP)
    store_matrix(product_ptr + part * G * G, tl.trans(product), G, GP)


def cross_moments(map: Map, dy_strides: tuple[int, int, int], parts: Parts) -> Launch:
    """Sums over parts of the pixels, D = Σ dy (x - μ̂)ᵀ and s = Σ dy."""
    chunks = parts.chunks
    return Launch(
        _cross_moments_kernel,
        parts.strips * map.groups * chunks.number,
        map.samples,
        map.groups,
        chunks.number,
        parts.strips,
        chunks.length,
        map.length,
        *dy_strides,
        *map.strides,
        OF_SAMPLE=parts.of_sample,
        **map.tile,
        BLOCK=chunks.block,
    )
