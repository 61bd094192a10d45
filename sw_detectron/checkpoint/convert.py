"""Turns a checkpoint of a BN ResNet, or of VGG-16, into one with SW on the placed layers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import ResNet, build_resnet_backbone
from torch import Tensor, nn

from ..config import add_sw_config
from ..data.images import image_batches
from ..errors import UserError
from ..layers import SwitchWhiten2d
from ..modeling import warm_start as warm_starting
from ..modeling.backbone import sw_norm_from_config
from ..modeling.calibration import calibrate, unfuse
from ..modeling.cifar_resnet import make_cifar_resnet
from ..modeling.placement import numbered_convs
from ..modeling.surgery import replace_norms
from ..modeling.vgg import VGG
from .conversion_result import Conversion, Images, placed_layers
from .facts import FACTS_KEY, facts_in
from .reading import read_file, weights_in
from .run_record import RunRecord, run_record_in
from .source_config import network_config, own_sw_layers, placement_config, sw_config
from .sources import Architecture, Backbone, find_backbone, recognize_architecture

# The running variances of a norm y = s x + b in Detectron2: loaded from Caffe2's weights it is 1,
# and initially, such that it is that norm exactly, 1 - ε.
FOLDED_VARIANCES = (1.0, 1 - 1e-5)

# Where SW goes if nobody says, by the family of the network.
_PLACEMENTS = {"resnet": "imagenet", "cifar": "cifar", "vgg": "vgg"}

# Side of the square images that statistics are taken of.
IMAGE_SIZE, CIFAR_IMAGE_SIZE = 224, 32
IMAGES_PER_BATCH = 32

Network = ResNet | VGG


class _Source(NamedTuple):
    backbone: Backbone
    architecture: Architecture
    weights: dict[str, Tensor]  # of the backbone, in float32
    folded: bool  # its BN is only a scale and a bias
    facts: dict[str, object]  # what the file says itself, see `facts`
    left_out: list[str]
    run: RunRecord | None


def convert_checkpoint(
    path: str | os.PathLike,
    *,
    source: str | None = None,
    placement: str | Sequence[int] | None = None,
    norm: str | None = None,
    statistics: Sequence[str] = (),
    num_pergroup: int | None = None,
    whitening: str = "newton",
    images: Images | None = None,
    warm_start: bool = False,
    keep_classifier: bool = False,
) -> Conversion:
    """Convert the checkpoint of a ResNet or VGG, alone or in a detector.

    γ, β and running statistics of the placed layers carry over (see `replace_norms`), and all
    other tensors are those of the source, to the bit if it is in float32, but for the fully
    connected layers of torchvision's VGG (see `vgg`). A source that has SW layers keeps them, with
    every value.

    Args:
        path: see `read_checkpoint`.
        source: one of `sources.SOURCES`; None to recognize it from the tensors' names.
        placement: a name or the layers' numbers; None for the source's own SW layers if it has
            any, "cifar" on CIFAR networks, "vgg" on VGG, and else "imagenet".
        norm: of the placed layers; None for "SW".
        statistics: the set; empty for what `norm` says, or the source's number of importance
            weights.
        num_pergroup: G; None for 16 or the source's own.
        whitening: as in `SwitchWhiten2d`.
        images: take the running values of the placed layers from these. Where the source's BN is
            folded into a scale and a bias, find its statistics first, for all layers.
        warm_start: set the importance weights such that the network computes nearly what it did.
        keep_classifier: keep a backbone's linear layer, which no detector has a place for. CIFAR
            networks, which are classifiers, and the authors' release always keep it.

    Raises:
        UserError: the checkpoint is unreadable, incomplete, of another architecture or not finite,
            or the arguments do not fit it.
    """
    found = _read(path, source)
    is_vgg = found.architecture.family == "vgg"
    if warm_start and is_vgg:
        raise UserError("--warm-start: a VGG has no norms that SW layers could start as")
    own_layers = own_sw_layers(found.weights)
    if own_layers and placement is not None:
        raise UserError("the source has SW layers already, which are kept: leave out --placement")
    config, notes = network_config(found.backbone, found.architecture, found.facts, found.folded)
    config |= sw_config(found.weights, norm, statistics, num_pergroup, whitening)
    heads = _kept_heads(found, keep_classifier, notes)
    cfg = _make_cfg(config, found.architecture)
    with _naming(path):
        network = _build(cfg, found.architecture)
        if own_layers:
            placement = _place_own(network, own_layers, cfg)
        _load(network, found.weights)
    placement = placement or _PLACEMENTS[found.architecture.family]
    if found.folded and images:
        norms = {n: (m, 1) for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
        unfuse(network, norms, _batches(images, cfg, found.architecture), images.number)
    replaced = {} if own_layers else _replace(network, placement, cfg)
    if warm_start:
        _warm_start(network, notes)
    if images:
        calibrate(network, _batches(images, cfg, found.architecture), images.number)
    elif any(layer.uses_batch for layer in _sw_layers(network)) and not own_layers:
        notes.append(_NEW_NORMS if is_vgg else _missing_statistics(found.folded))
    prefix = found.backbone.prefix
    return Conversion(
        model={prefix + k: v for k, v in _state(network).items()} | heads,
        is_detector=bool(prefix),
        source=found.backbone.source,
        config=config | placement_config(network, placement),
        placed=placed_layers(network, placement, replaced),
        unused=found.backbone.unused,
        left_out=found.left_out,
        notes=notes,
        run=found.run if prefix else None,
    )


@contextmanager
def _naming(path: str | os.PathLike) -> Iterator[None]:
    """Begin the messages of errors with the checkpoint's path."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{os.fspath(path)!r}: {error}") from None


def _read(path: str | os.PathLike, source: str | None) -> _Source:
    contents = read_file(path)
    tensors, left_out = weights_in(contents, path)
    with _naming(path):
        backbone = find_backbone(tensors, source)
        architecture = recognize_architecture(backbone)
        weights = _checked(backbone)
        facts = facts_in(contents)
        is_vgg = architecture.family == "vgg"
        folded = not is_vgg and _fold_running_values(backbone.source, weights, facts)
    left_out = [name for name in left_out if name != FACTS_KEY]
    run = run_record_in(contents)
    return _Source(backbone, architecture, weights, folded, facts, left_out, run)


def _checked(backbone: Backbone) -> dict[str, Tensor]:
    """The backbone's tensors in float32.

    Raises:
        UserError: a tensor of the checkpoint is not finite, or one of the backbone no float.
    """
    for name, tensor in (backbone.weights | backbone.heads).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(
                f"{name} has values that are not finite: the training of this checkpoint diverged, "
                "or it is damaged; use another"
            )
    for name, tensor in backbone.weights.items():
        if not tensor.is_floating_point():
            raise UserError(f"{name} has the dtype {tensor.dtype}, where a float is needed")
        if name.endswith("running_var") and (tensor < 0).any():
            raise UserError(
                f"{name} has negative variances: the checkpoint is damaged; get another"
            )
    return {name: tensor.float().contiguous() for name, tensor in backbone.weights.items()}


def _fold_running_values(
    source: str, weights: dict[str, Tensor], facts: Mapping[str, object]
) -> bool:
    """Whether BN is only a scale and a bias; Caffe2's then get the running values that say so."""
    means = [v for k, v in weights.items() if k.endswith(".running_mean")]
    if means and (source != "detectron2" or facts.get("INPUT.FORMAT") == "RGB"):
        return False  # not Caffe2's, the only ones that are folded: it is an untrained network
    if means:
        variances = [v for k, v in weights.items() if k.endswith(".running_var")]
        folded = all(
            any(((variance - one).abs() < 1e-7).all() for one in FOLDED_VARIANCES)
            for variance in variances
        )
        return folded and not any(mean.any() for mean in means)
    if source != "caffe2":
        raise UserError(
            "its norms have no running statistics: they are no BN (GroupNorm?), or BN that was "
            "folded, which --source caffe2 takes them for"
        )
    for norm in [k.removesuffix(".weight") for k in weights if k.endswith(".norm.weight")]:
        weights[f"{norm}.running_mean"] = torch.zeros_like(weights[f"{norm}.weight"])
        weights[f"{norm}.running_var"] = torch.ones_like(weights[f"{norm}.weight"])
    return True


def _kept_heads(found: _Source, keep_classifier: bool, notes: list[str]) -> dict[str, Tensor]:
    """What the converted checkpoint has beside the backbone."""
    backbone = found.backbone
    keep_classifier |= found.architecture.family == "cifar" or backbone.source == "released"
    if backbone.prefix or keep_classifier:
        return backbone.heads
    if backbone.heads:
        names = ", ".join(backbone.heads)
        notes.append(f"the classifier ({names}) is left out; --keep-classifier keeps it")
    return {}


def _make_cfg(config: dict[str, object], architecture: Architecture) -> CfgNode:
    cfg = get_cfg()
    add_sw_config(cfg)
    cfg.merge_from_list([part for item in config.items() for part in item])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = [architecture.last_stage]
    return cfg


def _build(cfg: CfgNode, architecture: Architecture) -> Network:
    """The source's network, on the meta device: nothing is allocated until names and shapes fit."""
    with torch.device("meta"):
        if architecture.family == "vgg":
            return VGG(3, cfg.MODEL.VGG.CHANNELS, cfg.MODEL.VGG.FC_CHANNELS)
        if architecture.family == "cifar":
            return make_cifar_resnet(architecture.depth)
        try:
            return build_resnet_backbone(cfg, ShapeSpec(channels=3))
        except (AssertionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"its shapes make no ResNet of Detectron2: {reason}") from None


def _place_own(network: Network, names: list[str], cfg: CfgNode) -> list[int]:
    """Put SW where the source has it, in a network on the meta device; the layers' numbers."""
    numbers = {conv.name: conv.number for conv in numbered_convs(network)}
    placement = [numbers[name] for name in names if name in numbers]
    with torch.device("meta"):
        _replace(network, placement, cfg)
    return placement


def _replace(
    network: Network, placement: str | Sequence[int], cfg: CfgNode
) -> dict[str, nn.Module]:
    try:
        return replace_norms(network, placement, sw_norm_from_config(cfg))
    except UserError:
        raise
    except (ValueError, KeyError) as error:
        raise UserError(f"the norm does not fit: {error.args[0]}") from None


def _load(network: Network, weights: dict[str, Tensor]) -> None:
    """Give a network on the meta device its tensors, which have to fit exactly."""
    expected = {name: tensor.shape for name, tensor in _state(network).items()}
    unknown = [name for name in weights if name not in expected]
    if unknown:
        raise UserError(
            f"it is no plain ResNet or VGG, for it has {_some(unknown)}; only one without "
            "additions computes the same in Detectron2"
        )
    missing = [name for name in expected if name not in weights]
    if missing:
        raise UserError(
            f"the network would be incomplete: the checkpoint has no {', '.join(missing)}"
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise UserError(
                f"{name} has the shape {tuple(weights[name].shape)} where the network has "
                f"{tuple(shape)}; the checkpoint is damaged or no ResNet of Detectron2"
            )
    network.load_state_dict(weights, assign=True)


def _state(network: Network) -> dict[str, Tensor]:
    return {k: v for k, v in network.state_dict().items() if not k.endswith(".num_batches_tracked")}


def _batches(images: Images, cfg: CfgNode, architecture: Architecture) -> Iterator[Tensor]:
    return image_batches(
        images.directory,
        images.number,
        CIFAR_IMAGE_SIZE if architecture.family == "cifar" else IMAGE_SIZE,
        IMAGES_PER_BATCH,
        cfg.MODEL.PIXEL_MEAN,
        cfg.MODEL.PIXEL_STD,
        cfg.INPUT.FORMAT,
    )


def _warm_start(network: Network, notes: list[str]) -> None:
    worst = max(warm_starting.warm_start(network), key=lambda start: start.error)
    notes.append(
        f"the SW layers start as BN; the scale of {worst.name} is off by {worst.error:.1e}"
    )


def _sw_layers(network: Network) -> list[SwitchWhiten2d]:
    return [module for module in network.modules() if isinstance(module, SwitchWhiten2d)]


_NEW_NORMS = (
    "the source has no norms: those of the placed layers are new, and change what the network "
    "computes until it is trained"
)


def _missing_statistics(folded: bool) -> str:
    if folded:
        return (
            "the source's BN is folded into a scale and a bias: the running statistics are unknown "
            "and have to be found before evaluation; give --calibrate"
        )
    return (
        "the running covariances are diagonal, for BN knows no others; --calibrate finds them, and "
        "so does training"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
