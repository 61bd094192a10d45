"""The running mean and covariance: what stands for the batch in evaluation."""

import torch
from torch import Tensor

from ..options import Options, Running


def running_values(running: Running, dtype: torch.dtype, options: Options) -> tuple[Tensor, Tensor]:
    """The running mean (g, G) and covariance (g, G, G), or its diagonal if that is all it takes."""
    mean, cov = running.mean[..., 0].to(dtype), running.cov.to(dtype)
    return mean, cov.diagonal(dim1=-2, dim2=-1) if options.diagonal else cov


@torch.no_grad()
def update_running(
    running: Running, mean: Tensor, cov: Tensor, count: int | Tensor, momentum: float
) -> None:
    """running ← (1 - momentum) running + momentum batch (Algorithm 1, lines 7 and 8).

    Args:
        running: changed in place.
        mean: (g, G).
        cov: (g, G, G), or variances (g, G): then only the diagonal of the covariance changes.
        count: pixels of the batch, an int or a tensor ().

    A batch without pixels, or with a value that is not finite, leaves everything as it is. This is
    decided where the values lie: nobody waits for a GPU.
    """
    variance = cov.diagonal(dim1=-2, dim2=-1) if cov.dim() == 3 else cov
    # Where a mean is not finite its variance is not, and no covariance is larger than variances.
    holds = variance.isfinite().all()
    if isinstance(count, Tensor):
        holds = holds & (count > 0)
    elif count == 0:
        return
    target = running.cov if cov.dim() == 3 else running.cov.diagonal(dim1=-2, dim2=-1)
    for old, new in ((running.mean[..., 0], mean), (target, cov)):
        old.lerp_(torch.where(holds, new.to(old.dtype), old), momentum)
