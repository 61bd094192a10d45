"""Parts of kernels: the running values' update, running ← (1 - momentum) running + momentum batch.

It is made in the launch that first has the batch's moments. A batch with a value that is not finite
leaves all running values of the layer as they are, and so does one without pixels.
"""

from .common import BLOCK, load_matrix, load_vector, store_matrix, store_vector, tl, triton


@triton.jit
def all_finite(cov_ptr, channels, G: tl.constexpr):
    """Whether all variances on the diagonals of covariances (g, G, G) are finite.

    Where a mean is not finite its variance is not, and no covariance is larger than variances.
    """
    outside = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, channels, BLOCK):
        i = start + tl.arange(0, BLOCK)
        variance = tl.load(cov_ptr + i * G + i % G, mask=i < channels, other=0.0)
        outside += tl.where(tl.abs(variance) < float("inf"), 0, 1)
    return tl.sum(outside, axis=0) == 0


@triton.jit
def _between(running, target, momentum):
    """As `Tensor.lerp_` does, exact for momentum 0 and 1."""
    difference = target - running
    near_running = running + momentum * difference
    near_target = target - (1.0 - momentum) * difference
    return tl.where(momentum < 0.5, near_running, near_target)


@triton.jit
def move_vector(running_ptr, target, momentum, allowed, G: tl.constexpr, GP: tl.constexpr):
    running = load_vector(running_ptr, G, GP)
    moved = tl.where(allowed, _between(running, target, momentum), running)
    store_vector(running_ptr, moved, G, GP)


@triton.jit
def move_matrix(running_ptr, target, momentum, allowed, G: tl.constexpr, GP: tl.constexpr):
    running = load_matrix(running_ptr, G, GP)
    moved = tl.where(allowed, _between(running, target, momentum), running)
    store_matrix(running_ptr, moved, G, GP)
