"""The mixture of statistics (Eq. 6), and its gradient.

Shape shorthand in this module:
    N: samples;  g: channel groups;  G: channels in a group;  K: statistics in the set

A covariance is (…, g, G, G). In a set without "bw" and "iw" it is diagonal, and is given by its
diagonal, (…, g, G). Statistics of samples lead with N, those of the batch with nothing; a mixture
in which nothing depends on the sample leads with 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STATISTICS = ("bw", "iw", "bn", "in", "ln")
WHITENING = frozenset({"bw", "iw"})
OF_BATCH = frozenset({"bw", "bn"})
OF_SAMPLE = frozenset({"iw", "in", "ln"})


def mix(
    statistics: Sequence[str],
    omega_mean: Tensor,
    omega_cov: Tensor,
    mean: Tensor | None,
    cov: Tensor | None,
    batch_mean: Tensor | None,
    batch_cov: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """μ̂ = Σ_k ω_k μ_k and Σ̂ = Σ_k ω'_k Σ_k + ε I (Eq. 6).

    Args:
        statistics: the K names.
        omega_mean, omega_cov: ω and ω', (K,).
        mean, cov: of the samples, (N, g, G) and (N, g, G, G) or diagonal; None if not in the set.
        batch_mean, batch_cov: of the batch, (g, G) and (g, G, G) or diagonal; None likewise.
        eps: ε.

    Returns:
        μ̂ (N, g, G) and Σ̂ (N, g, G, G) or diagonal.
    """
    diagonal = not WHITENING & set(statistics)
    mixed_mean = mixed_cov = mixed_variance = 0.0
    for k, name in enumerate(statistics):
        if name == "ln":
            mean_k, variance_k = layer_moments(mean, cov if diagonal else _diagonal(cov))
        elif name in OF_BATCH:
            mean_k, cov_k = batch_mean[None], batch_cov[None]
        else:
            mean_k, cov_k = mean, cov
        mixed_mean = mixed_mean + omega_mean[k] * mean_k
        if name in WHITENING:
            mixed_cov = mixed_cov + omega_cov[k] * cov_k
            continue
        if name != "ln":
            variance_k = cov_k if diagonal else _diagonal(cov_k)
        mixed_variance = mixed_variance + omega_cov[k] * variance_k
    if tuple(statistics) == ("ln",):
        mixed_mean = mixed_mean.expand_as(mean)
        mixed_variance = mixed_variance.expand_as(mean)
    mixed_variance = mixed_variance + eps
    if diagonal:
        return mixed_mean, mixed_variance
    if isinstance(mixed_variance, float):
        identity = torch.eye(mixed_cov.shape[-1], dtype=mixed_cov.dtype, device=mixed_cov.device)
        return mixed_mean, mixed_cov + mixed_variance * identity
    variance = mixed_variance.expand(*mixed_variance.shape[:-1], mixed_cov.shape[-1])
    return mixed_mean, mixed_cov + variance.diag_embed()


def mix_backward(
    statistics: Sequence[str],
    omega_mean: Tensor,
    omega_cov: Tensor,
    mean: Tensor | None,
    cov: Tensor | None,
    batch_mean: Tensor | None,
    batch_cov: Tensor | None,
    grad_mean: Tensor,
    grad_cov: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `mix` with respect to ω, ω' and to the means and covariances.

    Args:
        grad_mean, grad_cov: of μ̂ and Σ̂, in their shapes; grad_cov is symmetric.

    Returns:
        (K,), (K,), and gradients in the shapes of mean, cov, batch_mean and batch_cov; None for
        those that are None.
    """
    diagonal = not WHITENING & set(statistics)
    position = {name: k for k, name in enumerate(statistics)}
    grad_omega_mean, grad_omega_cov = torch.zeros_like(omega_mean), torch.zeros_like(omega_cov)

    def accumulate(names: tuple[str, str], mean, cov, grad_mean, grad_cov):
        """Handle a whitening statistic and its standardizing twin."""
        full, twin = (position.get(name) for name in names)
        chosen = [k for k in (full, twin) if k is not None]
        if not chosen:
            return None, None
        for k in chosen:
            grad_omega_mean[k] = (grad_mean * mean).sum()
        to_mean = sum(omega_mean[k] for k in chosen) * grad_mean
        if diagonal:
            grad_omega_cov[twin] = (grad_cov * cov).sum()
            return to_mean, omega_cov[twin] * grad_cov
        to_cov = torch.zeros_like(grad_cov) if full is None else omega_cov[full] * grad_cov
        if full is not None:
            grad_omega_cov[full] = (grad_cov * cov).sum()
        if twin is not None:
            grad_variance = _diagonal(grad_cov)
            grad_omega_cov[twin] = (grad_variance * _diagonal(cov)).sum()
            _diagonal(to_cov).add_(omega_cov[twin] * grad_variance)
        return to_mean, to_cov

    to_batch = (None, None)
    if batch_mean is not None:
        to_batch = accumulate(
            ("bw", "bn"), batch_mean, batch_cov, grad_mean.sum(dim=0), grad_cov.sum(dim=0)
        )
    to_mean, to_cov = None, None
    if mean is not None:
        to_mean, to_cov = accumulate(("iw", "in"), mean, cov, grad_mean, grad_cov)
    if "ln" in position:
        k = position["ln"]
        variance = cov if diagonal else _diagonal(cov)
        layer_mean, layer_variance = layer_moments(mean, variance)
        grad_layer_mean = grad_mean.sum(dim=(1, 2), keepdim=True)
        grad_variance = grad_cov if diagonal else _diagonal(grad_cov)
        grad_layer_variance = grad_variance.sum(dim=(1, 2), keepdim=True)
        grad_omega_mean[k] = (grad_layer_mean * layer_mean).sum()
        grad_omega_cov[k] = (grad_layer_variance * layer_variance).sum()
        channels = mean.shape[1] * mean.shape[2]
        grad_layer_variance = omega_cov[k] / channels * grad_layer_variance
        from_ln = omega_mean[k] / channels * grad_layer_mean + 2 * grad_layer_variance * (
            mean - layer_mean
        )
        to_mean = from_ln if to_mean is None else to_mean + from_ln
        if to_cov is None:
            to_cov = torch.zeros_like(cov)
        (to_cov if diagonal else _diagonal(to_cov)).add_(grad_layer_variance)
    return grad_omega_mean, grad_omega_cov, to_mean, to_cov, *to_batch


def layer_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all channels and pixels of each sample, as LN takes them.

    Args:
        mean, variance: (N, g, G), of each sample's channels.

    Returns:
        mean and variance, (N, 1, 1) each.
    """
    layer_mean = mean.mean(dim=(1, 2), keepdim=True)
    return layer_mean, (variance + (mean - layer_mean).square()).mean(dim=(1, 2), keepdim=True)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)
