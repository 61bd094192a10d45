"""Parts of kernels: how many pixels of a sample count, where images are padded.

`extent_ptr` is (N, 2), the rows and columns of each sample's image, int32; None where all pixels
count.
"""

from .common import tl, triton


@triton.jit
def counts(extent_ptr, sample, pixel, width):
    """Whether pixels belong to the image."""
    rows = tl.load(extent_ptr + 2 * sample)
    columns = tl.load(extent_ptr + 2 * sample + 1)
    return (pixel // width < rows) & (pixel % width < columns)


@triton.jit
def _count_before(extent_ptr, sample, pixel, width):
    """How many of the first pixels of a sample count."""
    rows = tl.load(extent_ptr + 2 * sample)
    columns = tl.load(extent_ptr + 2 * sample + 1)
    row = pixel // width
    in_row = tl.where(row < rows, tl.minimum(pixel % width, columns), 0)
    return tl.minimum(row, rows) * columns + in_row


@triton.jit
def chunk_count(chunk, chunk_length, length, extent_ptr, sample, width):
    """How many pixels of a chunk count."""
    begin = chunk * chunk_length
    count = tl.minimum(length - begin, chunk_length)
    if extent_ptr is not None:
        end = begin + count
        count = _count_before(extent_ptr, sample, end, width)
        count -= _count_before(extent_ptr, sample, begin, width)
    return count.to(tl.float32)


@triton.jit
def sample_count(length, extent_ptr, sample):
    """How many pixels of a sample count, 1 at least."""
    count = length * 1.0
    if extent_ptr is not None:
        area = tl.load(extent_ptr + 2 * sample) * tl.load(extent_ptr + 2 * sample + 1)
        count = tl.maximum(area, 1) * 1.0
    return count
