"""Swaps norms in a built model, keeping their state."""

from collections.abc import Sequence

import torch
from detectron2.layers import get_norm
from torch import Tensor, nn

from ..layers import SwitchWhiten2d
from .norms import NormFactory
from .placement import NumberedConv, find_resnet, norm_of, numbered_convs, place


def replace_norms(
    model: nn.Module, placement: str | Sequence[int], norm: str | NormFactory = "SW"
) -> dict[str, nn.Module]:
    """Put `norm` on the placed layers of the ResNet in `model`, in place.

    The ResNet may be Detectron2's, torchvision's, timm's or a He-style one for CIFAR (see
    `placement`), and the replaced norm any BN (synchronized and frozen ones too) or GN.

    γ, β and the running statistics carry over (the running covariance becomes
    diag(running_var); ε is the new layer's own), and so do dtype, device, train/eval mode and
    which of γ and β learn. An activation inside of the norm, as timm has it, stays. An SW layer is
    frozen if its convolution is frozen and the norm before it had nothing that learns.

    Args:
        model: a ResNet, or a model that contains one.
        placement: see `placement.place`.
        norm: a registered or built-in norm's name, or a function from channels to a layer.

    Returns:
        The norms that were replaced, by the name of their convolution in the ResNet.

    Raises:
        UserError: there is not one ResNet, its structure is not understood, or the placement
            does not fit it.
        ValueError: the norm does not fit a layer's channels; the message names the layer.
    """
    _, resnet = find_resnet(model)
    taken = place(numbered_convs(resnet), placement)
    new_norms = {conv.name: _make_norm(norm, conv) for conv in taken}  # all, before any is swapped
    replaced = {}
    for conv in taken:
        old, new = norm_of(resnet, conv), new_norms[conv.name]
        _carry_over(old, new, conv.module)
        owner, _, attribute = conv.norm_name.rpartition(".")
        setattr(resnet.get_submodule(owner), attribute, new)
        replaced[conv.name] = old
    return replaced


def _make_norm(norm: str | NormFactory, conv: NumberedConv) -> nn.Module:
    try:
        return get_norm(norm, conv.channels)
    except ValueError as error:
        raise ValueError(f"layer {conv.number} ({conv.name}): {error}") from None


@torch.no_grad()
def _carry_over(old: nn.Module | None, new: nn.Module, conv: nn.Module) -> None:
    """Give `new` the state of the norm `old` of a convolution; None is no norm."""
    state = {
        name: value
        for name in ("weight", "bias", "running_mean", "running_var")
        if (value := getattr(old, name, None)) is not None
    }
    new.to(next(iter(state.values()), conv.weight))
    new.train((conv if old is None else old).training)
    if isinstance(new, SwitchWhiten2d) and "running_var" in state:
        groups = state.pop("running_var").view(-1, new.num_pergroup)
        new.running_cov.copy_(groups.diag_embed())
    for name, source in state.items():
        target = getattr(new, name, None)
        if target is not None:
            target.copy_(source.view_as(target))
    # A FrozenBN holds γ and β as buffers, and does not say whether the layer is to learn.
    parameters = {k: v for k, v in state.items() if isinstance(v, nn.Parameter)}
    for name, source in parameters.items():
        if isinstance(getattr(new, name, None), nn.Parameter):
            getattr(new, name).requires_grad_(source.requires_grad)
    learns = any(p.requires_grad for p in (conv.weight, *parameters.values()))
    if isinstance(new, SwitchWhiten2d) and not learns:
        new.freeze()
    if hasattr(old, "act"):
        _keep_activation(old, new)


def _keep_activation(old: nn.Module, new: nn.Module) -> None:
    """Let `new` end with the dropout and the activation of one of timm's BatchNormAct2d.

    As children under their old names, applied by a hook: neither the norm's class nor a name in
    the state dict changes.
    """
    new.drop, new.act = old.drop, old.act
    new.register_forward_hook(_activate)


def _activate(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return norm.act(norm.drop(output))
