"""Swaps norms in a built model, keeping their state."""

from collections.abc import Sequence

import torch
from detectron2.layers import get_norm
from torch import nn

from ..layers import SwitchWhiten2d
from ..layers.norm_registry import NormFactory
from .placement import NumberedConv, find_resnet, numbered_convs, place


def replace_norms(
    model: nn.Module, placement: str | Sequence[int], norm: str | NormFactory = "SW"
) -> dict[str, nn.Module]:
    """Put `norm` on the placed layers of the ResNet in `model`, in place.

    γ, β and the running statistics carry over (the running covariance becomes
    diag(running_var)), and so do device, dtype and train/eval mode. Where the convolution is
    frozen, an SW layer is frozen with it.

    Args:
        model: a Detectron2 ResNet, or a model that contains one.
        placement: see `placement.place`.
        norm: a registered or built-in norm's name, or a function from channels to a layer.

    Returns:
        The norms that were replaced, by the name of their convolution in the ResNet.

    Raises:
        UserError: the placement does not fit the network.
        ValueError: the norm does not fit a layer's channels; the message names the layer.
    """
    _, resnet = find_resnet(model)
    taken = place(numbered_convs(resnet), placement)
    new_norms = {conv.name: _make_norm(norm, conv) for conv in taken}  # all, before any is swapped
    replaced = {}
    for conv in taken:
        old, new = conv.module.norm, new_norms[conv.name]
        new.to(conv.module.weight).train(conv.module.training)
        _carry_over(old, new)
        if isinstance(new, SwitchWhiten2d) and not conv.module.weight.requires_grad:
            new.freeze()
        conv.module.norm = new
        replaced[conv.name] = old
    return replaced


def _make_norm(norm: str | NormFactory, conv: NumberedConv) -> nn.Module:
    try:
        return get_norm(norm, conv.channels)
    except ValueError as error:
        raise ValueError(f"layer {conv.number} ({conv.name}): {error}") from None


@torch.no_grad()
def _carry_over(old: nn.Module | None, new: nn.Module) -> None:
    for name in ("weight", "bias", "running_mean"):
        source, target = getattr(old, name, None), getattr(new, name, None)
        if source is not None and target is not None:
            target.copy_(source.view_as(target))
    variance = getattr(old, "running_var", None)
    if variance is not None and isinstance(new, SwitchWhiten2d):
        new.running_cov.copy_(variance.view(-1, new.num_pergroup).diag_embed())
    elif variance is not None and getattr(new, "running_var", None) is not None:
        new.running_var.copy_(variance)
