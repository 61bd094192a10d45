"""Statistics and gradients over the ranks of a process group, as if one process had all pixels.

Shape shorthand in this module:
    g: channel groups;  G: channels in a group;  R: ranks

All moments are biased (divided by the number of pixels). A covariance is either full, (g, G, G),
or only its diagonal, (g, G): what a set without whitening needs.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_moments(packed: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Mean, covariance and number of pixels of every rank, one row each: (R, length).

    One collective, whose size depends on C and G alone. Every rank computes from the same numbers
    in the same order, so that results are equal to the bit on all of them.
    """
    # Gathered rather than summed: a sum of squares over ranks would lose the digits that centring
    # keeps. gloo has no all_gather_into_tensor.
    gathered = packed.new_empty((dist.get_world_size(group), *packed.shape))
    dist.all_gather(list(gathered.unbind()), packed, group=group)
    return gathered


def ranks_moments(
    mean: Tensor, cov: Tensor, count: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments over the pixels of all ranks.

    Args:
        mean, cov: of this rank's batch; anything finite if count is 0.
        count: pixels of this rank, N * H * W.
        group: the ranks.

    Returns:
        mean and covariance in the given shapes, and the number of pixels of all ranks, ().
    """
    gathered = gather_moments(
        torch.cat([mean.flatten(), cov.flatten(), mean.new_tensor([count])]), group
    )
    means, covs, counts = gathered.split([mean.numel(), cov.numel(), 1], dim=1)
    total = counts.sum()
    weights = counts[..., None] / total.clamp(min=1)  # (R, 1, 1)
    means, covs = means.view(-1, *mean.shape), covs.view(-1, *cov.shape)
    # Sums of products, written out: matrix products are rounded to tf32 where a user allows it.
    mean = (weights * means).sum(dim=0)
    return mean, spread(means - mean, covs, weights).sum(dim=0), total


def sum_gradients(packed: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The gradients with respect to the moments of all ranks, summed over the ranks' losses."""
    dist.all_reduce(packed, group=group)
    return packed


def differentiable_ranks_moments(
    mean: Tensor, cov: Tensor, count: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """`ranks_moments` of operations that autograd can follow any number of times.

    Two collectives, of the means and of what is centred by them. The loss is the sum of all ranks'
    losses, as everywhere.
    """
    counts = mean.new_tensor([count])
    dist.all_reduce(counts, group=group)
    share = count / counts.clamp(min=1)
    all_mean = _SumOverRanks.apply(share * mean, group)
    all_cov = _SumOverRanks.apply(spread(mean - all_mean, cov, share.view(1, 1)), group)
    return all_mean, all_cov, counts


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks; its derivative, towards the sum of the ranks' losses, is the same."""

    @staticmethod
    def forward(ctx, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None


def spread(offsets: Tensor, covs: Tensor, weights: Tensor) -> Tensor:
    """The parts of a union's covariance: within each set of pixels, and of their means.

    Args:
        offsets: of the sets' means from that of the union, (…, g, G).
        covs: (…, g, G, G), or variances (…, g, G).
        weights: each set's share of the pixels, in as many dimensions as offsets.
    """
    if covs.dim() == offsets.dim():
        return weights * (covs + offsets.square())
    return weights[..., None] * (covs + offsets[..., :, None] * offsets[..., None, :])
