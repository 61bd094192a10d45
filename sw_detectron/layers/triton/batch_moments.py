"""Second launch of a training step: moments of the batch, and of samples, from those of chunks."""

from torch import Tensor

from .common import launch, padded, rows_of_tile, store_vector, tl, triton
from .mixture import chunk_count


@triton.jit(do_not_specialize=["samples", "groups", "chunks", "chunk_length", "length"])
def _batch_moments_kernel(
    chunk_mean_ptr,  # (N, g, chunks, G)
    chunk_cov_ptr,  # (N, g, chunks, G, G)
    batch_mean_ptr,  # (g, G)
    batch_cov_ptr,  # (g, G, G), and behind it the number of pixels
    mean_ptr,  # (N, g, G), None if the moments of samples are not asked for
    cov_ptr,  # (N, g, G, G), likewise
    samples,
    groups,
    chunks,
    chunk_length,
    length,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The covariance within the chunks plus that of their means, one row in each program.

    First come the rows of the batch, then those of the samples.
    """
    row = tl.program_id(0) % G
    group = tl.program_id(0) // G % groups
    which = tl.program_id(0) // G // groups
    first = 0
    number = samples
    if which > 0:
        first = which - 1
        number = 1

    column = tl.arange(0, GP)
    on_row = column == row
    parts = number * chunks
    origin = ((first * groups + group) * chunks).to(tl.int64)
    shift = tl.load(chunk_mean_ptr + origin * G + column, mask=column < G, other=0.0)

    # The mean comes first: sums of squares would lose the digits that centring keeps.
    total = tl.zeros((ROWS, GP), dtype=tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        inside = (part < parts)[:, None] & (column < G)[None, :]
        place = ((first + part // chunks) * groups + group).to(tl.int64) * chunks + part % chunks
        mean = tl.load(
            chunk_mean_ptr + place[:, None] * G + column[None, :], mask=inside, other=0.0
        )
        count = chunk_count(part % chunks, chunk_length, length)
        total += tl.where(inside, count[:, None] * (mean - shift[None, :]), 0.0)
    pixels = (number * 1.0) * length
    center = shift + tl.sum(total, axis=0) / pixels

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
        count = chunk_count(part % chunks, chunk_length, length)
        offset = tl.where(inside, mean - center[None, :], 0.0)
        row_offset = tl.sum(tl.where(on_row[None, :], offset, 0.0), axis=1)
        scatter += tl.where(inside, count[:, None] * (cov + row_offset[:, None] * offset), 0.0)
    spread = tl.sum(scatter, axis=0) / pixels

    if which == 0:
        tl.store(batch_mean_ptr + group * G + column, center, mask=on_row)
        store_vector(batch_cov_ptr + (group * G + row) * G, spread, G, GP)
        tl.store(batch_cov_ptr + groups * G * G, pixels, mask=(group == 0) & (row == 0))
    else:
        if mean_ptr is not None:
            index = ((which - 1) * groups + group).to(tl.int64)
            tl.store(mean_ptr + index * G + column, center, mask=on_row)
            store_vector(cov_ptr + (index * G + row) * G, spread, G, GP)


def batch_moments(
    chunk_mean: Tensor, chunk_cov: Tensor, chunk_length: int, length: int, of_samples: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Moments over all pixels of this rank (Eq. 2 without its ε), and over those of each sample.

    Args:
        chunk_mean, chunk_cov: (N, g, chunks, G) and (N, g, chunks, G, G).
        chunk_length: pixels of a chunk.
        length: L.
        of_samples: whether the moments of samples are asked for.

    Returns:
        One tensor with the mean, the covariance and the number of pixels of the batch, as the ranks
        exchange it; mean (g, G) and covariance (g, G, G) in it; mean (N, g, G) and covariance
        (N, g, G, G) of samples or None.
    """
    n, groups, chunks, num_pergroup = chunk_mean.shape
    channels = groups * num_pergroup
    packed, batch_mean, batch_cov = packed_moments(chunk_mean, groups, num_pergroup)
    mean = cov = None
    if of_samples and chunks > 1:
        mean = chunk_mean.new_empty((n, groups, num_pergroup))
        cov = chunk_mean.new_empty((n, groups, num_pergroup, num_pergroup))
    launch(
        _batch_moments_kernel,
        channels if mean is None else channels * (1 + n),
        chunk_mean,
        chunk_cov,
        batch_mean,
        batch_cov,
        mean,
        cov,
        n,
        groups,
        chunks,
        chunk_length,
        length,
        G=num_pergroup,
        GP=padded(num_pergroup),
        ROWS=rows_of_tile(num_pergroup),
        num_warps=4,
    )
    if of_samples and chunks == 1:
        mean, cov = chunk_mean.squeeze(2), chunk_cov.squeeze(2)
    return packed, batch_mean, batch_cov, mean, cov


def packed_moments(like: Tensor, groups: int, num_pergroup: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized: C + C G + 1 values, and the mean (g, G) and covariance (g, G, G) in it."""
    channels = groups * num_pergroup
    packed = like.new_empty(channels + channels * num_pergroup + 1)
    mean = packed[:channels].view(groups, num_pergroup)
    return packed, mean, packed[channels:-1].view(groups, num_pergroup, num_pergroup)
