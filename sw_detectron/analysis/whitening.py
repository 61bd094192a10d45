"""How white SW's output is: is T enough, is G right?

Shape shorthand in this module:
    N: samples;  C: channels;  g: channel groups;  G: channels in a group;  L: pixels of a sample
    T: iterations
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..layers import SwitchWhiten2d
from ..layers.inverse_sqrt import eigh_inverse_sqrt, newton_inverse_sqrt
from ..layers.mixing import mix
from ..modeling.observing import in_evaluation, observed
from ..modeling.summary import sw_layers

MOST_ITERATIONS = 12
ENOUGH = 0.01
"""A residual up to this is called converged."""


@dataclass(frozen=True)
class Whiteness:
    """What a layer does to a batch of images, in evaluation mode, without γ and β.

    A correlation is the root mean square of the off-diagonal entries of a sample's correlation
    matrix: 0 for the identity, 1 if all channels are equal.

    Attributes:
        statistics: the layer's set.
        num_pergroup: G.
        num_iterations: T; None where no iteration is used, for `whitening="eigh"` or a set of
            standardizing statistics.
        condition: λ_max / λ_min of the mixed covariance Σ̂, (N, g).
        input_correlation: (N,), over all pairs of channels of the input.
        correlation: (N,), over all pairs of channels of the output.
        group_correlation: (N,), over the pairs within a group, which whitening is to undo.
        residual: |W Σ̂ W - I|_F / √G of the layer's inverse square root W, (N, g).
        deviation: |W - Σ̂^(-1/2)|_F / |Σ̂^(-1/2)|_F, to the exact one, (N, g).
        residuals: the residual after 1 … MOST_ITERATIONS of Newton's iteration,
            (MOST_ITERATIONS, N, g); NaN for a set of standardizing statistics.
    """

    statistics: tuple[str, ...]
    num_pergroup: int
    num_iterations: int | None
    condition: Tensor
    input_correlation: Tensor
    correlation: Tensor
    group_correlation: Tensor
    residual: Tensor
    deviation: Tensor
    residuals: Tensor

    @property
    def iterations_needed(self) -> int | None:
        """The smallest T whose median residual is at most ENOUGH; None if there is none up to
        MOST_ITERATIONS, or no iteration."""
        for index, residual in enumerate(self.residuals):
            if residual.median() <= ENOUGH:
                return index + 1
        return None


@torch.no_grad()
def whiteness(layer: SwitchWhiten2d, x: Tensor) -> Whiteness:
    """Measure what an SW layer does to an input in evaluation mode, in float64.

    Args:
        layer: with running values, if its set takes them.
        x: (N, C, H, W), not empty.
    """
    size = layer.num_pergroup
    pixels = x.double().flatten(2).unflatten(1, (-1, size))  # (N, g, G, L)
    mean = pixels.mean(dim=-1)
    centred = pixels - mean[..., None]
    cov = centred @ centred.mT / pixels.shape[-1]
    mixed_cov = _mixed_covariance(layer, mean, cov)
    newton = layer.whitening == "newton" and layer.whitens

    exact = eigh_inverse_sqrt(mixed_cov, floor=layer.eps)
    roots = [newton_inverse_sqrt(mixed_cov, t) for t in range(1, MOST_ITERATIONS + 1)]
    residuals = torch.stack([_residual(root, mixed_cov) for root in roots])
    used = newton_inverse_sqrt(mixed_cov, layer.num_iterations) if newton else exact
    eigenvalues = torch.linalg.eigvalsh(mixed_cov)
    output = (used @ centred).flatten(1, 2)  # (N, C, L)
    return Whiteness(
        statistics=layer.statistics,
        num_pergroup=size,
        num_iterations=layer.num_iterations if newton else None,
        condition=eigenvalues[..., -1] / eigenvalues[..., 0],
        input_correlation=_correlation(centred.flatten(1, 2)),
        correlation=_correlation(output),
        group_correlation=_group_correlation(output, size),
        residual=_residual(used, mixed_cov),
        deviation=_norm(used - exact) / _norm(exact),
        residuals=residuals if layer.whitens else torch.full_like(residuals, torch.nan),
    )


@torch.no_grad()
def whitening_report(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Whiteness]:
    """`whiteness` of every SW layer that the backbone of a model reaches, for batches of images.

    The model is in evaluation mode while it is measured, and as it was afterwards.

    Args:
        model: a detector with a `backbone`, or a backbone.
        batches: (N, 3, H, W) each, normalized.

    Returns:
        By the layer's name, in the order of the network.

    Raises:
        UserError: there is no SW layer, or no image.
    """
    backbone = getattr(model, "backbone", model)
    layers = {row.name: row.layer for row in sw_layers(model)}
    found: dict[str, list[Whiteness]] = {name: [] for name in layers}
    device = next(backbone.parameters()).device

    def measure(name: str, x: Tensor, _: Tensor) -> None:
        found[name].append(whiteness(layers[name], x))

    with in_evaluation(model), observed(layers, measure):
        for batch in batches:
            backbone(batch.to(device))
    report = {name: _join(parts) for name, parts in found.items() if parts}
    if not report:
        raise UserError("nothing to report: the model's backbone has no SW layer")
    return report


def _mixed_covariance(layer: SwitchWhiten2d, mean: Tensor, cov: Tensor) -> Tensor:
    """Σ̂ (N, g, G, G) of Eq. 6 with the running values, as a full matrix for any set.

    Args:
        mean, cov: (N, g, G) and (N, g, G, G), of each sample.
    """
    batch_mean, batch_cov = layer.running_mean[..., 0].double(), layer.running_cov.double()
    if not layer.whitens:
        cov, batch_cov = (c.diagonal(dim1=-2, dim2=-1) for c in (cov, batch_cov))
    var_weight = layer.sw_mean_weight if layer.sw_var_weight is None else layer.sw_var_weight
    _, mixed = mix(
        layer.statistics,
        layer.sw_mean_weight.double().softmax(0),
        var_weight.double().softmax(0),
        mean,
        cov,
        batch_mean if layer.uses_batch else None,
        batch_cov if layer.uses_batch else None,
        layer.eps,
    )
    mixed = mixed.expand(len(mean), *mixed.shape[1:])
    return mixed if layer.whitens else mixed.diag_embed()


def _residual(root: Tensor, cov: Tensor) -> Tensor:
    identity = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    return _norm(root @ cov @ root - identity) / cov.shape[-1] ** 0.5


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix)


def _correlation_matrix(centred: Tensor) -> Tensor:
    """(…, C, C) of centred values (…, C, L); a constant channel correlates with none."""
    unit = torch.nn.functional.normalize(centred, dim=-1)
    return unit @ unit.mT


def _correlation(centred: Tensor) -> Tensor:
    """Root mean square off the diagonal of the correlation matrix of (…, C, L); 0 for C = 1."""
    matrix = _correlation_matrix(centred)
    size = matrix.shape[-1]
    matrix.diagonal(dim1=-2, dim2=-1).zero_()
    return _norm(matrix) / max(1, size * (size - 1)) ** 0.5


def _group_correlation(output: Tensor, size: int) -> Tensor:
    """`_correlation` over the pairs within groups, of (N, C, L): (N,)."""
    groups = output.unflatten(1, (-1, size))
    return _correlation(groups).square().mean(dim=1).sqrt()


def _join(parts: list[Whiteness]) -> Whiteness:
    """The measurements of several batches as those of one."""
    values = {}
    for name in (field.name for field in fields(Whiteness)):
        value = getattr(parts[0], name)
        if isinstance(value, Tensor):
            samples = 1 if name == "residuals" else 0
            value = torch.cat([getattr(part, name) for part in parts], dim=samples).cpu()
        values[name] = value
    return Whiteness(**values)
