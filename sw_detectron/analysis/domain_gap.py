"""How far apart a network's layers see two sets of images (Fig. 3 and section 4.3).

The paper gives the MMD "of deep features" with Gaussian kernels, after the normalization of each
layer. Here a feature is what the norm of a convolution gives for an image, averaged in the cells of
a grid; the kernels' bandwidths follow the layer's median distance, so that layers and networks of
different scale compare.
"""

from collections.abc import Iterable

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from ..modeling.observing import in_evaluation, observed
from ..modeling.placement import find_network, norm_of, numbered_convs
from .drawing import PALETTE, label_layers, layers_width, shorten, style_axes
from .mmd import RELATIVE_BANDWIDTHS, median_distance, squared_mmd

GRID = 4


@torch.no_grad()
def layer_features(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """The features of images after the norm of every convolution of a model's ResNet or VGG, or
    after the convolution itself where it has no norm.

    The network is in evaluation mode while they are taken, and as it was afterwards.

    Args:
        model: a ResNet or VGG, or a model that contains one.
        batches: (N, 3, H, W) each, normalized.

    Returns:
        By the name of the convolution, in forward order: (images, C * GRID²), float32.

    Raises:
        UserError: there is not one ResNet or VGG in the model.
    """
    _, network = find_network(model)
    convs = numbered_convs(network)
    # The convolution itself, if it has no norm, is what the next layer sees.
    layers = {conv.name: norm_of(network, conv) or conv.module for conv in convs}
    features: dict[str, list[Tensor]] = {name: [] for name in layers}

    def keep(name: str, _: Tensor, output: Tensor) -> None:
        features[name].append(adaptive_avg_pool2d(output.float(), GRID).flatten(1).cpu())

    device = next(network.parameters()).device
    with in_evaluation(network), observed(layers, keep):
        for batch in batches:
            network(batch.to(device))
    return {name: torch.cat(collected) for name, collected in features.items() if collected}


def domain_gap(source: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, float]:
    """MMD² between two sets of images in each layer; see `mmd.squared_mmd`.

    Args:
        source, target: of `layer_features`, for the same network.

    Raises:
        ValueError: a set has fewer than two images.
    """
    gaps = {}
    for name in source:
        x, y = source[name], target[name]
        median = median_distance(x, y)
        gaps[name] = squared_mmd(x, y, [factor * median for factor in RELATIVE_BANDWIDTHS])
    return gaps


def domain_gap_figure(gaps: dict[str, dict[str, float]]) -> Figure:
    """MMD² of each layer, a line for each of one or more networks (Fig. 3).

    Args:
        gaps: by the network's name, as `domain_gap` returns them. Networks share the axis of the
            longest, in forward order.
    """
    layers = list(max(gaps.values(), key=len))
    size = (layers_width(len(layers)), 4.2 + 0.2 * len(gaps))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for index, (network, by_layer) in enumerate(gaps.items()):
        axes.plot(
            range(len(by_layer)),
            list(by_layer.values()),
            color=PALETTE[index % len(PALETTE)],
            marker="osD^v"[index % 5],
            markersize=4,
            linewidth=1.4,
            label=shorten(network, 60),
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("MMD² between the two sets")
    label_layers(axes, layers)
    style_axes(axes)
    figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    return figure
