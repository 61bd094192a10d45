"""Mean and covariance of the batch: from those of its samples, then over all ranks.

Shape shorthand in this module:
    N: samples;  g: channel groups;  G: channels in a group;  C = g * G;  R: ranks

All moments are biased (divided by the number of pixels). A covariance is either full,
(…, g, G, G), or only its diagonal, (…, g, G): what a set without whitening needs.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def batch_moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Moments over all pixels of this rank (Eq. 2 without its ε) from those of its samples.

    Every sample has the same number of pixels, so the mean of the means is the batch's mean,
    and the covariance is that within the samples plus that of their means: no pixel is read.

    Args:
        mean: (N, g, G), N >= 1.
        cov: (N, g, G, G), or the variances (N, g, G).

    Returns:
        mean (g, G) and covariance (g, G, G), or variance (g, G).
    """
    batch_mean = mean.mean(dim=0)
    offsets = mean - batch_mean
    if cov.dim() == mean.dim():
        return batch_mean, (cov + offsets.square()).mean(dim=0)
    between = (offsets[..., :, None] * offsets[..., None, :]).add_(cov)
    return batch_mean, between.mean(dim=0)


def ranks_moments(
    mean: Tensor, cov: Tensor, count: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments over the pixels of all ranks, as if one process had all of them.

    One collective, whose size depends on C and G alone. Every rank computes the result from the
    same numbers in the same order: it is equal to the bit on all of them.

    Args:
        mean, cov: of this rank, as `batch_moments` returns them; anything finite if count is 0.
        count: pixels of this rank, N * H * W.
        group: the ranks.

    Returns:
        mean and covariance in the given shapes, and the number of pixels of all ranks, ().
    """
    # Gathered rather than summed: a sum of squares over ranks would lose the digits that centring
    # keeps. gloo has no all_gather_into_tensor.
    packed = torch.cat([mean.new_tensor([count]), mean.flatten(), cov.flatten()])
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, packed, group=group)
    counts, means, covs = torch.stack(gathered).split([1, mean.numel(), cov.numel()], dim=1)
    total = counts.sum()
    weights = counts[..., None] / total.clamp(min=1)
    mean, cov = _combine(weights, means.view(-1, *mean.shape), covs.view(-1, *cov.shape))
    return mean, cov, total


def reduce_gradients(
    grad_mean: Tensor, grad_cov: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the moments of all ranks, summed over the ranks' losses."""
    packed = torch.cat([grad_mean.flatten(), grad_cov.flatten()])
    dist.all_reduce(packed, group=group)
    mean, cov = packed.split([grad_mean.numel(), grad_cov.numel()])
    return mean.view_as(grad_mean), cov.view_as(grad_cov)


def differentiable_ranks_moments(
    mean: Tensor, cov: Tensor, count: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`ranks_moments` with a gradient, without the number of pixels."""
    return _RanksMoments.apply(mean, cov, count, group)


class _RanksMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean, cov, count, group):
        all_mean, all_cov, total = ranks_moments(mean, cov, count, group)
        ctx.save_for_backward(mean - all_mean, count / total.clamp(min=1))
        ctx.group = group
        return all_mean, all_cov

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_mean, grad_cov):
        offset, share = ctx.saved_tensors
        grad_mean, grad_cov = reduce_gradients(grad_mean, grad_cov, ctx.group)
        if grad_cov.dim() == grad_mean.dim():
            through_offset = 2 * grad_cov * offset
        else:
            through_offset = ((grad_cov + grad_cov.mT) @ offset[..., None])[..., 0]
        return share * (grad_mean + through_offset), share * grad_cov, None, None


def _combine(weights: Tensor, means: Tensor, covs: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of a union of pixel sets: the covariance within them plus that of their means.

    Args:
        weights: (M, 1, 1), each set's share of the pixels.
        means: (M, g, G).
        covs: (M, g, G, G), or variances (M, g, G).
    """
    # Sums of products, written out: matrix products are rounded to tf32 where a user allows it.
    mean = (weights * means).sum(dim=0)
    offsets = means - mean
    if covs.dim() == means.dim():
        return mean, (weights * (covs + offsets.square())).sum(dim=0)
    between = offsets[..., :, None] * offsets[..., None, :]
    return mean, (weights[..., None] * (covs + between)).sum(dim=0)
