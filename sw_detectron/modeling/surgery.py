"""Swaps norms in a built model, keeping their state."""

import logging
from collections.abc import Sequence

import torch
from detectron2.layers import get_norm
from torch import Tensor, nn

from ..errors import UserError
from ..layers import SwitchWhiten2d
from .norms import NormFactory, UnknownNorm
from .placement import NumberedConv, channels_of, find_network, norm_of, numbered_convs, place
from .tracing import check_flow

logger = logging.getLogger(__name__)


def replace_norms(
    model: nn.Module, placement: str | Sequence[int], norm: str | NormFactory = "SW"
) -> dict[str, nn.Module]:
    """Put `norm` on the placed layers of a model's ResNet or VGG, in place: all of them, or none.

    A ResNet may be Detectron2's, torchvision's, timm's or a He-style one for CIFAR (see
    `placement`), and the replaced norm any BN (synchronized and frozen ones too), GN or SW. A
    ResNet that is not Detectron2's is run once, on an image of zeros, to see that its norms follow
    their convolutions (see `tracing`).

    γ, β, the running statistics and the process group carry over (ε is the new layer's own), and so
    do dtype, device, train/eval mode and which parameters learn. A running variance becomes a
    diagonal running covariance; of a running covariance the new layer gets its own blocks on the
    diagonal, a BN the diagonal. Importance weights carry over to an SW layer with the same set. An
    activation inside of the norm, as timm has it, stays. An SW layer is frozen if the SW layer
    before it was, or if its convolution is frozen and the norm before it had nothing that learns.
    What a user may miss afterwards is in the log.

    Args:
        model: a ResNet or VGG, or a model that contains one.
        placement: see `placement.place`.
        norm: a registered or built-in norm's name, or a function from channels to a layer.

    Returns:
        The norms that were replaced, by the name of their convolution in the network.

    Raises:
        UserError: there is not one network, its structure is not understood, or the placement or
            the norm does not fit it; the message names the layer. Nothing has changed then.
    """
    _, network = find_network(model)
    convs = numbered_convs(network)
    taken = place(convs, placement)
    if not taken:
        return {}
    check_flow(network, convs, taken)
    old_norms = [norm_of(network, conv) for conv in taken]
    new_norms = [_make_norm(norm, conv) for conv in taken]
    if len(set(map(id, new_norms))) < len(taken):
        raise UserError(
            "the norm's factory gives one layer twice; it must make a new one each time"
        )
    lost = {
        conv.name: _carry_over(*norms, conv) for conv, *norms in zip(taken, old_norms, new_norms)
    }
    for conv, new in zip(taken, new_norms):
        owner, _, attribute = conv.norm_name.rpartition(".")
        setattr(network.get_submodule(owner), attribute, new)
    for what in dict.fromkeys(part for parts in lost.values() for part in parts):
        layers = ", ".join(name for name, parts in lost.items() if what in parts)
        logger.warning(f"{what} at {layers}; train or calibrate the network")
    return {conv.name: old for conv, old in zip(taken, old_norms)}


def _make_norm(norm: str | NormFactory, conv: NumberedConv) -> nn.Module:
    try:
        new = get_norm(norm, conv.channels)
    except UnknownNorm:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{_misfit(conv)}: {error}") from error
    if not isinstance(new, nn.Module):
        raise UserError(
            f"{_misfit(conv)}: {norm!r} makes no layer; for a network without SW, use placement "
            '"none"'
        )
    if channels_of(new) not in (None, conv.channels):
        raise UserError(
            f"{_misfit(conv)}: it has {channels_of(new)} channels in place of {conv.channels}"
        )
    return new


def _misfit(conv: NumberedConv) -> str:
    return f"the norm of layer {conv.number} ({conv.name}) does not fit"


@torch.no_grad()
def _carry_over(old: nn.Module | None, new: nn.Module, conv: NumberedConv) -> list[str]:
    """Give `new` the state of the norm `old` of a convolution; None is no norm.

    Returns:
        What `new` has no place for, in words.
    """
    names = ("weight", "bias", "running_mean", "running_var", "running_cov")
    state = {k: v for k in names if isinstance(v := getattr(old, k, None), Tensor)}
    new.to(next(iter(state.values()), conv.module.weight))
    new.train((conv.module if old is None else old).training)
    if (cov := _covariance(old, state)) is not None:
        if isinstance(new, SwitchWhiten2d):
            state["running_cov"] = _reblock(cov, new.num_pergroup)
        else:
            state["running_var"] = _reblock(cov, 1)
    lost = []
    for name, source in state.items():
        target = getattr(new, name, None)
        if target is None:
            neutral = {"weight": 1, "bias": 0}.get(name)
            if neutral is not None and not source.is_meta and (source != neutral).any():
                lost.append(f"γ or β has no place in {type(new).__name__} and is lost")
            continue
        if target.numel() != source.numel():
            raise UserError(f"{_misfit(conv)}: {name} has {target.numel()} values")
        target.copy_(source.view_as(target))
    if isinstance(old, SwitchWhiten2d) and isinstance(new, SwitchWhiten2d):
        lost += _carry_importance(old, new)
    # A FrozenBN holds γ and β as buffers, and does not say whether the layer is to learn.
    old_parameters = {} if old is None else dict(old.named_parameters(recurse=False))
    for name, parameter in new.named_parameters(recurse=False):
        if name in old_parameters:
            parameter.requires_grad_(old_parameters[name].requires_grad)
    if isinstance(new, SwitchWhiten2d):
        new.process_group = new.process_group or getattr(old, "process_group", None)
        learns = any(p.requires_grad for p in (conv.module.weight, *old_parameters.values()))
        if not learns or (isinstance(old, SwitchWhiten2d) and old.frozen):
            new.freeze()
    if hasattr(old, "act"):
        _keep_activation(old, new)
    return lost


def _covariance(old: nn.Module | None, state: dict[str, Tensor]) -> Tensor | None:
    """Take the second moments out of a state: blocks (g, G, G), those of a BN with G = 1."""
    variance, cov = state.pop("running_var", None), state.pop("running_cov", None)
    if isinstance(old, SwitchWhiten2d) and not old.whitens:
        variance = cov.diagonal(dim1=-2, dim2=-1)  # all that such a set keeps up to date
    return cov if variance is None else variance.reshape(-1, 1, 1)


def _reblock(cov: Tensor, size: int) -> Tensor:
    """Of a block-diagonal covariance (g, G, G), the blocks of another size on its diagonal."""
    if cov.shape[-1] == size:
        return cov
    full = torch.block_diag(*cov)
    blocks = full.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # (g', G', g', G')
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def _carry_importance(old: SwitchWhiten2d, new: SwitchWhiten2d) -> list[str]:
    if old.statistics != new.statistics:
        before, after = (", ".join(layer.statistics) for layer in (old, new))
        return [f"importance weights of {before} became initial ones of {after}"]
    new.sw_mean_weight.copy_(old.sw_mean_weight)
    var_weight = old.sw_mean_weight if old.sw_var_weight is None else old.sw_var_weight
    if new.sw_var_weight is not None:
        new.sw_var_weight.copy_(var_weight)
    elif not var_weight.is_meta and not torch.equal(var_weight, old.sw_mean_weight):
        return ["the covariance's own importance weights are lost, as they are tied"]
    return []


def _keep_activation(old: nn.Module, new: nn.Module) -> None:
    """Let `new` end with the dropout and the activation of one of timm's BatchNormAct2d.

    As children under their old names, applied by `new` itself if it is such a norm, and else by a
    hook: neither the norm's class nor a name in the state dict changes.
    """
    has_own = hasattr(new, "act")
    new.drop, new.act = old.drop, old.act
    if not has_own:
        new.register_forward_hook(_activate)


def _activate(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return norm.act(norm.drop(output))
