"""What all kernels share: where they run, how a program finds its work, tiles of small matrices.

Shape shorthand in this package:
    N: samples;  C: channels;  H, W: height, width;  L = H * W: pixels of a sample
    g: channel groups;  G = num_pergroup: channels in a group;  C = g * G
    N': N, or 1 where no statistic of the set depends on the sample
    K: statistics in the set;  T = num_iterations;  M: pixels of the batch, on all ranks
    GP: G padded to a power of two >= 16, the side of a matrix tile; the padding is zero

A feature map is read tile by tile of (GP, BLOCK), channels by pixels, in its own dtype. It is
addressed by the strides of (sample, channel, pixel); H and W are one axis in the contiguous as in
the channels_last format, so that one kernel serves both, and the compiler finds the contiguous axis
from the stride that is 1. All that is small is float32.

Products with pixels run on the tensor cores, in tf32, which keeps 11 bits of each factor. An
ill-conditioned covariance, whose inverse root amplifies errors, wants more, for 16-bit feature maps
too: centred values no longer fit 11 bits. So a float32 factor is split into two tf32 numbers, and
the product, as close to float32 as 22 bits, is a sum of two or three. That is affordable: these
kernels wait for memory. ("tf32x3" is Triton's name for two split factors.) Products of small
matrices are in true float32 ("ieee"), and on AMD's GPUs, which have no tf32x3, all are.

Sums have a fixed order: equal inputs give equal results, bit by bit.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import launches_are_replaced

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # the kernels are then defined, but never launched
    from types import SimpleNamespace

    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda f: f))
    tl = SimpleNamespace(constexpr=lambda value=None: SimpleNamespace(value=value))
    HAS_TRITON = False

# Triton decides at the definition of a kernel whether to compile or to interpret it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

SMALLEST_GROUP, LARGEST_GROUP = 8, 64

# Programs that fill a large GPU (132 multiprocessors, 16 programs each). A constant, rather than
# a property of the device, so that results do not depend on the device they were computed on.
PROGRAMS = 132 * 16

# Parameters and running values lie where their owner has put them: kernels must not be compiled
# for more aligned ones.
OF_USERS = [
    *("mean_weight_ptr", "var_weight_ptr", "weight_ptr", "bias_ptr"),
    *("running_mean_ptr", "running_cov_ptr", "batch_mean_ptr", "batch_cov_ptr"),
]

_AMD = torch.version.hip is not None
PRODUCT = tl.constexpr("ieee" if _AMD else "tf32x3")  # of float32 factors
EXACT_PRODUCT = tl.constexpr("ieee" if _AMD else "tf32")  # of factors of 11 bits

# Values of a long vector that a program works on at a time.
BLOCK = tl.constexpr(1024)


def cannot_run_on(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if device.type == "cpu":
        runs = INTERPRETED or launches_are_replaced()
        return None if runs else "Triton's kernels do not run on a CPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return "the kernels are for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need tf32, which came with compute capability 8.0"
    return None


class Map(NamedTuple):
    """The shape of a feature map, the strides of its (sample, channel, pixel), and its W."""

    samples: int
    groups: int
    num_pergroup: int
    length: int
    strides: tuple[int, int, int]
    width: int = 0

    @property
    def side(self) -> int:
        """GP: a power of two, and 16 at least, as tensor cores need."""
        return max(16, triton.next_power_of_2(self.num_pergroup))

    @property
    def channels(self) -> int:
        return self.groups * self.num_pergroup

    @property
    def matrix(self) -> dict[str, int]:
        """G and GP of a kernel that works on one matrix in each program, and enough warps."""
        side = self.side
        return {"G": self.num_pergroup, "GP": side, "num_warps": min(8, side // 4)}

    @property
    def tile(self) -> dict[str, int]:
        """G and GP of a kernel that works on tiles of pixels, and as few warps as have the
        registers for one: what every warp does for itself, such as addresses, is then done the
        fewest times.
        """
        side = self.side
        return {"G": self.num_pergroup, "GP": side, "num_warps": {16: 1, 32: 2, 64: 8}[side]}

    @property
    def rows(self) -> dict[str, int]:
        """G and GP, and ROWS of GP values that make a tile for 4 warps."""
        side = self.side
        return {"G": self.num_pergroup, "GP": side, "ROWS": 2048 // side, "num_warps": 4}


def map_of(x: Tensor, num_pergroup: int) -> Map:
    """Of x (N, C, H, W), whose H and W can be seen as one axis."""
    pixels = x.flatten(2)
    n, channels, length = pixels.shape
    return Map(n, channels // num_pergroup, num_pergroup, length, pixels.stride(), x.shape[3])


class Chunks(NamedTuple):
    """How the pixels of a sample are divided: BLOCK, pixels of a chunk, number of chunks."""

    block: int
    length: int
    number: int


def mapping_chunks(map: Map) -> Chunks:
    """For a kernel that maps pixels to pixels by a matrix that every program makes for itself.

    Making it costs a program as much as some ten tiles. Small maps have chunks of 16 GP pixels
    nevertheless, as longer ones would leave parts of the GPU without work. Large maps have longer
    ones, and twice as many programs as run at a time, so that some read pixels while others make
    their matrices.
    """
    return _chunks(map, map.samples, 16 * map.side, 2 * PROGRAMS)


def summing_chunks(map: Map, most: int, samples: int | None = None) -> Chunks:
    """For a kernel that sums over pixels: at most so many chunks, for so many samples at once.

    A chunk is 16 GP pixels at least, so that its sum, 4 GP^2 bytes, is small beside its pixels,
    32 GP^2 bytes in a 16-bit dtype.
    """
    shortest = max(16 * map.side, triton.cdiv(map.length, most))
    return _chunks(map, map.samples if samples is None else samples, shortest, PROGRAMS)


def _chunks(map: Map, samples: int, shortest: int, programs: int) -> Chunks:
    """As many chunks as make so many programs, but none shorter than `shortest`."""
    block = min(64 if map.side < 64 else 32, max(16, triton.next_power_of_2(map.length)))
    pixels = triton.cdiv(map.length * samples * map.groups, programs)
    pixels = triton.cdiv(max(pixels, shortest), block) * block
    return Chunks(block, pixels, triton.cdiv(map.length, pixels))


# ---------------------------------------------------------------------------------------------
# Pixels
# ---------------------------------------------------------------------------------------------


@triton.jit
def locate(groups, chunks):
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
def load_tile(rows, pixel, stride_pixel, inside):
    """The values (GP, BLOCK) of the channels at `rows` (GP,) and the pixels (BLOCK,)."""
    offsets = pixel.to(tl.int64) * stride_pixel
    return tl.load(rows[:, None] + offsets[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(rows, pixel, stride_pixel, inside, tile):
    """The inverse of `load_tile`; `tile` is float32."""
    offsets = pixel.to(tl.int64) * stride_pixel
    pointers = rows[:, None] + offsets[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def split(value):
    """value = high + low: the 11 leading bits, which tf32 holds, and the rest of a float32."""
    bits = value.to(tl.int32, bitcast=True)
    high = ((bits + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, value - high


@triton.jit
def multiply(matrix, values, total):
    """total + matrix @ values, for a float32 matrix and values as they were loaded."""
    if values.dtype == tl.float32:
        total = tl.dot(matrix, values, total, input_precision=PRODUCT)
    else:
        # 16-bit values are exact in tf32.
        high, low = split(matrix)
        total = tl.dot(high, values.to(tl.float32), total, input_precision=EXACT_PRODUCT)
        total = tl.dot(low, values.to(tl.float32), total, input_precision=EXACT_PRODUCT)
    return total


# ---------------------------------------------------------------------------------------------
# Small vectors and matrices
# ---------------------------------------------------------------------------------------------


@triton.jit
def load_vector(pointer, G: tl.constexpr, GP: tl.constexpr, there=True):
    """A (G,) vector as float32, padded with zeros to (GP,); all zeros if it is not there."""
    i = tl.arange(0, GP)
    return tl.load(pointer + i, mask=(i < G) & there, other=0.0).to(tl.float32)


@triton.jit
def store_vector(pointer, vector, G: tl.constexpr, GP: tl.constexpr):
    i = tl.arange(0, GP)
    tl.store(pointer + i, vector.to(pointer.dtype.element_ty), mask=i < G)


@triton.jit
def load_matrix(pointer, G: tl.constexpr, GP: tl.constexpr, there=True):
    """A (G, G) matrix as float32, padded with zeros to (GP, GP); all zeros if it is not there."""
    i = tl.arange(0, GP)
    inside = (i < G)[:, None] & (i < G)[None, :] & there
    offsets = i[:, None] * G + i[None, :]
    return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(pointer, matrix, G: tl.constexpr, GP: tl.constexpr):
    i = tl.arange(0, GP)
    inside = (i < G)[:, None] & (i < G)[None, :]
    offsets = i[:, None] * G + i[None, :]
    tl.store(pointer + offsets, matrix.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def identity_matrix(G: tl.constexpr, GP: tl.constexpr):
    """I, (G, G), padded with zeros as all matrices are."""
    i = tl.arange(0, GP)
    return tl.where((i[:, None] == i[None, :]) & (i < G)[:, None], 1.0, 0.0)


@triton.jit
def sum_matrix(matrix):
    return tl.sum(tl.sum(matrix, axis=1), axis=0)


@triton.jit
def times(matrix, vector):
    """matrix @ vector, in true float32."""
    return tl.sum(matrix * vector[None, :], axis=1)
