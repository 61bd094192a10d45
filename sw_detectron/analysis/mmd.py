"""The maximum mean discrepancy of two samples (Gretton et al., 2012), with Gaussian kernels.

Shape shorthand in this module:
    M, N: samples of the two sets;  D: features
"""

from collections.abc import Sequence

import torch
from torch import Tensor

RELATIVE_BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""σ of the kernels, relative to the median distance."""


def median_distance(x: Tensor, y: Tensor) -> float:
    """The median Euclidean distance between two different samples of the union of (M, D) and
    (N, D); 1 if all samples are equal."""
    distances = torch.nn.functional.pdist(torch.cat([x, y]).double())
    median = distances.median().item()
    # More than half of the samples may be equal, and others not.
    return median or distances.mean().item() or 1.0


def squared_mmd(x: Tensor, y: Tensor, bandwidths: Sequence[float]) -> float:
    """The unbiased estimate of MMD² (Gretton et al., 2012, Eq. 3), in float64.

    The kernel is the mean over the bandwidths σ of exp(-|a - b|² / (2 σ²)). The expectation is 0
    if both sets have one distribution, and at most 2; an estimate can be slightly negative.

    Args:
        x: (M, D), M >= 2.
        y: (N, D), N >= 2.
        bandwidths: σ > 0 of each kernel, in the unit of the features.

    Raises:
        ValueError: a set has fewer than two samples.
    """
    m, n = len(x), len(y)
    if m < 2 or n < 2:
        raise ValueError(f"MMD needs at least two samples of each set, got {m} and {n}")
    samples = torch.cat([x, y]).double()
    # Without the quick way over matrix products, which cancels where samples are close.
    squares = torch.cdist(samples, samples, compute_mode="donot_use_mm_for_euclid_dist").square_()
    kernel = sum(torch.exp(squares / (-2 * sigma**2)) for sigma in bandwidths) / len(bandwidths)
    kernel.fill_diagonal_(0)  # the estimate is unbiased without k(a, a)
    within_x = kernel[:m, :m].sum() / (m * (m - 1))
    within_y = kernel[m:, m:].sum() / (n * (n - 1))
    return (within_x + within_y - 2 * kernel[:m, m:].mean()).item()
