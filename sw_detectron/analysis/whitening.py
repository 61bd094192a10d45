"""How white SW's output is: is T enough, is G right?

Shape shorthand in this module:
    N: samples;  C: channels;  g: channel groups;  G: channels in a group;  L: pixels of a sample
    T: iterations
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn

from ..errors import UserError
from ..layers import SwitchWhiten2d
from ..layers.inverse_sqrt import eigh_inverse_sqrt, newton_inverse_sqrt
from ..layers.mixing import OF_BATCH, WHITENING, mix
from ..modeling.summary import sw_layers
from .drawing import PALETTE, label_layers, layers_width, style_axes

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
    diagonal = not WHITENING & set(layer.statistics)
    newton = layer.whitening == "newton" and not diagonal

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
        residuals=torch.full_like(residuals, torch.nan) if diagonal else residuals,
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
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, name=name: found[name].append(whiteness(module, args[0]))
        )
        for name, layer in layers.items()
    ]
    device = next(backbone.parameters()).device
    training = model.training
    model.eval()
    try:
        for batch in batches:
            backbone(batch.to(device))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    report = {name: _join(parts) for name, parts in found.items() if parts}
    if not report:
        raise UserError("nothing to report: the model's backbone has no SW layer")
    return report


def whitening_table(report: dict[str, Whiteness]) -> str:
    """Medians over images and groups, for people to read, with a legend."""
    rows = [
        (
            name,
            ",".join(layer.statistics),
            layer.num_pergroup,
            f"{layer.condition.median():.3g}",
            f"{layer.condition.max():.3g}",
            f"{layer.input_correlation.median():.3f}",
            f"{layer.correlation.median():.3f}",
            f"{layer.group_correlation.median():.3f}",
            layer.num_iterations or "-",
            f"{layer.residual.median():.2g}",
            f"{layer.deviation.median():.2g}",
            _needed(layer),
        )
        for name, layer in report.items()
    ]
    headers = "layer|statistics|G|condition|(max)|corr. in|corr. out|in group|T|residual|deviation"
    headers = [*headers.split("|"), f"T for {ENOUGH:.0%}"]
    table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    return f"{table}\n\n{LEGEND}"


LEGEND = f"""medians over images and groups, in evaluation mode, before γ and β
condition   λ_max / λ_min of the mixed covariance Σ̂
corr.       root mean square of a sample's off-diagonal correlations: of the input, of the output,
            and of the output within its groups. Is G right? A larger G can only undo what is out
            but not in group.
residual    |W Σ̂ W - I| / √G of the layer's W;  deviation  |W - Σ̂^(-1/2)| / |Σ̂^(-1/2)|
T for {ENOUGH:.0%}    is T enough? the iterations after which the median residual is at most {ENOUGH:.0%}"""


def whitening_figure(report: dict[str, Whiteness]) -> Figure:
    """Condition numbers, correlations, and the residual by iteration, of each layer."""
    names = list(report)
    positions = np.arange(len(names))
    figure = Figure(figsize=(layers_width(len(names)) + 2.2, 9.6), layout="constrained")
    condition, correlation, convergence = figure.subplots(3, 1, sharex=True)

    condition.set_title("Condition number of Σ̂ (median, quartiles, range)", fontsize=10)
    for position, layer in zip(positions, report.values()):
        low, first, middle, third, high = np.quantile(
            layer.condition.numpy(force=True), (0, 0.25, 0.5, 0.75, 1)
        )
        condition.vlines(position, low, high, color=PALETTE[0], linewidth=1)
        condition.vlines(position, first, third, color=PALETTE[0], linewidth=4)
        condition.plot(position, middle, "o", color="white", markeredgecolor=PALETTE[0])
    condition.set_yscale("log")

    correlation.set_title("Off-diagonal correlation of a sample (median)", fontsize=10)
    for label, attribute, marker, color in (
        ("input", "input_correlation", "o", PALETTE[6]),
        ("output", "correlation", "s", PALETTE[0]),
        ("output, in groups", "group_correlation", "^", PALETTE[1]),
    ):
        values = [getattr(layer, attribute).median().item() for layer in report.values()]
        correlation.plot(
            positions, values, marker=marker, color=color, linewidth=1, markersize=5, label=label
        )
    correlation.set_ylim(bottom=0)
    correlation.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    for axes in (condition, correlation):
        style_axes(axes)

    convergence.set_title("Residual after T iterations (median); dots: the T in use", fontsize=10)
    residuals = torch.stack(
        [layer.residuals.flatten(1).median(dim=1)[0] for layer in report.values()]
    )
    iterations = np.arange(1, MOST_ITERATIONS + 1)
    mesh = convergence.pcolormesh(
        positions,
        iterations,
        residuals.clamp(min=1e-6).numpy(force=True).T,
        norm=LogNorm(1e-6, 1),
        cmap="cividis",
        shading="nearest",
    )
    used = [(p, w.num_iterations) for p, w in zip(positions, report.values()) if w.num_iterations]
    if used:
        convergence.plot(*zip(*used), "o", color="white", markeredgecolor="black", markersize=5)
    convergence.set_ylabel("T")
    convergence.set_yticks(iterations[1::2])
    figure.colorbar(mesh, ax=convergence, extend="both", label="|W Σ̂ W − I| / √G")
    label_layers(convergence, names)
    return figure


def _mixed_covariance(layer: SwitchWhiten2d, mean: Tensor, cov: Tensor) -> Tensor:
    """Σ̂ (N, g, G, G) of Eq. 6 with the running values, as a full matrix for any set.

    Args:
        mean, cov: (N, g, G) and (N, g, G, G), of each sample.
    """
    statistics = set(layer.statistics)
    diagonal = not WHITENING & statistics
    batch_mean, batch_cov = layer.running_mean[..., 0].double(), layer.running_cov.double()
    if diagonal:
        cov, batch_cov = (c.diagonal(dim1=-2, dim2=-1) for c in (cov, batch_cov))
    var_weight = layer.sw_mean_weight if layer.sw_var_weight is None else layer.sw_var_weight
    _, mixed = mix(
        layer.statistics,
        layer.sw_mean_weight.double().softmax(0),
        var_weight.double().softmax(0),
        mean,
        cov,
        batch_mean if OF_BATCH & statistics else None,
        batch_cov if OF_BATCH & statistics else None,
        layer.eps,
    )
    mixed = mixed.expand(len(mean), *mixed.shape[1:])
    return mixed.diag_embed() if diagonal else mixed


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


def _needed(layer: Whiteness) -> str:
    if layer.residuals.isnan().any():
        return "-"
    return str(layer.iterations_needed or f"> {MOST_ITERATIONS}")
