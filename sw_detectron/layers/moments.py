"""Mean and covariance of the pixels of a feature map: per sample, then over the batch.

Shape shorthand in this module:
    N: samples in the batch
    g: channel groups;  G: channels in a group;  C = g * G
    L: pixels of one sample (H * W)

All moments are biased (divided by the number of pixels). A covariance is either full,
(N, g, G, G), or only its diagonal, (N, g, G): what a set without whitening needs.
"""

from torch import Tensor


def instance_moments(x: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Mean and covariance of each sample and channel group (Eq. 3 without its ε).

    Args:
        x: (N, g, G, L), float32 or float64, L >= 1.
        diagonal: return only the variances.

    Returns:
        mean (N, g, G) and covariance (N, g, G, G), or variance (N, g, G) if `diagonal`.
    """
    # Two passes: a one-pass E[xx] - E[x]E[x] loses all digits where the mean is large.
    mean = x.mean(dim=-1)
    centred = x - mean[..., None]
    if diagonal:
        return mean, centred.square().mean(dim=-1)
    return mean, centred @ centred.mT / x.shape[-1]


def batch_moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Moments over all pixels of the batch (Eq. 2 without its ε) from those of its samples.

    Every sample has the same number of pixels, so the mean of the means is the batch's mean,
    and the covariance is that within the samples plus that of their means: no pixel is read.

    Args:
        mean: (N, g, G).
        cov: (N, g, G, G), or the variances (N, g, G).

    Returns:
        mean (g, G) and covariance (g, G, G), or variance (g, G).
    """
    batch_mean = mean.mean(dim=0)
    offset = mean - batch_mean
    if cov.dim() == mean.dim():
        return batch_mean, (cov + offset.square()).mean(dim=0)
    return batch_mean, (cov + offset[..., :, None] * offset[..., None, :]).mean(dim=0)


def layer_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all channels and pixels of each sample, as LN takes them.

    Args:
        mean, variance: (N, g, G), of each sample's channels.

    Returns:
        mean and variance, (N, 1, 1) each.
    """
    layer_mean = mean.mean(dim=(1, 2), keepdim=True)
    return layer_mean, (variance + (mean - layer_mean).square()).mean(dim=(1, 2), keepdim=True)
