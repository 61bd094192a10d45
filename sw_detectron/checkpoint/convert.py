"""Turns a checkpoint of a BN ResNet, whoever made it, into one with SW on the placed layers."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import ResNet, build_resnet_backbone
from torch import Tensor, nn

from ..config import add_sw_config
from ..data.images import image_batches
from ..errors import UserError
from ..layers import SwitchWhiten2d
from ..layers.mixing import STATISTICS
from ..modeling.backbone import sw_norm_from_config
from ..modeling.calibration import calibrate, unfuse
from ..modeling.cifar_resnet import make_cifar_resnet
from ..modeling.norms import SW_NORMS
from ..modeling.placement import PLACEMENTS, numbered_convs, place
from ..modeling.surgery import replace_norms
from ..modeling.warm_start import warm_start
from . import sources
from .reading import read_file, weights_in
from .sources import Architecture, Backbone

# The running variances of a norm y = s x + b in Detectron2: loaded from Caffe2's weights it is 1,
# and initially, such that it is that norm exactly, 1 - ε.
FOLDED_VARIANCES = (1.0, 1 - 1e-5)

# Side of the square images that statistics are taken of.
IMAGE_SIZE, CIFAR_IMAGE_SIZE = 224, 32
IMAGES_PER_BATCH = 32


@dataclass(frozen=True)
class Images:
    """Where statistics are taken: the first `number` images below `directory`."""

    directory: str
    number: int


@dataclass(frozen=True)
class PlacedLayer:
    """A layer of the placement: its number, its convolution's name in the ResNet, its norms."""

    number: int
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint and how it came about.

    Attributes:
        model: the tensors, by Detectron2's names.
        is_detector: they are those of a whole detector; else of a backbone, perhaps with its
            classifier, whose names are matched with the endings of a detector's.
        source: one of `sources.SOURCES`.
        config: what a config has to say for this checkpoint, by key.
        placed: the layers of the placement.
        unused: names of tensors in the source that are not in `model`.
        left_out: what the source has beside tensors, such as an optimizer's state.
        notes: what a user should know, in one line each.
    """

    model: dict[str, Tensor]
    is_detector: bool
    source: str
    config: dict[str, object]
    placed: list[PlacedLayer]
    unused: list[str]
    left_out: list[str]
    notes: list[str]


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
    start_as_bn: bool = False,
    keep_classifier: bool = False,
) -> Conversion:
    """Convert the checkpoint of a ResNet, alone or in a detector.

    γ, β and running statistics of the placed layers carry over (see `replace_norms`), and all
    other tensors are those of the source, to the bit if it is in float32. A source that has SW
    layers keeps them, with every value.

    Args:
        path: see `read_checkpoint`.
        source: one of `sources.SOURCES`; None to recognize it from the tensors' names.
        placement: a name or the layers' numbers; None for "cifar" on CIFAR networks, the source's
            own SW layers if it has any, and else "imagenet".
        norm: of the placed layers; None for "SW".
        statistics: the set; empty for what `norm` says, or the source's number of importance
            weights.
        num_pergroup: G; None for 16 or the source's own.
        whitening: as in `SwitchWhiten2d`.
        images: take the running values of the placed layers from these. Where the source's BN is
            folded into a scale and a bias, find its statistics first, for all layers.
        start_as_bn: set the importance weights such that the network computes nearly what it did.
        keep_classifier: keep a backbone's linear layer, which no detector has a place for. CIFAR
            networks, which are classifiers, and the authors' release always keep it.

    Raises:
        UserError: the checkpoint is unreadable, incomplete, of another architecture or not finite,
            or the arguments do not fit it.
    """
    contents = read_file(path)
    tensors, left_out = weights_in(contents, path)
    with _naming(path):
        backbone = sources.find_backbone(tensors, source)
        architecture = sources.recognize_architecture(backbone)
        weights = _checked(backbone)
        folded = _fold_running_values(backbone.source, weights)
    config, notes = _source_config(backbone, architecture, contents.get("__author__"), folded)
    heads = backbone.heads
    keep_classifier |= architecture.cifar or backbone.source == "released"
    if not (backbone.prefix or keep_classifier):
        if heads:
            notes.append(
                f"the classifier ({', '.join(heads)}) is left out; --keep-classifier keeps it"
            )
        heads = {}
    own_layers = _own_sw_layers(weights)
    if placement is None:
        placement = "cifar" if architecture.cifar else "imagenet"
        placement = list(own_layers) or placement
    elif own_layers:
        raise UserError("the source has SW layers already, which are kept: leave out --placement")
    if own_layers:
        config |= _own_sw_config(weights, own_layers, norm, statistics, num_pergroup)
    else:
        config |= {"MODEL.SW.NORM": norm or "SW", "MODEL.SW.NUM_PERGROUP": num_pergroup or 16}
        if statistics:
            config["MODEL.SW.STATISTICS"] = list(statistics)
    if whitening != "newton":
        config["MODEL.SW.WHITENING"] = whitening

    cfg = _make_cfg(config, architecture)
    # Nothing is allocated until names and shapes are found to fit.
    with _naming(path), torch.device("meta"):
        resnet = _build(cfg, architecture)
        if own_layers:
            numbers = {conv.name: conv.number for conv in numbered_convs(resnet)}
            placement = [numbers[name] for name in own_layers if name in numbers]
            _replace(resnet, placement, cfg)
    with _naming(path):
        _load(resnet, weights)
    if folded and images:
        _unfuse(resnet, images, cfg, architecture)
    replaced = {} if own_layers else _replace(resnet, placement, cfg)
    if start_as_bn:
        _start_as_bn(resnet, notes)
    if images:
        _calibrate(resnet, images, cfg, architecture)
    elif any(_of_batch(module) for module in resnet.modules()) and not own_layers:
        notes.append(
            "the source's BN is folded into a scale and a bias: the running statistics are unknown "
            "and have to be found before evaluation; give --calibrate"
            if folded
            else "the running covariances are diagonal, for BN knows no others; --calibrate finds "
            "them, and so does training"
        )
    config |= _placement_config(resnet, placement)
    state = {backbone.prefix + k: v for k, v in resnet.state_dict().items() if not _is_counter(k)}
    return Conversion(
        model=state | heads,
        is_detector=bool(backbone.prefix),
        source=backbone.source,
        config=config,
        placed=[
            PlacedLayer(
                conv.number,
                conv.name,
                _describe(replaced.get(conv.name, _norm(resnet, conv.name))),
                _describe(_norm(resnet, conv.name)),
            )
            for conv in place(numbered_convs(resnet), placement)
        ],
        unused=backbone.unused,
        left_out=left_out,
        notes=notes,
    )


@contextmanager
def _naming(path: str | os.PathLike) -> Iterator[None]:
    """Begin the messages of errors with the checkpoint's path."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{os.fspath(path)!r}: {error}") from None


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


def _fold_running_values(source: str, weights: dict[str, Tensor]) -> bool:
    """Whether BN is only a scale and a bias; Caffe2's then get the running values that say so."""
    means = {k: v for k, v in weights.items() if k.endswith(".running_mean")}
    if means:
        variances = [v for k, v in weights.items() if k.endswith(".running_var")]
        folded = all(
            any(((variance - one).abs() < 1e-7).all() for one in FOLDED_VARIANCES)
            for variance in variances
        )
        return folded and not any(mean.any() for mean in means.values())
    norms = [k.removesuffix(".weight") for k in weights if k.endswith(".norm.weight")]
    if source != "caffe2":
        raise UserError(
            "its norms have no running statistics: they are no BN (GroupNorm?), or BN that was "
            "folded, which --source caffe2 takes them for"
        )
    for norm in norms:
        weights[f"{norm}.running_mean"] = torch.zeros_like(weights[f"{norm}.weight"])
        weights[f"{norm}.running_var"] = torch.ones_like(weights[f"{norm}.weight"])
    return True


def _source_config(
    backbone: Backbone, architecture: Architecture, author: object, folded: bool
) -> tuple[dict[str, object], list[str]]:
    """Config keys of the network and its input, and notes about them."""
    if architecture.cifar:
        config = {
            "MODEL.BACKBONE.NAME": "build_cifar_resnet_backbone",
            "MODEL.RESNETS.DEPTH": architecture.depth,
        }
        return config | sources.IMAGENET_RGB, []
    is_caffe2 = backbone.source == "caffe2" or folded
    is_resnext = architecture.config["NUM_GROUPS"] > 1
    config = {f"MODEL.RESNETS.{key}": value for key, value in architecture.config.items()}
    config["MODEL.RESNETS.STRIDE_IN_1X1"] = is_caffe2 and not is_resnext
    if not is_caffe2:
        config |= sources.IMAGENET_RGB
    else:
        config |= sources.CAFFE2_RESNEXT_BGR if is_resnext else sources.CAFFE_BGR
    for key in ("pixel_mean", "pixel_std"):
        if key in backbone.heads:
            config[f"MODEL.{key.upper()}"] = backbone.heads[key].flatten().tolist()
    mean = config["MODEL.PIXEL_MEAN"]
    config["INPUT.FORMAT"] = "BGR" if mean[0] < mean[-1] else "RGB"
    if backbone.source == "detectron2" and author != "torchvision":
        kind = "Caffe2" if is_caffe2 else "torchvision"
        return config, [
            f"INPUT and STRIDE_IN_1X1 are not in the checkpoint and are taken to be {kind}'s; keep "
            "those of the source's own config where they differ"
        ]
    return config, []


def _own_sw_layers(weights: dict[str, Tensor]) -> list[str]:
    ending = ".norm.running_cov"
    return [name.removesuffix(ending) for name in weights if name.endswith(ending)]


def _own_sw_config(
    weights: dict[str, Tensor],
    layers: list[str],
    norm: str | None,
    statistics: Sequence[str],
    num_pergroup: int | None,
) -> dict[str, object]:
    """The keys of MODEL.SW for SW layers that are in the source."""
    kinds = set()
    for name in layers:
        importance = weights.get(f"{name}.norm.sw_mean_weight")
        if importance is None:
            raise UserError(f"SW layer {name} of the source has no sw_mean_weight")
        tied = f"{name}.norm.sw_var_weight" not in weights
        kinds.add((importance.numel(), weights[f"{name}.norm.running_cov"].shape[-1:], tied))
    if len(kinds) > 1:
        raise UserError("the source's SW layers differ in statistics, groups or tied weights")
    ((count, size, tied),) = kinds
    own_num_pergroup = size[0] if size else 0
    if num_pergroup not in (None, own_num_pergroup):
        raise UserError(f"the source's SW layers have groups of {own_num_pergroup} channels")
    if not statistics:
        known = {2: ("bw", "iw"), len(STATISTICS): STATISTICS}
        of_norm = SW_NORMS[norm].keywords["statistics"] if norm in SW_NORMS else ()
        statistics = of_norm or known.get(count, ())
    if len(statistics) != count:
        raise UserError(
            f"the source's SW layers have {count} importance weights each; name their {count} "
            f"statistics out of {', '.join(STATISTICS)}, such as --statistics "
            f"{','.join(STATISTICS[-count:])}"
        )
    config = {
        "MODEL.SW.NORM": "SW",
        "MODEL.SW.STATISTICS": list(statistics),
        "MODEL.SW.NUM_PERGROUP": own_num_pergroup,
    }
    return config | ({"MODEL.SW.TIE_WEIGHT": True} if tied else {})


def _make_cfg(config: dict[str, object], architecture: Architecture) -> CfgNode:
    cfg = get_cfg()
    add_sw_config(cfg)
    cfg.merge_from_list([part for item in config.items() for part in item])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = [architecture.last_stage]
    return cfg


def _build(cfg: CfgNode, architecture: Architecture) -> ResNet:
    if architecture.cifar:
        return make_cifar_resnet(architecture.depth)
    try:
        return build_resnet_backbone(cfg, ShapeSpec(channels=3))
    except (AssertionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"its shapes make no ResNet of Detectron2: {reason}") from None


def _replace(resnet: ResNet, placement: str | Sequence[int], cfg: CfgNode) -> dict[str, nn.Module]:
    try:
        return replace_norms(resnet, placement, sw_norm_from_config(cfg))
    except UserError:
        raise
    except (ValueError, KeyError) as error:
        raise UserError(f"the norm does not fit: {error.args[0]}") from None


def _load(resnet: ResNet, weights: dict[str, Tensor]) -> None:
    """Give a network on the meta device its tensors, which have to fit exactly."""
    expected = {k: v.shape for k, v in resnet.state_dict().items() if not _is_counter(k)}
    unknown = [name for name in weights if name not in expected]
    if unknown:
        raise UserError(
            f"it is no plain ResNet, for it has {_some(unknown)}; only one without additions "
            "computes the same in Detectron2"
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
    resnet.load_state_dict(weights, assign=True)


def _unfuse(resnet: ResNet, images: Images, cfg: CfgNode, architecture: Architecture) -> None:
    norms = {name: (m, 1) for name, m in resnet.named_modules() if isinstance(m, nn.BatchNorm2d)}
    unfuse(resnet, norms, _batches(images, cfg, architecture), images.number)


def _calibrate(resnet: ResNet, images: Images, cfg: CfgNode, architecture: Architecture) -> None:
    calibrate(resnet, _batches(images, cfg, architecture), images.number)


def _batches(images: Images, cfg: CfgNode, architecture: Architecture) -> Iterator[Tensor]:
    return image_batches(
        images.directory,
        images.number,
        CIFAR_IMAGE_SIZE if architecture.cifar else IMAGE_SIZE,
        IMAGES_PER_BATCH,
        cfg.MODEL.PIXEL_MEAN,
        cfg.MODEL.PIXEL_STD,
        cfg.INPUT.FORMAT,
    )


def _start_as_bn(resnet: ResNet, notes: list[str]) -> None:
    worst = max(warm_start(resnet), key=lambda start: start.error)
    notes.append(
        f"the SW layers start as BN; the scale of {worst.name} is off by {worst.error:.1e}"
    )


def _placement_config(resnet: ResNet, placement: str | Sequence[int]) -> dict[str, object]:
    """The placement by its name, also where its layers were given by number."""
    if isinstance(placement, str):
        return {"MODEL.SW.PLACEMENT": placement}
    convs = numbered_convs(resnet)
    numbers = sorted(set(placement))
    for name in PLACEMENTS:
        try:
            same = [conv.number for conv in place(convs, name)] == numbers
        except UserError:
            continue  # it takes no layer of this network
        if same:
            return {"MODEL.SW.PLACEMENT": name}
    return {"MODEL.SW.LAYERS": numbers}


def _of_batch(module: nn.Module) -> bool:
    return isinstance(module, SwitchWhiten2d) and bool({"bw", "bn"} & set(module.statistics))


def _is_counter(name: str) -> bool:
    return name.endswith(".num_batches_tracked")


def _norm(resnet: ResNet, conv: str) -> nn.Module:
    return resnet.get_submodule(f"{conv}.norm")


def _describe(norm: nn.Module) -> str:
    if not isinstance(norm, SwitchWhiten2d):
        return type(norm).__name__
    groups = f"{norm.num_features // norm.num_pergroup} x {norm.num_pergroup}"
    return f"SW {{{', '.join(norm.statistics)}}} {groups}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
