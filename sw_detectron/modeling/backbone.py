"""Backbones with SW on the placed layers, registered with Detectron2."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, ResNet, build_resnet_backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import nn

from ..errors import UserError
from .cifar_resnet import make_cifar_resnet
from .norms import SW_NORMS, NormFactory
from .padding import set_padding
from .surgery import replace_norms
from .vgg import VGG


def sw_norm_from_config(cfg: CfgNode) -> str | NormFactory:
    """The norm of the placed layers: MODEL.SW.NORM with the other keys of MODEL.SW applied.

    Those keys describe an SW layer; a norm that is none (BN, GN, …, for ablations) is taken by its
    name alone.
    """
    sw = cfg.MODEL.SW
    if not sw.NORM:
        raise UserError(
            "MODEL.SW.NORM is empty: name the norm of the placed layers, such as SW; for a network "
            "without SW, set MODEL.SW.PLACEMENT to none"
        )
    if sw.NORM not in SW_NORMS:
        if sw.STATISTICS:
            raise UserError(
                f"MODEL.SW.STATISTICS is set, but MODEL.SW.NORM is {sw.NORM!r}, which has no "
                f"statistics to choose; use one of {', '.join(SW_NORMS)}"
            )
        return sw.NORM
    chosen = {"statistics": tuple(sw.STATISTICS)} if sw.STATISTICS else {}
    return functools.partial(
        SW_NORMS[sw.NORM],
        num_pergroup=sw.NUM_PERGROUP,
        whitening=sw.WHITENING,
        num_iterations=sw.NUM_ITERATIONS,
        tie_weight=sw.TIE_WEIGHT,
        eps=sw.EPS,
        momentum=sw.MOMENTUM,
        sync=sw.SYNC,
        **chosen,
    )


Network = TypeVar("Network", bound=nn.Module)


def with_norms(
    resnet: Network,
    placement: str | Sequence[int],
    norm: str | NormFactory = "SW",
    **options: Any,
) -> Network:
    """A ResNet or VGG with `norm` on the placed layers, for building models by nested calls.

    Args:
        resnet: it is changed in place; a VGG is taken too.
        placement, norm: see `replace_norms`.
        options: arguments of `SwitchWhiten2d`, such as num_pergroup, where `norm` is one of
            SW_NORMS.

    Raises:
        UserError: placement, norm or options do not fit each other or the network.
    """
    if options and norm not in SW_NORMS:
        raise UserError(
            f"norm {norm!r} takes no options, got {', '.join(options)}; "
            f"use one of {', '.join(SW_NORMS)}"
        )
    replace_norms(
        resnet, placement, functools.partial(SW_NORMS[norm], **options) if options else norm
    )
    return resnet


@BACKBONE_REGISTRY.register()
def build_sw_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Detectron2's ResNet with MODEL.RESNETS.NORM, and SW on the layers of MODEL.SW."""
    return _with_sw(cfg, build_resnet_backbone(cfg, input_shape))


@BACKBONE_REGISTRY.register()
def build_cifar_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """He et al.'s ResNet for CIFAR with MODEL.RESNETS.NORM, and SW on the layers of MODEL.SW.

    Of MODEL.RESNETS it takes DEPTH (20, 32, 44, 56 or 110), NORM and OUT_FEATURES.
    """
    resnet = make_cifar_resnet(
        cfg.MODEL.RESNETS.DEPTH,
        norm=cfg.MODEL.RESNETS.NORM,
        out_features=cfg.MODEL.RESNETS.OUT_FEATURES,
        in_channels=input_shape.channels,
    )
    return _with_sw(cfg, resnet.freeze(cfg.MODEL.BACKBONE.FREEZE_AT))


@BACKBONE_REGISTRY.register()
def build_sw_vgg_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> VGG:
    """DeepLab's VGG-16, as MODEL.VGG says, without norms but on the layers of MODEL.SW."""
    keys = cfg.MODEL.VGG
    vgg = VGG(input_shape.channels, keys.CHANNELS, keys.FC_CHANNELS, keys.OUT_FEATURES)
    return _with_sw(cfg, vgg.freeze(cfg.MODEL.BACKBONE.FREEZE_AT))


def _with_sw(cfg: CfgNode, network: Network) -> Network:
    placement = list(cfg.MODEL.SW.LAYERS) or cfg.MODEL.SW.PLACEMENT
    with_norms(network, placement, sw_norm_from_config(cfg))
    set_padding(network, cfg.MODEL.SW.PADDING)
    return network


def _build_fpn(cfg: CfgNode, bottom_up: ResNet, top_block: nn.Module) -> FPN:
    fpn = FPN(
        bottom_up=bottom_up,
        in_features=cfg.MODEL.FPN.IN_FEATURES,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=top_block,
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )
    set_padding(fpn, cfg.MODEL.SW.PADDING)
    return fpn


@BACKBONE_REGISTRY.register()
def build_sw_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with P6 by pooling, as the R-CNN family uses it, over the SW ResNet."""
    return _build_fpn(cfg, build_sw_resnet_backbone(cfg, input_shape), LastLevelMaxPool())


@BACKBONE_REGISTRY.register()
def build_sw_retinanet_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """FPN with P6 and P7 by convolution on C5, as RetinaNet uses it, over the SW ResNet."""
    bottom_up = build_sw_resnet_backbone(cfg, input_shape)
    top_block = LastLevelP6P7(bottom_up.output_shape()["res5"].channels, cfg.MODEL.FPN.OUT_CHANNELS)
    return _build_fpn(cfg, bottom_up, top_block)
