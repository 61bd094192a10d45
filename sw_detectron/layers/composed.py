"""Switchable Whitening composed of plain, differentiable operations.

For tracing, exporting, torch.func and gradients of gradients, which an autograd function with a
derivative of its own would stop. Slower than `fused`, and it keeps more.
"""

import torch
from torch import Tensor

from .inverse_sqrt import eigh_inverse_sqrt, newton_inverse_sqrt
from .mixing import mix
from .options import Options
from .padding import Extent
from .plain import batch_moments
from .sync import differentiable_ranks_moments


def composed_switch_whiten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    options: Options,
    extent: Extent | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, int | Tensor]:
    """Whiten x; see `functional.switch_whiten`.

    Args:
        x: (N, C, H, W), of samples with pixels, though there may be no sample.
        running: mean (g, G) and covariance (g, G, G) or variance (g, G) that take the batch's
            place; None to take those of the batch.
        extent: the pixels that statistics are of; None for all.

    Returns:
        y (N, C, H, W), and the batch's mean and covariance, None if not taken from the batch, and
        number of pixels, a tensor (1,) if it is that of several ranks.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    omega_mean = mean_weight.to(dtype).softmax(dim=0)
    omega_cov = omega_mean if var_weight is None else var_weight.to(dtype).softmax(dim=0)

    pixels = x.to(dtype).flatten(2).unflatten(1, (-1, options.num_pergroup))  # (N, g, G, L)
    batch_mean, batch_cov = running or (None, None)
    mean = cov = None
    count, pixels_of_samples = x.shape[0] * pixels.shape[-1], None
    inside = None
    if extent is not None:
        pixels_of_samples = extent.pixels
        count = sum(pixels_of_samples)
        inside = extent.mask(*x.shape[2:], x.device).flatten(2)[:, None]  # (N, 1, 1, L)
    of_this_batch = options.of_batch and running is None
    if options.of_sample or of_this_batch:
        mean, cov = _sample_moments(pixels, inside, options.diagonal)
    if of_this_batch:
        batch_mean, batch_cov = batch_moments(mean, cov, pixels_of_samples)
        if options.group is not None:
            batch_mean, batch_cov, count = differentiable_ranks_moments(
                batch_mean, batch_cov, count, options.group
            )
    mixed_mean, mixed_cov = mix(
        options.statistics, omega_mean, omega_cov, mean, cov, batch_mean, batch_cov, options.eps
    )
    centred = pixels - mixed_mean[..., None]
    if options.diagonal:
        y = centred * mixed_cov.rsqrt()[..., None]
    elif options.whitening == "newton":
        y = newton_inverse_sqrt(mixed_cov, options.num_iterations) @ centred
    else:
        y = eigh_inverse_sqrt(mixed_cov, floor=options.eps) @ centred
    if weight is not None:
        y = y * weight.to(dtype).view(-1, options.num_pergroup, 1)
        y = y + bias.to(dtype).view(-1, options.num_pergroup, 1)
    y = y.reshape(x.shape).to(x.dtype)
    return y, *((batch_mean, batch_cov) if of_this_batch else (None, None)), count


def _sample_moments(pixels: Tensor, inside: Tensor | None, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Mean (N, g, G) and covariance (N, g, G, G), or variance (N, g, G), of each sample.

    Args:
        pixels: (N, g, G, L).
        inside: (N, 1, 1, L), which of them count; None for all.
    """
    if inside is None:
        number = pixels.shape[-1]
        mean = pixels.mean(dim=-1)
        centred = pixels - mean[..., None]
    else:
        number = inside.sum(dim=-1).clamp(min=1)  # (N, 1, 1)
        mean = torch.where(inside, pixels, 0).sum(dim=-1) / number
        centred = torch.where(inside, pixels - mean[..., None], 0)
    if diagonal:
        return mean, centred.square().sum(dim=-1) / number
    return mean, centred @ centred.mT / (number if inside is None else number[..., None])
