"""Switchable Whitening's passes over the pixels, and Newton's iteration, as Triton kernels.

Six operators, `torch.ops.sw_detectron.*`, opaque to torch.compile and without derivatives of
their own: `moments` and `affine` make the forward pass of a layer, `cross_moments` and
`input_gradient` its backward pass, and the two `newton_inverse_sqrt*` are what lies between.
Each reads a feature map once, in its own dtype and memory format, and computes in float32.

Shape shorthand in this module:
    N: samples;  C: channels;  H, W: height, width;  L = H * W: pixels of a sample
    g: channel groups;  G = num_pergroup: channels in a group;  C = g * G
    GP: G padded to a power of two >= 16, the side of a matrix tile; the padding is zero
    B: matrices of a batch;  T = num_iterations

A program works on one (sample, group): it takes a chunk of the pixels, tile by tile of
(GP, BLOCK), channels by pixels. Feature maps are addressed by the strides of (sample, channel,
pixel); H and W are one axis in the contiguous as in the channels_last format, so that one
kernel serves both, and the compiler finds the contiguous axis from the stride that is 1.
"""

import os
from contextlib import nullcontext

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # the kernels below are then defined, but never launched
    from types import SimpleNamespace

    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda f: f))
    tl = SimpleNamespace(constexpr=int)
    HAS_TRITON = False

# Triton decides at the definition of a kernel whether to compile or to interpret it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

SMALLEST_GROUP, LARGEST_GROUP = 8, 64

# Programs that fill a large GPU (132 multiprocessors, 16 programs each). A constant, rather than
# a property of the device, so that results do not depend on the device they were computed on.
PROGRAMS = 132 * 16


def available(x: Tensor, num_pergroup: int | None = None) -> bool:
    """Whether the operators of this module can take `x` (N, C, H, W), split in groups of G.

    They can where Triton supports the device, or interprets the kernels on the CPU
    (TRITON_INTERPRET=1), unless the environment variable SW_DETECTRON_PLAIN is 1.
    """
    return (
        _enabled(x.device)
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.numel() > 0
        and (num_pergroup is None or SMALLEST_GROUP <= num_pergroup <= LARGEST_GROUP)
    )


@torch.compiler.assume_constant_result
def _enabled(device: torch.device) -> bool:
    if not HAS_TRITON or os.environ.get("SW_DETECTRON_PLAIN") == "1":
        return False
    if device.type == "cuda":
        # tf32 came with compute capability 8.
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and INTERPRETED


# ---------------------------------------------------------------------------------------------
# Kernels
#
# Products with pixels run on the tensor cores, in tf32, which keeps 11 bits of each factor. An
# ill-conditioned covariance, whose inverse root amplifies errors, wants more, for 16-bit feature
# maps too: centred values no longer fit 11 bits. So a float32 factor is split into two tf32
# numbers, and the product, as close to float32 as 22 bits, is a sum of two or three. That is
# affordable: these kernels wait for memory. ("tf32x3" is Triton's name for two split factors.)
# Newton's iteration, on few and small matrices, is in true float32 ("ieee").
# ---------------------------------------------------------------------------------------------


@triton.jit
def _locate(groups, chunks):
    """Sample, group and chunk of this program.

    The group runs fastest: in channels_last, neighbouring groups share the memory lines. Sample
    and group are int64, as a feature map may exceed 2^31 values.
    """
    program = tl.program_id(0)
    group = program % groups
    chunk = program // groups % chunks
    sample = program // groups // chunks
    return sample.to(tl.int64), group.to(tl.int64), chunk


@triton.jit
def _load_tile(rows, pixel, stride_pixel, inside):
    """The values (GP, BLOCK) of the channels at `rows` (GP,) and the pixels (BLOCK,)."""
    offsets = pixel.to(tl.int64) * stride_pixel
    return tl.load(rows[:, None] + offsets[None, :], mask=inside, other=0.0)


@triton.jit
def _load_matrix(pointer, stride_row, stride_column, G: tl.constexpr, GP: tl.constexpr):
    """A float32 (G, G) matrix, padded with zeros to (GP, GP)."""
    i = tl.arange(0, GP)
    inside = (i < G)[:, None] & (i < G)[None, :]
    offsets = i[:, None] * stride_row + i[None, :] * stride_column
    return tl.load(pointer + offsets, mask=inside, other=0.0)


@triton.jit
def _store_matrix(pointer, matrix, G: tl.constexpr, GP: tl.constexpr):
    """The inverse of `_load_matrix`, row by row."""
    i = tl.arange(0, GP)
    inside = (i < G)[:, None] & (i < G)[None, :]
    tl.store(pointer + i[:, None] * G + i[None, :], matrix, mask=inside)


@triton.jit
def _split(value):
    """value = high + low: the 11 leading bits, which tf32 holds, and the rest of a float32."""
    bits = value.to(tl.int32, bitcast=True)
    high = ((bits + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, value - high


@triton.jit
def _multiply(matrix, values, total):
    """total + matrix @ values, for a float32 matrix and values as they were loaded."""
    if values.dtype == tl.float32:
        total = tl.dot(matrix, values, total, input_precision="tf32x3")
    else:
        # 16-bit values are exact in tf32.
        high, low = _split(matrix)
        total = tl.dot(high, values.to(tl.float32), total, input_precision="tf32")
        total = tl.dot(low, values.to(tl.float32), total, input_precision="tf32")
    return total


@triton.jit
def _fold_center(matrix, center, bias):
    """bias - matrix @ center, so that matrix (x - center) + bias = matrix x + the result.

    Used where x is of 16 bits, exact without being centred: what cancellation there is in
    float32 is far below the rounding of x.
    """
    return bias - tl.sum(matrix * center[None, :], axis=1)


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
    sample, group, chunk = _locate(groups, chunks)
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)

    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    rows = x_ptr + sample * stride_sample + (group * G + channel) * stride_channel
    pixel = begin + tl.arange(0, BLOCK)
    tile = _load_tile(rows, pixel, stride_pixel, in_group & (pixel < end)[None, :])
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
        tile = _load_tile(rows, pixel, stride_pixel, in_group & (pixel < end)[None, :])
        total += tl.sum(deviation, axis=1)
        # deviation deviation^T = high high^T + high low^T + (high low^T)^T + negligible.
        high, low = _split(deviation)
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
    _store_matrix(cov_ptr + part * G * G, cov, G, GP)


@triton.jit(do_not_specialize=["chunks"])
def _combine_moments_kernel(
    chunk_mean_ptr,  # (B, chunks, G)
    chunk_cov_ptr,  # (B, chunks, G, G)
    mean_ptr,  # (B, G)
    cov_ptr,  # (B, G, G)
    chunks,
    chunk_length,
    length,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moments of all pixels from those of the chunks, one row of a covariance in each program.

    Chan's formula: the covariance within the chunks plus that of their means. The means are
    taken relative to the first one, for the reason of `_moments_kernel`.
    """
    matrix = (tl.program_id(0) // G).to(tl.int64)
    row = tl.program_id(0) % G

    column = tl.arange(0, GP)
    on_diagonal = column == row
    means = chunk_mean_ptr + matrix * chunks * G + column
    covs = chunk_cov_ptr + matrix * chunks * G * G + row * G + column
    shift = tl.load(means, mask=column < G, other=0.0)

    total = tl.zeros((GP,), dtype=tl.float32)
    scatter = tl.zeros((GP,), dtype=tl.float32)
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = (chunk < chunks)[:, None] & (column < G)[None, :]
        chunk64 = chunk.to(tl.int64)[:, None]
        mean = tl.load(means[None, :] + chunk64 * G, mask=inside, other=0.0)
        cov = tl.load(covs[None, :] + chunk64 * G * G, mask=inside, other=0.0)
        # Every chunk but the last has the full length.
        count = tl.minimum(length - chunk * chunk_length, chunk_length).to(tl.float32)
        count = tl.where(chunk < chunks, count, 0.0)[:, None]
        offset = tl.where(inside, mean - shift[None, :], 0.0)
        row_offset = tl.sum(tl.where(on_diagonal[None, :], offset, 0.0), axis=1)
        total += tl.sum(count * offset, axis=0)
        scatter += tl.sum(count * (cov + row_offset[:, None] * offset), axis=0)

    pixels = length * 1.0
    offset = total / pixels
    row_offset = tl.sum(tl.where(on_diagonal, offset, 0.0), axis=0)
    cov = scatter / pixels - row_offset * offset
    cov = tl.where(on_diagonal & (cov < 0.0), 0.0, cov)
    mean = shift + offset
    tl.store(mean_ptr + matrix * G + column, mean, mask=on_diagonal)
    tl.store(cov_ptr + (matrix * G + row) * G + column, cov, mask=column < G)


@triton.jit(do_not_specialize=["groups", "chunks"])
def _affine_kernel(
    x_ptr,
    center_ptr,  # (N, g, G)
    matrix_ptr,  # (N, g, G, G)
    bias_ptr,  # (N, g, G)
    y_ptr,
    groups,
    chunks,
    chunk_length,
    length,
    x_stride_sample,
    x_stride_channel,
    x_stride_pixel,
    y_stride_sample,
    y_stride_channel,
    y_stride_pixel,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = A (x - center) + b."""
    sample, group, chunk = _locate(groups, chunks)
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)

    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    x_rows = x_ptr + sample * x_stride_sample + (group * G + channel) * x_stride_channel
    y_rows = y_ptr + sample * y_stride_sample + (group * G + channel) * y_stride_channel

    index = sample * groups + group
    matrix = _load_matrix(matrix_ptr + index * G * G, G, 1, G, GP)
    center = tl.load(center_ptr + index * G + channel, mask=channel < G, other=0.0)
    bias = tl.load(bias_ptr + index * G + channel, mask=channel < G, other=0.0)

    if x_ptr.dtype.element_ty != tl.float32:
        bias = _fold_center(matrix, center, bias)

    for start in range(begin, end, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        inside = in_group & (pixel < end)[None, :]
        x = _load_tile(x_rows, pixel, x_stride_pixel, inside)
        if x_ptr.dtype.element_ty == tl.float32:
            x -= center[:, None]
        y = tl.zeros((GP, BLOCK), dtype=tl.float32)
        y = _multiply(matrix, x, y) + bias[:, None]
        offsets = pixel.to(tl.int64) * y_stride_pixel
        tl.store(y_rows[:, None] + offsets[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["groups", "chunks"])
def _cross_moments_kernel(
    dy_ptr,
    x_ptr,
    center_ptr,  # (N, g, G)
    cross_ptr,  # (N, g, chunks, G, G)
    total_ptr,  # (N, g, chunks, G)
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
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over each chunk of dy (x - center)^T, summed up transposed, and of dy."""
    sample, group, chunk = _locate(groups, chunks)
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)

    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    dy_rows = dy_ptr + sample * dy_stride_sample + (group * G + channel) * dy_stride_channel
    x_rows = x_ptr + sample * x_stride_sample + (group * G + channel) * x_stride_channel
    index = sample * groups + group
    center = tl.load(center_ptr + index * G + channel, mask=channel < G, other=0.0)

    pixel = begin + tl.arange(0, BLOCK)
    inside = in_group & (pixel < end)[None, :]
    dy_tile = _load_tile(dy_rows, pixel, dy_stride_pixel, inside)
    x_tile = _load_tile(x_rows, pixel, x_stride_pixel, inside)
    total = tl.zeros((GP,), dtype=tl.float32)
    cross = tl.zeros((GP, GP), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        # Outside of the chunk dy is zero, so x - center need not be.
        dy = dy_tile
        deviation = x_tile.to(tl.float32) - center[:, None]
        # The next tiles are on their way while these are multiplied, as in `_moments_kernel`.
        pixel = start + BLOCK + tl.arange(0, BLOCK)
        inside = in_group & (pixel < end)[None, :]
        dy_tile = _load_tile(dy_rows, pixel, dy_stride_pixel, inside)
        x_tile = _load_tile(x_rows, pixel, x_stride_pixel, inside)
        total += tl.sum(dy.to(tl.float32), axis=1)
        cross = _multiply(deviation, tl.trans(dy), cross)

    part = index * chunks + chunk
    tl.store(total_ptr + part * G + channel, total, mask=channel < G)
    _store_matrix(cross_ptr + part * G * G, tl.trans(cross), G, GP)


@triton.jit(do_not_specialize=["groups", "chunks"])
def _input_gradient_kernel(
    dy_ptr,
    x_ptr,
    center_ptr,  # (N, g, G)
    dy_matrix_ptr,  # (N, g, G, G)
    x_matrix_ptr,  # (N, g, G, G)
    bias_ptr,  # (N, g, G)
    dx_ptr,
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
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx = A^T dy + S (x - center) + t."""
    sample, group, chunk = _locate(groups, chunks)
    begin = chunk * chunk_length
    end = tl.minimum(begin + chunk_length, length)

    channel = tl.arange(0, GP)
    in_group = (channel < G)[:, None]
    dy_rows = dy_ptr + sample * dy_stride_sample + (group * G + channel) * dy_stride_channel
    x_rows = x_ptr + sample * x_stride_sample + (group * G + channel) * x_stride_channel
    dx_rows = dx_ptr + sample * dx_stride_sample + (group * G + channel) * dx_stride_channel

    index = sample * groups + group
    dy_matrix = _load_matrix(dy_matrix_ptr + index * G * G, 1, G, G, GP)  # transposed
    x_matrix = _load_matrix(x_matrix_ptr + index * G * G, G, 1, G, GP)
    center = tl.load(center_ptr + index * G + channel, mask=channel < G, other=0.0)
    bias = tl.load(bias_ptr + index * G + channel, mask=channel < G, other=0.0)

    if x_ptr.dtype.element_ty != tl.float32:
        bias = _fold_center(x_matrix, center, bias)

    for start in range(begin, end, BLOCK):
        pixel = start + tl.arange(0, BLOCK)
        inside = in_group & (pixel < end)[None, :]
        dy = _load_tile(dy_rows, pixel, dy_stride_pixel, inside)
        x = _load_tile(x_rows, pixel, x_stride_pixel, inside)
        if x_ptr.dtype.element_ty == tl.float32:
            x -= center[:, None]
        dx = tl.zeros((GP, BLOCK), dtype=tl.float32)
        dx = _multiply(dy_matrix, dy, dx)
        dx = _multiply(x_matrix, x, dx) + bias[:, None]
        offsets = pixel.to(tl.int64) * dx_stride_pixel
        tl.store(dx_rows[:, None] + offsets[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _newton_kernel(
    cov_ptr,  # (B, G, G)
    root_ptr,  # (B, G, G)
    T: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """W = P_T / sqrt(tr cov), one matrix in each program.

    P_k = (3 P - P^3 S) / 2 is computed in the coupled form with Y = P S,

        E = (3 I - P Y) / 2,   Y <- Y E,   P <- E P,

    the same sequence in exact arithmetic, but one that does not amplify rounding errors where
    cov is ill-conditioned and T is large (Higham, Functions of Matrices, 2008, section 6.7).
    The padding of every matrix stays zero.
    """
    offset = tl.program_id(0).to(tl.int64) * G * G
    i = tl.arange(0, GP)
    identity = tl.where((i[:, None] == i[None, :]) & (i < G)[:, None], 1.0, 0.0)
    cov = _load_matrix(cov_ptr + offset, G, 1, G, GP)
    trace = tl.sum(tl.sum(cov * identity, axis=1), axis=0)

    y = cov / trace
    p = identity
    for _ in range(T):
        step = 1.5 * identity - 0.5 * tl.dot(p, y, input_precision="ieee")
        y = tl.dot(y, step, input_precision="ieee")
        p = tl.dot(step, p, input_precision="ieee")
    _store_matrix(root_ptr + offset, p / tl.sqrt(trace), G, GP)


@triton.jit
def _newton_backward_kernel(
    cov_ptr,  # (B, G, G)
    grad_root_ptr,  # (B, G, G)
    grad_cov_ptr,  # (B, G, G)
    iterates_ptr,  # (B, T, 2, GP, GP), scratch
    T: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """The adjoint of `_newton_kernel`, one matrix in each program.

    With d the gradient of the result with respect to a matrix, and d' to its next iterate,

        dE = Y dY' + dP' P,   dP = E dP' - dE Y / 2,   dY = dY' E - P dE / 2,

    where the transposes are left out: P, Y and E are symmetric. It ends at dS = dY_0.
    """
    program = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, GP)
    diagonal = i[:, None] == i[None, :]
    identity = tl.where(diagonal & (i < G)[:, None], 1.0, 0.0)
    tile = i[:, None] * GP + i[None, :]
    iterates = iterates_ptr + program * (T * 2 * GP * GP) + tile

    cov = _load_matrix(cov_ptr + program * G * G, G, 1, G, GP)
    trace = tl.sum(tl.sum(cov * identity, axis=1), axis=0)
    normalized = cov / trace
    y = normalized
    p = identity
    for k in range(T):
        tl.store(iterates + 2 * k * GP * GP, p)
        tl.store(iterates + (2 * k + 1) * GP * GP, y)
        step = 1.5 * identity - 0.5 * tl.dot(p, y, input_precision="ieee")
        y = tl.dot(y, step, input_precision="ieee")
        p = tl.dot(step, p, input_precision="ieee")
    # A thread reads below what other threads of the program have written.
    tl.debug_barrier()

    grad_root = _load_matrix(grad_root_ptr + program * G * G, G, 1, G, GP)
    scale = 1.0 / tl.sqrt(trace)
    root_product = tl.sum(tl.sum(grad_root * p, axis=1), axis=0)
    grad_p = grad_root * scale
    grad_y = tl.zeros((GP, GP), dtype=tl.float32)
    for k in range(T):
        p = tl.load(iterates + 2 * (T - 1 - k) * GP * GP)
        y = tl.load(iterates + (2 * (T - 1 - k) + 1) * GP * GP)
        step = 1.5 * identity - 0.5 * tl.dot(p, y, input_precision="ieee")
        grad_step = tl.dot(y, grad_y, input_precision="ieee")
        grad_step = tl.dot(grad_p, p, grad_step, input_precision="ieee")
        half = -0.5 * grad_step
        grad_p = tl.dot(step, grad_p, input_precision="ieee")
        grad_p = tl.dot(half, y, grad_p, input_precision="ieee")
        grad_y = tl.dot(grad_y, step, input_precision="ieee")
        grad_y = tl.dot(p, half, grad_y, input_precision="ieee")

    # S = cov / tr and W = P_T tr^(-1/2), where tr = sum_i cov_ii.
    inner = tl.sum(tl.sum(grad_y * normalized, axis=1), axis=0)
    grad_trace = -(0.5 * scale * root_product + inner) / trace
    grad_cov = 0.5 * (grad_y + tl.trans(grad_y)) / trace + grad_trace * identity
    _store_matrix(grad_cov_ptr + program * G * G, grad_cov, G, GP)


# ---------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------


def _padded(num_pergroup: int) -> int:
    """GP: a power of two, and 16 at least, as tensor cores need."""
    return max(16, triton.next_power_of_2(num_pergroup))


def _chunking(
    length: int, matrices: int, block: int, shortest: int, longest: int
) -> tuple[int, int]:
    """Pixels of a chunk, a multiple of `block`, and the number of chunks.

    As many chunks as make `PROGRAMS` programs with `matrices` = N * g, within the bounds.
    """
    pixels = triton.cdiv(length * matrices, PROGRAMS)
    pixels = min(max(pixels, shortest), longest)
    pixels = triton.cdiv(pixels, block) * block
    return pixels, triton.cdiv(length, pixels)


def _block(length: int, largest: int) -> int:
    """Pixels of a tile: no more than a small feature map has."""
    return min(largest, max(16, triton.next_power_of_2(length)))


def _statistics_plan(length: int, matrices: int, padded: int) -> tuple[int, int, int, int]:
    """(block, chunk length, chunks, warps) of a kernel that sums over pixels.

    The (GP, GP) sum has GP / 16 warps' worth of tensor core tiles: more warps would compute the
    same tiles again. A chunk is 16 GP pixels at least, so that its sum, 4 GP^2 bytes, is small
    beside its pixels, 32 GP^2 bytes in a 16-bit dtype.
    """
    block = _block(length, 64)
    chunk_length, chunks = _chunking(length, matrices, block, 16 * padded, length)
    return block, chunk_length, chunks, padded // 16


def _mapping_plan(length: int, matrices: int, padded: int) -> tuple[int, int, int, int]:
    """(block, chunk length, chunks, warps) of a kernel that maps pixels to pixels.

    A chunk has 16 GP pixels at most: enough to make the reading of the matrix negligible, and
    the more programs, the better they share the GPU.
    """
    block = _block(length, 64 if padded == 64 else 128)
    longest = max(block, 16 * padded)
    chunk_length, chunks = _chunking(length, matrices, block, block, longest)
    return block, chunk_length, chunks, 4


def _launch(kernel, programs: int, *arguments, **options) -> None:
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # Loads are either prefetched by hand or left to the many programs: no pipelining.
        kernel[(programs,)](*arguments, num_stages=1, **options)


def _operator(name: str):
    """A custom operator of the library, on the devices that run the kernels."""
    devices = ("cuda", "cpu") if INTERPRETED else "cuda"
    return torch.library.custom_op(f"sw_detectron::{name}", mutates_args=(), device_types=devices)


def _new_vectors_and_matrices(x: Tensor, num_pergroup: int, *chunks: int) -> tuple[Tensor, Tensor]:
    """Uninitialized float32 (N, g, *chunks, G) and (N, g, *chunks, G, G)."""
    shape = (x.shape[0], x.shape[1] // num_pergroup, *chunks, num_pergroup)
    vectors = x.new_empty(shape, dtype=torch.float32)
    return vectors, x.new_empty((*shape, num_pergroup), dtype=torch.float32)


@_operator("moments")
def moments(x: Tensor, num_pergroup: int) -> tuple[Tensor, Tensor]:
    """Biased mean and covariance of the pixels of each sample and group, from one reading of x.

    Args:
        x: (N, C, H, W), float32, bfloat16 or float16, contiguous or channels_last.
        num_pergroup: G.

    Returns:
        mean (N, g, G) and covariance (N, g, G, G), float32.
    """
    pixels = x.flatten(2)
    n, c, length = pixels.shape
    groups, padded = c // num_pergroup, _padded(num_pergroup)
    block, chunk_length, chunks, warps = _statistics_plan(length, n * groups, padded)
    chunk_mean, chunk_cov = _new_vectors_and_matrices(x, num_pergroup, chunks)
    _launch(
        _moments_kernel,
        n * groups * chunks,
        pixels,
        chunk_mean,
        chunk_cov,
        groups,
        chunks,
        chunk_length,
        length,
        *pixels.stride(),
        G=num_pergroup,
        GP=padded,
        BLOCK=block,
        num_warps=warps,
    )
    if chunks == 1:
        return chunk_mean.squeeze(2), chunk_cov.squeeze(2)
    mean, cov = _new_vectors_and_matrices(x, num_pergroup)
    # About 2048 values of each tensor at a time.
    block = min(triton.next_power_of_2(chunks), 2048 // padded)
    _launch(
        _combine_moments_kernel,
        n * c,
        chunk_mean,
        chunk_cov,
        mean,
        cov,
        chunks,
        chunk_length,
        length,
        G=num_pergroup,
        GP=padded,
        BLOCK=block,
        num_warps=max(1, block * padded // 512),
    )
    return mean, cov


@moments.register_fake
def _(x: Tensor, num_pergroup: int) -> tuple[Tensor, Tensor]:
    return _new_vectors_and_matrices(x, num_pergroup)


@_operator("affine")
def affine(x: Tensor, center: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """y = A (x - center) + b, at every pixel of each sample and group.

    Args:
        x: (N, C, H, W), float32, bfloat16 or float16, contiguous or channels_last.
        center: (N, g, G), float32.
        matrix: A, (N, g, G, G), float32.
        bias: b, (N, g, G), float32.

    Returns:
        y (N, C, H, W), in the dtype and the memory format of x.
    """
    y = torch.empty_like(x)
    pixels = x.flatten(2)
    n, _, length = pixels.shape
    y_pixels = y.view(pixels.shape)
    groups, num_pergroup = center.shape[1:]
    padded = _padded(num_pergroup)
    block, chunk_length, chunks, warps = _mapping_plan(length, n * groups, padded)
    _launch(
        _affine_kernel,
        n * groups * chunks,
        pixels,
        center.contiguous(),
        matrix.contiguous(),
        bias.contiguous(),
        y_pixels,
        groups,
        chunks,
        chunk_length,
        length,
        *pixels.stride(),
        *y_pixels.stride(),
        G=num_pergroup,
        GP=padded,
        BLOCK=block,
        num_warps=warps,
    )
    return y


@affine.register_fake
def _(x: Tensor, center: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@_operator("cross_moments")
def cross_moments(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the pixels of each sample and group, D = Σ dy (x - center)^T and s = Σ dy.

    The order of the additions is fixed: equal inputs give equal results, bit by bit.

    Args:
        dy: (N, C, H, W), float32, bfloat16 or float16; its strides may differ from those of x.
        x: (N, C, H, W), as dy.
        center: (N, g, G), float32.

    Returns:
        D (N, g, G, G) and s (N, g, G), float32.
    """
    dy_pixels, pixels = dy.flatten(2), x.flatten(2)
    n, _, length = pixels.shape
    groups, num_pergroup = center.shape[1:]
    padded = _padded(num_pergroup)
    block, chunk_length, chunks, warps = _statistics_plan(length, n * groups, padded)
    total, cross = _new_vectors_and_matrices(x, num_pergroup, chunks)
    _launch(
        _cross_moments_kernel,
        n * groups * chunks,
        dy_pixels,
        pixels,
        center.contiguous(),
        cross,
        total,
        groups,
        chunks,
        chunk_length,
        length,
        *dy_pixels.stride(),
        *pixels.stride(),
        G=num_pergroup,
        GP=padded,
        BLOCK=block,
        num_warps=warps,
    )
    if chunks == 1:
        return cross.squeeze(2), total.squeeze(2)
    return cross.sum(dim=2), total.sum(dim=2)


@cross_moments.register_fake
def _(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    total, cross = _new_vectors_and_matrices(x, center.shape[2])
    return cross, total


@_operator("input_gradient")
def input_gradient(
    dy: Tensor, x: Tensor, center: Tensor, dy_matrix: Tensor, x_matrix: Tensor, bias: Tensor
) -> Tensor:
    """dx = A^T dy + S (x - center) + t, at every pixel of each sample and group.

    Args:
        dy: (N, C, H, W), float32, bfloat16 or float16; its strides may differ from those of x.
        x: (N, C, H, W), as dy.
        center: (N, g, G), float32.
        dy_matrix: A, (N, g, G, G), float32, not transposed.
        x_matrix: S, (N, g, G, G), float32.
        bias: t, (N, g, G), float32.

    Returns:
        dx (N, C, H, W), in the dtype and the memory format of x.
    """
    dx = torch.empty_like(x)
    dy_pixels, pixels = dy.flatten(2), x.flatten(2)
    n, _, length = pixels.shape
    dx_pixels = dx.view(pixels.shape)
    groups, num_pergroup = center.shape[1:]
    padded = _padded(num_pergroup)
    block, chunk_length, chunks, warps = _mapping_plan(length, n * groups, padded)
    _launch(
        _input_gradient_kernel,
        n * groups * chunks,
        dy_pixels,
        pixels,
        center.contiguous(),
        dy_matrix.contiguous(),
        x_matrix.contiguous(),
        bias.contiguous(),
        dx_pixels,
        groups,
        chunks,
        chunk_length,
        length,
        *dy_pixels.stride(),
        *pixels.stride(),
        *dx_pixels.stride(),
        G=num_pergroup,
        GP=padded,
        BLOCK=block,
        num_warps=warps,
    )
    return dx


@input_gradient.register_fake
def _(
    dy: Tensor, x: Tensor, center: Tensor, dy_matrix: Tensor, x_matrix: Tensor, bias: Tensor
) -> Tensor:
    return torch.empty_like(x)


@_operator("newton_inverse_sqrt")
def newton_inverse_sqrt(cov: Tensor, num_iterations: int) -> Tensor:
    """Σ^(-1/2) by Newton's iteration: W = P_T / sqrt(tr Σ).

    With S = Σ / tr Σ and P_0 = I,  P_k = (3 P_{k-1} - P_{k-1}^3 S) / 2.

    Args:
        cov: Σ, (..., G, G), float32, symmetric positive definite.
        num_iterations: T >= 1.

    Returns:
        W (..., G, G), float32.
    """
    cov = cov.contiguous()
    root = torch.empty_like(cov)
    num_pergroup = cov.shape[-1]
    padded = _padded(num_pergroup)
    _launch(
        _newton_kernel,
        cov.numel() // num_pergroup**2,
        cov,
        root,
        T=num_iterations,
        G=num_pergroup,
        GP=padded,
        num_warps=min(8, padded // 4),
    )
    return root


@newton_inverse_sqrt.register_fake
def _(cov: Tensor, num_iterations: int) -> Tensor:
    return torch.empty_like(cov, memory_format=torch.contiguous_format)


@_operator("newton_inverse_sqrt_backward")
def newton_inverse_sqrt_backward(cov: Tensor, grad_root: Tensor, num_iterations: int) -> Tensor:
    """The gradient of `newton_inverse_sqrt` with respect to Σ, symmetrized.

    Args:
        cov: Σ, (..., G, G), float32, symmetric positive definite.
        grad_root: the gradient with respect to W, (..., G, G), float32, symmetric or not.
        num_iterations: T >= 1.

    Returns:
        (..., G, G), float32, symmetric.
    """
    cov = cov.contiguous()
    grad_cov = torch.empty_like(cov)
    num_pergroup = cov.shape[-1]
    padded = _padded(num_pergroup)
    matrices = cov.numel() // num_pergroup**2
    _launch(
        _newton_backward_kernel,
        matrices,
        cov,
        grad_root.contiguous(),
        grad_cov,
        cov.new_empty((matrices, num_iterations, 2, padded, padded)),
        T=num_iterations,
        G=num_pergroup,
        GP=padded,
        num_warps=min(8, padded // 4),
    )
    return grad_cov


@newton_inverse_sqrt_backward.register_fake
def _(cov: Tensor, grad_root: Tensor, num_iterations: int) -> Tensor:
    return torch.empty_like(cov, memory_format=torch.contiguous_format)
