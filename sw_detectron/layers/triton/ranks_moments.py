"""The launch that synchronized training needs besides: moments of all ranks' batches."""

from .common import OF_USERS, Map, load_matrix, load_vector, store_matrix, store_vector, tl, triton
from .launch import Launch
from .running import all_finite, move_matrix, move_vector


@triton.jit(do_not_specialize=["ranks", "groups"], do_not_specialize_on_alignment=OF_USERS)
def _ranks_moments_kernel(
    gathered_ptr,  # (R, C + C G + 1)
    mean_ptr,  # (g, G)
    cov_ptr,  # (g, G, G), and behind it the number of pixels
    running_mean_ptr,  # (g, G, 1)
    running_cov_ptr,  # (g, G, G)
    ranks,
    groups,
    momentum,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """One group in each program. A rank without pixels has zeros."""
    group = tl.program_id(0)
    channels = groups * G
    row = channels * (G + 1) + 1
    counts = gathered_ptr + row - 1
    total = 0.0
    for rank in range(ranks):
        total += tl.load(counts + rank * row)
    pixels = tl.maximum(total, 1.0)

    mean = tl.zeros((GP,), dtype=tl.float32)
    for rank in range(ranks):
        share = tl.load(counts + rank * row) / pixels
        mean += share * load_vector(gathered_ptr + rank * row + group * G, G, GP)
    cov = tl.zeros((GP, GP), dtype=tl.float32)
    finite = total > 0.0
    for rank in range(ranks):
        share = tl.load(counts + rank * row) / pixels
        offset = load_vector(gathered_ptr + rank * row + group * G, G, GP) - mean
        covs = gathered_ptr + rank * row + channels
        within = load_matrix(covs + group * G * G, G, GP)
        cov += share * (within + offset[:, None] * offset[None, :])
        finite = finite & all_finite(covs, channels, G)

    store_vector(mean_ptr + group * G, mean, G, GP)
    store_matrix(cov_ptr + group * G * G, cov, G, GP)
    tl.store(cov_ptr + channels * G, total, mask=group == 0)
    move_vector(running_mean_ptr + group * G, mean, momentum, finite, G, GP)
    move_matrix(running_cov_ptr + group * G * G, cov, momentum, finite, G, GP)


def ranks_moments(map: Map, ranks: int, momentum: float) -> Launch:
    """Moments over the pixels of all ranks, and the running values moved towards them.

    Nothing moves if there is no pixel or a value is not finite.
    """
    return Launch(
        _ranks_moments_kernel, map.groups, ranks, map.groups, float(momentum), **map.matrix
    )
