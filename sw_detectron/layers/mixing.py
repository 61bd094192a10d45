"""The mixture of statistics (Eq. 6), and its gradient.

Shape shorthand in this module:
    N: samples;  g: channel groups;  G: channels in a group;  K: statistics in the set

A covariance is (…, g, G, G). In a set without "bw" and "iw" it is diagonal, and is given by its
diagonal, (…, g, G). Statistics of samples lead with N, those of the batch with nothing; a mixture
in which nothing depends on the sample leads with 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

STATISTICS = ("bw", "iw", "bn", "in", "ln")
WHITENING = frozenset({"bw", "iw"})
OF_BATCH = frozenset({"bw", "bn"})
OF_SAMPLE = frozenset({"iw", "in", "ln"})


class Statistics(NamedTuple):
    """Means and (co)variances; those that the set does not need are None.

    Attributes:
        mean, cov: of each sample, (N, g, G) and (N, g, G, G).
        batch_mean, batch_cov: of the batch, (g, G) and (g, G, G).
    """

    mean: Tensor | None
    cov: Tensor | None
    batch_mean: Tensor | None
    batch_cov: Tensor | None


def mix(
    names: Sequence[str],
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
        names: of the K statistics.
        omega_mean, omega_cov: ω and ω', (K,).
        mean, cov: of the samples, (N, g, G) and (N, g, G, G) or diagonal; None if not in the set.
        batch_mean, batch_cov: of the batch, (g, G) and (g, G, G) or diagonal; None likewise.
        eps: ε.

    Returns:
        μ̂ (N, g, G) and Σ̂ (N, g, G, G) or diagonal.
    """
    diagonal = not WHITENING & set(names)
    means, covs, variances = [], [], []
    for name, weight_mean, weight_cov in zip(names, omega_mean.unbind(), omega_cov.unbind()):
        if name == "ln":
            mean_k, variance_k = layer_moments(mean, cov if diagonal else _diagonal(cov))
            mean_k, variance_k = mean_k.expand_as(mean), variance_k.expand_as(mean)
            variances.append((weight_cov, variance_k))
        else:
            of_batch = name in OF_BATCH
            mean_k, cov_k = (batch_mean[None], batch_cov[None]) if of_batch else (mean, cov)
            if name in WHITENING:
                covs.append((weight_cov, cov_k))
            else:
                variances.append((weight_cov, cov_k if diagonal else _diagonal(cov_k)))
        means.append((weight_mean, mean_k))
    mixed_mean = _weighted_sum(means)
    if diagonal:
        return mixed_mean, _weighted_sum(variances) + eps
    mixed_cov = _weighted_sum(covs)
    if variances:
        return mixed_mean, mixed_cov + (_weighted_sum(variances) + eps).diag_embed()
    identity = torch.eye(mixed_cov.shape[-1], dtype=mixed_cov.dtype, device=mixed_cov.device)
    return mixed_mean, mixed_cov.add(identity, alpha=eps)


def _weighted_sum(terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ weight · value, with weights of shape ()."""
    (weight, value), *rest = terms
    result = weight * value
    for weight, value in rest:
        result = torch.addcmul(result, weight, value)
    return result


def mix_backward(
    names: Sequence[str],
    omega_mean: Tensor,
    omega_cov: Tensor,
    statistics: Statistics,
    grad_mean: Tensor,
    grad_cov: Tensor,
) -> tuple[Tensor, Tensor, Statistics]:
    """The gradients of `mix` with respect to ω, ω' and the statistics.

    Args:
        statistics: as given to `mix`.
        grad_mean, grad_cov: of μ̂ and Σ̂, in their shapes; grad_cov is symmetric.

    Returns:
        (K,), (K,), and the gradients of the four statistics, None for those that are None.
    """
    diagonal = not WHITENING & set(names)
    weights = dict(zip(names, zip(omega_mean.unbind(), omega_cov.unbind())))
    mean, cov, batch_mean, batch_cov = statistics
    grad_omegas: dict[str, tuple[Tensor, Tensor]] = {}

    def through(full: str, twin: str, mean, cov, grad_mean, grad_cov):
        """A whitening statistic and its standardizing twin: the same mean, and cov's diagonal."""
        to_mean = to_cov = None
        grad_omega_mean = _inner(grad_mean, mean)
        for name in (full, twin):
            if name not in weights:
                continue
            weight_mean, weight_cov = weights[name]
            part = weight_mean * grad_mean
            to_mean = part if to_mean is None else to_mean + part
            if diagonal or name == full:
                grad_omegas[name] = (grad_omega_mean, _inner(grad_cov, cov))
                to_cov = weight_cov * grad_cov
            else:
                grad_variance = _diagonal(grad_cov)
                grad_omegas[name] = (grad_omega_mean, _inner(grad_variance, _diagonal(cov)))
                to_cov = torch.zeros_like(grad_cov) if to_cov is None else to_cov
                _diagonal(to_cov).add_(weight_cov * grad_variance)
        return to_mean, to_cov

    to_mean = to_cov = to_batch_mean = to_batch_cov = None
    if OF_BATCH & set(names):
        summed = (grad_mean.sum(dim=0), grad_cov.sum(dim=0))
        to_batch_mean, to_batch_cov = through("bw", "bn", batch_mean, batch_cov, *summed)
    if {"iw", "in"} & set(names):
        to_mean, to_cov = through("iw", "in", mean, cov, grad_mean, grad_cov)
    if "ln" in names:
        variance, grad_variance = (t if diagonal else _diagonal(t) for t in (cov, grad_cov))
        layer_mean, layer_variance = layer_moments(mean, variance)
        grad_layer_mean = grad_mean.sum(dim=(1, 2), keepdim=True)
        grad_layer_variance = grad_variance.sum(dim=(1, 2), keepdim=True)
        grad_omegas["ln"] = (
            _inner(grad_layer_mean, layer_mean),
            _inner(grad_layer_variance, layer_variance),
        )
        weight_mean, weight_cov = weights["ln"]
        channels = mean.shape[1] * mean.shape[2]
        to_variance = weight_cov / channels * grad_layer_variance
        from_ln = weight_mean / channels * grad_layer_mean + 2 * to_variance * (mean - layer_mean)
        to_mean = from_ln if to_mean is None else to_mean + from_ln
        to_cov = torch.zeros_like(cov) if to_cov is None else to_cov
        (to_cov if diagonal else _diagonal(to_cov)).add_(to_variance)
    grads = (torch.stack(grad) for grad in zip(*(grad_omegas[name] for name in names)))
    return *grads, Statistics(to_mean, to_cov, to_batch_mean, to_batch_cov)


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


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))
