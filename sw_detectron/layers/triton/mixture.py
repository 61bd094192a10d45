"""Parts of kernels: the mixture of statistics (Eq. 6), made wherever it is needed.

BW, IW, BN, IN and LN are the indices of the statistics in the set, -1 for those that it lacks:
their ω is 0, and what they would add to a result is nothing. Moments of samples may be those of
their chunks, which are put together on the way: pointers of (N, g, chunks, G) and
(N, g, chunks, G, G), where every chunk but the last has `chunk_length` of the `length` pixels, of
which those count that `extent` says.
"""

from ..mixing import STATISTICS
from .common import BLOCK, identity_matrix, load_matrix, load_vector, sum_matrix, tl, triton
from .extent import chunk_count, sample_count

# A program holds its inner products with the statistics in a vector: K <= 5 of them, and last a
# plain sum, which "ln" needs.
SLOTS = tl.constexpr(8)
LAST = tl.constexpr(7)

# The moments of so many chunks of a sample are put together by one program.
CHUNKS_IN_PLACE = tl.constexpr(16)

# Matrices that a program has on their way at a time.
LOADS = tl.constexpr(8)


def positions(statistics: tuple[str, ...]) -> dict[str, int]:
    """K, and the index of every statistic in the set, -1 for those that are not in it."""
    index = {name.upper(): -1 for name in STATISTICS}
    return {"K": len(statistics), **index, **{n.upper(): k for k, n in enumerate(statistics)}}


@triton.jit
def softmax(pointer, K: tl.constexpr):
    """ω of importance weights (K,), padded with zeros to (SLOTS,)."""
    k = tl.arange(0, SLOTS)
    weight = tl.load(pointer + k, mask=k < K, other=-float("inf")).to(tl.float32)
    exponential = tl.exp(weight - tl.max(weight, axis=0))
    return exponential / tl.sum(exponential, axis=0)


@triton.jit
def omegas(mean_weight_ptr, var_weight_ptr, K: tl.constexpr):
    """ω and ω'."""
    omega = softmax(mean_weight_ptr, K)
    omega_cov = omega
    if var_weight_ptr is not None:
        omega_cov = softmax(var_weight_ptr, K)
    return omega, omega_cov


@triton.jit
def pick(vector, k: tl.constexpr):
    """Slot k of a vector (SLOTS,), 0 if k is -1."""
    return tl.sum(tl.where(tl.arange(0, SLOTS) == k, vector, 0.0), axis=0)


@triton.jit
def place(value, k: tl.constexpr):
    """A vector (SLOTS,) with the value in slot k, in none if k is -1."""
    return tl.where(tl.arange(0, SLOTS) == k, value, 0.0)


@triton.jit
def weigh(omega, cov, identity, WHITENED: tl.constexpr, STANDARDIZED: tl.constexpr):
    """ω cov, of which a standardizing statistic has only the diagonal; its own adjoint."""
    return (pick(omega, WHITENED) + pick(omega, STANDARDIZED) * identity) * cov


@triton.jit
def sample_moments(
    mean_ptr,
    cov_ptr,
    index,
    chunks,
    chunk_length,
    length,
    extent_ptr,
    sample,
    width,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """Mean (GP,) and covariance (GP, GP) of a sample and group, from those of its chunks.

    There are CHUNKS_IN_PLACE chunks at most. The covariance within the chunks plus that of their
    means. The means are taken relative to the first one, so that sums of their products keep their
    digits.
    """
    first = index * chunks
    mean = load_vector(mean_ptr + first * G, G, GP)
    cov = load_matrix(cov_ptr + first * G * G, G, GP)
    if chunks > 1:
        whole = sample_count(length, extent_ptr, sample)
        i = tl.arange(0, GP)
        chunk = tl.arange(0, CHUNKS_IN_PLACE)
        inside = (chunk < chunks)[:, None] & (i < G)[None, :]
        count = chunk_count(chunk, chunk_length, length, extent_ptr, sample, width)
        share = tl.where(chunk < chunks, count / whole, 0.0)[:, None]
        means = tl.load(
            mean_ptr + (first + chunk)[:, None] * G + i[None, :], mask=inside, other=0.0
        )
        mean += tl.sum(tl.where(inside, share * (means - mean[None, :]), 0.0), axis=0)
        apart = tl.where(inside, means - mean[None, :], 0.0)
        cov = tl.dot(tl.trans(share * apart), apart, input_precision="ieee")
        for start in range(0, chunks, LOADS):
            for j in tl.static_range(LOADS):
                there = start + j < chunks
                part = chunk_count(start + j, chunk_length, length, extent_ptr, sample, width)
                within = load_matrix(cov_ptr + (first + start + j) * G * G, G, GP, there)
                cov += part / whole * within
    return mean, cov


@triton.jit
def layer_moments(
    mean_ptr,
    cov_ptr,
    sample,
    groups,
    chunks,
    chunk_length,
    length,
    extent_ptr,
    width,
    G: tl.constexpr,
):
    """Mean and variance over all channels and pixels of a sample, as LN takes them."""
    number = groups * chunks * G
    first = sample * number
    values = (groups * G) * sample_count(length, extent_ptr, sample)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, number, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mean = tl.load(mean_ptr + first + i, mask=i < number, other=0.0)
        chunk = i // G % chunks
        total += chunk_count(chunk, chunk_length, length, extent_ptr, sample, width) * mean
    layer_mean = tl.sum(total, axis=0) / values
    scatter = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, number, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < number
        mean = tl.load(mean_ptr + first + i, mask=inside, other=0.0)
        variance = tl.load(cov_ptr + (first + i) * G + i % G, mask=inside, other=0.0)
        offset = mean - layer_mean
        chunk = i // G % chunks
        count = chunk_count(chunk, chunk_length, length, extent_ptr, sample, width)
        scatter += tl.where(inside, count * (variance + offset * offset), 0.0)
    return layer_mean, tl.sum(scatter, axis=0) / values


@triton.jit
def mix(
    omega,
    omega_cov,
    mean,  # (GP,), None if nothing in the set depends on the sample
    cov,  # (GP, GP), likewise
    batch_mean,  # (GP,), None if nothing in the set depends on the batch
    batch_cov,  # (GP, GP), likewise
    layer_mean,
    layer_variance,
    eps,
    BW: tl.constexpr,
    IW: tl.constexpr,
    BN: tl.constexpr,
    IN: tl.constexpr,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """μ̂ (GP,) and Σ̂ (GP, GP) of a sample and group (Eq. 6)."""
    identity = identity_matrix(G, GP)
    center = tl.where(tl.arange(0, GP) < G, pick(omega, LN) * layer_mean, 0.0)
    mixed = (pick(omega_cov, LN) * layer_variance + eps) * identity
    if batch_mean is not None:
        center += (pick(omega, BW) + pick(omega, BN)) * batch_mean
        mixed += weigh(omega_cov, batch_cov, identity, BW, BN)
    if mean is not None:
        center += (pick(omega, IW) + pick(omega, IN)) * mean
        mixed += weigh(omega_cov, cov, identity, IW, IN)
    return center, mixed


@triton.jit
def inner_products(
    grad_center, grad_mixed, mean, cov, identity, WHITENED: tl.constexpr, STANDARDIZED: tl.constexpr
):
    """The gradients of ω and ω' of two statistics, in their slots of vectors (SLOTS,)."""
    of_mean = tl.sum(grad_center * mean, axis=0)
    products = grad_mixed * cov
    of_cov = sum_matrix(products)
    of_diagonal = sum_matrix(products * identity)
    return (
        place(of_mean, WHITENED) + place(of_mean, STANDARDIZED),
        place(of_cov, WHITENED) + place(of_diagonal, STANDARDIZED),
    )
