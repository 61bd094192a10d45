"""The launch that synchronized training needs besides: moments of all ranks' batches."""

from torch import Tensor

from ..options import Running
from .batch_moments import packed_moments
from .common import launch, load_matrix, load_vector, padded, store_vector, tl, triton
from .running import all_finite, bump_versions, move_matrix, move_vector


@triton.jit(do_not_specialize=["ranks", "groups"])
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
    i = tl.arange(0, GP)
    inside = (i < G)[:, None] & (i < G)[None, :]
    place = group * G * G + i[:, None] * G + i[None, :]
    tl.store(cov_ptr + place, cov, mask=inside)
    tl.store(cov_ptr + channels * G, total, mask=group == 0)
    move_vector(running_mean_ptr + group * G, mean, momentum, finite, G, GP)
    move_matrix(running_cov_ptr + group * G * G, cov, momentum, finite, G, GP)


def ranks_moments(
    gathered: Tensor, running: Running, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments over the pixels of all ranks, and the running values moved towards them.

    Args:
        gathered: (R, C + C G + 1), of every rank what `batch_moments` packs.
        running: changed in place, unless there is no pixel or a value is not finite.

    Returns:
        mean (g, G), covariance (g, G, G) and the number of pixels (1,).
    """
    groups, num_pergroup, _ = running.mean.shape
    packed, mean, cov = packed_moments(gathered, groups, num_pergroup)
    side = padded(num_pergroup)
    launch(
        _ranks_moments_kernel,
        groups,
        gathered,
        mean,
        cov,
        *running,
        len(gathered),
        groups,
        momentum,
        G=num_pergroup,
        GP=side,
        num_warps=min(8, side // 4),
    )
    bump_versions(running)
    return mean, cov, packed[-1:]
