"""Second launch of a training step: moments of the batch, and of samples, from those of chunks."""

from .common import Chunks, Map, store_matrix, store_vector, tl, triton
from .extent import chunk_count
from .launch import Launch
from .mixture import CHUNKS_IN_PLACE, sample_moments


@triton.jit
def _row(
    chunk_mean_ptr,
    chunk_cov_ptr,
    extent_ptr,
    first,
    number,
    group,
    row,
    groups,
    chunks,
    chunk_length,
    length,
    width,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Mean (GP,) and a row of the covariance (GP,) of some samples, and their number of pixels.

    The covariance within the chunks plus that of their means, ROWS chunks at a time.
    """
    column = tl.arange(0, GP)
    parts = number * chunks
    origin = ((first * groups + group) * chunks).to(tl.int64)
    shift = tl.load(chunk_mean_ptr + origin * G + column, mask=column < G, other=0.0)

    # The mean comes first: sums of squares would lose the digits that centring keeps.
    total = tl.zeros((ROWS, GP), dtype=tl.float32)
    counted = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        inside = (part < parts)[:, None] & (column < G)[None, :]
        place = ((first + part // chunks) * groups + group).to(tl.int64) * chunks + part % chunks
        mean = tl.load(
            chunk_mean_ptr + place[:, None] * G + column[None, :], mask=inside, other=0.0
        )
        sample = first + tl.minimum(part, parts - 1) // chunks
        count = chunk_count(part % chunks, chunk_length, length, extent_ptr, sample, width)
        if extent_ptr is not None:
            counted += tl.where(part < parts, count, 0.0)
        total += tl.where(inside, count[:, None] * (mean - shift[None, :]), 0.0)
    pixels = (number * 1.0) * length
    if extent_ptr is not None:
        pixels = tl.sum(counted, axis=0)
    divisor = tl.maximum(pixels, 1.0)
    center = shift + tl.sum(total, axis=0) / divisor

    scatter = tl.zeros((ROWS, GP), dtype=tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        inside = (part < parts)[:, None] & (column < G)[None, :]
        place = ((first + part // chunks) * groups + group).to(tl.int64) * chunks + part % chunks
        mean = tl.load(
            chunk_mean_ptr + place[:, None] * G + column[None, :], mask=inside, other=0.0
        )
        rows = chunk_cov_ptr + (place * G + row)[:, None] * G + column[None, :]
        cov = tl.load(rows, mask=inside, other=0.0)
        sample = first + tl.minimum(part, parts - 1) // chunks
        count = chunk_count(part % chunks, chunk_length, length, extent_ptr, sample, width)
        offset = tl.where(inside, mean - center[None, :], 0.0)
        row_offset = tl.sum(tl.where((column == row)[None, :], offset, 0.0), axis=1)
        scatter += tl.where(inside, count[:, None] * (cov + row_offset[:, None] * offset), 0.0)
    return center, tl.sum(scatter, axis=0) / divisor, pixels


@triton.jit(do_not_specialize=["samples", "groups", "chunks", "chunk_length", "length"])
def _batch_moments_kernel(
    chunk_mean_ptr,  # (N, g, chunks, G)
    chunk_cov_ptr,  # (N, g, chunks, G, G)
    batch_mean_ptr,  # (g, G)
    batch_cov_ptr,  # (g, G, G), and behind it the number of pixels
    mean_ptr,  # (N, g, G), None if the moments of samples are not asked for
    cov_ptr,  # (N, g, G, G), likewise
    extent_ptr,  # (N, 2), None if all pixels count
    samples,
    groups,
    chunks,
    chunk_length,
    length,
    width,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """One row in each program: first those of the batch, then those of the samples.

    IN_PLACE: a sample and group has one program for all rows, as its chunks are few.
    """
    program = tl.program_id(0)
    row = program % G
    group = program // G % groups
    which = program // G // groups
    if (which > 0) & IN_PLACE:
        if mean_ptr is not None:
            index = (program - groups * G).to(tl.int64)
            sample_mean, sample_cov = sample_moments(
                chunk_mean_ptr,
                chunk_cov_ptr,
                index,
                chunks,
                chunk_length,
                length,
                extent_ptr,
                index // groups,
                width,
                G,
                GP,
            )
            store_vector(mean_ptr + index * G, sample_mean, G, GP)
            store_matrix(cov_ptr + index * G * G, sample_cov, G, GP)
    else:
        first = 0
        number = samples
        if which > 0:
            first = which - 1
            number = 1
        mean, cov, pixels = _row(
            chunk_mean_ptr,
            chunk_cov_ptr,
            extent_ptr,
            first,
            number,
            group,
            row,
            groups,
            chunks,
            chunk_length,
            length,
            width,
            G,
            GP,
            ROWS,
        )
        column = tl.arange(0, GP)
        if which == 0:
            tl.store(batch_mean_ptr + group * G + column, mean, mask=column == row)
            store_vector(batch_cov_ptr + (group * G + row) * G, cov, G, GP)
            tl.store(batch_cov_ptr + groups * G * G, pixels, mask=(group == 0) & (row == 0))
        elif mean_ptr is not None:
            place = (first * groups + group).to(tl.int64)
            tl.store(mean_ptr + place * G + column, mean, mask=column == row)
            store_vector(cov_ptr + (place * G + row) * G, cov, G, GP)


def batch_moments(map: Map, chunks: Chunks, of_samples: bool) -> Launch:
    """Moments over all pixels of this rank (Eq. 2 without its ε), and over those of each sample."""
    in_place = chunks.number <= CHUNKS_IN_PLACE.value
    programs = map.groups if in_place else map.channels
    return Launch(
        _batch_moments_kernel,
        map.channels + (map.samples * programs if of_samples else 0),
        map.samples,
        map.groups,
        chunks.number,
        chunks.length,
        map.length,
        map.width,
        **map.rows,
        IN_PLACE=in_place,
    )
