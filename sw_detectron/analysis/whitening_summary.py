"""The table, the figure and the files of a whitening report."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tabulate import tabulate

from .drawing import PALETTE, label_layers, layers_width, style_axes
from .results import save_result
from .whitening import ENOUGH, MOST_ITERATIONS, Whiteness

_COLORED = (1e-3, 1.0)  # residuals

_COLUMNS = (
    "layer",
    "image",
    "condition",
    "residual",
    "deviation",
    "input_correlation",
    "correlation",
    "group_correlation",
)

LEGEND = f"""medians over images and groups, in evaluation mode, before γ and β
condition   λ_max / λ_min of the mixed covariance Σ̂
corr.       root mean square of a sample's off-diagonal correlations: of the input, of the output,
            and of the output within its groups. Is G right? A larger G can only undo what is out
            but not in group.
residual    |W Σ̂ W - I| / √G of the layer's W;  deviation  |W - Σ̂^(-1/2)| / |Σ̂^(-1/2)|
T for {ENOUGH:.0%}    is T enough? the smallest T with a median residual of at most {ENOUGH:.0%}"""


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


def save_whitening(folder: Path, report: dict[str, Whiteness]) -> None:
    """Write whitening.png, .svg and .csv, which has a row for each layer and image; condition,
    residual and deviation there are those of the worst group."""
    rows = []
    for name, layer in report.items():
        worst = [t.amax(dim=1) for t in (layer.condition, layer.residual, layer.deviation)]
        columns = [*worst, layer.input_correlation, layer.correlation, layer.group_correlation]
        rows += [(name, i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns)))]
    save_result(folder, "whitening", whitening_figure(report), _COLUMNS, rows)


def whitening_figure(report: dict[str, Whiteness]) -> Figure:
    """Condition numbers, correlations, and the residual by iteration, of each layer."""
    names = list(report)
    positions = np.arange(len(names))
    figure = Figure(figsize=(layers_width(len(names)) + 1.5, 9.6), layout="constrained")
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
    highest = max(layer.input_correlation.median().item() for layer in report.values())
    correlation.set_ylim(0, max(1.4 * highest, 0.1))  # with room for the legend
    correlation.legend(loc="upper right", ncols=3, frameon=False, fontsize=9)
    for axes in (condition, correlation):
        style_axes(axes)

    convergence.set_title("Residual after T iterations (median); dots: the T in use", fontsize=10)
    residuals = torch.stack(
        [layer.residuals.flatten(1).median(dim=1)[0] for layer in report.values()]
    )
    mesh = convergence.pcolormesh(
        np.arange(len(names) + 1) - 0.5,
        np.arange(MOST_ITERATIONS + 1) + 0.5,
        residuals.clamp(min=_COLORED[0]).numpy(force=True).T,
        norm=LogNorm(*_COLORED),
        cmap="cividis",
    )
    used = [(p, w.num_iterations) for p, w in zip(positions, report.values()) if w.num_iterations]
    if used:
        convergence.plot(*zip(*used), "o", color="white", markeredgecolor="black", markersize=5)
    convergence.set_ylabel("T")
    convergence.set_yticks(range(2, MOST_ITERATIONS + 1, 2))
    figure.colorbar(mesh, ax=convergence, extend="min", label="|W Σ̂ W − I| / √G")
    label_layers(convergence, names)
    return figure


def _needed(layer: Whiteness) -> str:
    if layer.residuals.isnan().any():
        return "-"
    return str(layer.iterations_needed or f"> {MOST_ITERATIONS}")
