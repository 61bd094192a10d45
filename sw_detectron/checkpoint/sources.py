"""Whose checkpoint it is, and the names of its tensors in Detectron2's ResNet, or in our VGG."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from detectron2.checkpoint.c2_model_loading import convert_basic_c2_names
from torch import Tensor

from ..errors import UserError
from . import vgg

STEM = "stem.conv1.weight"
# What a backbone's names begin with, by the first convolution that gives it away.
_INSIDE = {STEM: r"(?:stem|res\d+)\.", vgg.STEM: r"(?:group\d+|fc[67])\."}

# Number of blocks in res2 … res5 (or fewer stages) and bottleneck blocks or not: the depth.
DEPTHS = {
    ((2, 2, 2, 2), False): 18,
    ((3, 4, 6, 3), False): 34,
    ((3, 4, 6, 3), True): 50,
    ((3, 4, 23, 3), True): 101,
    ((3, 8, 36, 3), True): 152,
}


class Backbone(NamedTuple):
    """The backbone in a checkpoint, in Detectron2's names.

    Attributes:
        source: one of `SOURCES`.
        prefix: of the backbone's names in a detector, such as "backbone.bottom_up."; "" for a
            backbone alone.
        weights: the tensors of stem and stages, or of groups, fc6 and fc7, by their name inside the
            network.
        heads: all other tensors that are kept, by their full name.
        unused: names in the source that are not kept.
    """

    source: str
    prefix: str
    weights: dict[str, Tensor]
    heads: dict[str, Tensor]
    unused: list[str]


class Architecture(NamedTuple):
    """Which network a backbone's tensors make.

    Attributes:
        family: "resnet", "cifar" (a ResNet with a 3x3 stem and three stages) or "vgg".
        depth: 18, 34, 50, 101 or 152, or 6n + 2 of one for CIFAR, or 16.
        last_stage: "res5", or "res4" where a detector has the rest in its heads; "fc7" of a VGG.
        config: the config keys that describe it, beside that of a CIFAR net's depth.
    """

    family: str
    depth: int
    last_stage: str
    config: dict[str, int | list[int]]


def _torchvision_name(name: str) -> str:
    name = re.sub(r"^(conv1|bn1|sw1)\.", r"stem.\1.", name)
    name = re.sub(r"^layer([1-4])\.", lambda stage: f"res{int(stage[1]) + 1}.", name)
    name = re.sub(r"\.(?:bn|sw)([1-3])\.", r".conv\1.norm.", name)
    name = name.replace(".downsample.0.", ".shortcut.").replace(".downsample.1.", ".shortcut.norm.")
    return re.sub(r"^fc\.", "linear.", name)


def _caffe2_name(name: str) -> str:
    (name,) = convert_basic_c2_names([name])
    return re.sub(r"^fc1000\.", "linear.", name)


def _detectron2_name(name: str) -> str:
    return re.sub(r"^stem\.fc\.", "linear.", name)  # as Detectron2's converter calls torchvision's


# timm's plain ResNets have torchvision's names; so have the released SW and the CIFAR networks.
SOURCES: dict[str, Callable[[str], str]] = {
    "torchvision": _torchvision_name,
    "detectron2": _detectron2_name,
    "caffe2": _caffe2_name,
    "cifar": _torchvision_name,
    "released": _torchvision_name,
    "vgg": vgg.vgg_name,
}


def recognize_source(names: list[str]) -> str:
    """One of `SOURCES`, from the names of the tensors.

    Raises:
        UserError: they are not those of a ResNet or VGG.
    """
    if _stems(names):
        return "detectron2"
    if vgg.is_vgg(names):
        return "vgg"
    if "conv1_w" in names or "res2_0_branch2a_w" in names:
        return "caffe2"
    if "conv1.0.weight" in names:
        raise UserError(
            "this is a ResNet with a deep stem (three convolutions, timm's resnet…d), which "
            "Detectron2's ResNet does not have; use one with a 7x7 stem"
        )
    if any(name.startswith("layer1.0.") for name in names):
        if any(re.search(r"(^|\.)sw\d\.", name) for name in names):
            return "released"
        return "torchvision" if any(name.startswith("layer4.") for name in names) else "cifar"
    raise UserError(
        f"this is no checkpoint of a ResNet (its first tensor is {names[0]}); a ResNet of "
        "torchvision, timm, Detectron2, Caffe2 or the paper's authors is needed, or torchvision's "
        "vgg16"
    )


def _stems(names: Iterable[str]) -> list[tuple[str, str]]:
    """The prefix of each backbone, and its first convolution."""
    return [
        (name.removesuffix(stem), stem)
        for name in names
        for stem in _INSIDE
        if name == stem or name.endswith(f".{stem}")
    ]


def without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that they had before torch.compile and DataParallel took the model.

    torch.compile adds "_orig_mod." to the whole model's names or inside, to a part's; DataParallel
    adds "module." to all.

    Raises:
        UserError: two tensors would have one name.
    """
    names = [plain_name(name) for name in tensors]
    while all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"two tensors of the checkpoint would become {twice[0]}")
    return dict(zip(names, tensors.values()))


def plain_name(name: str) -> str:
    """A tensor's name in a model of which torch.compile took nothing."""
    return re.sub(r"(^|\.)(_orig_mod\.)+", r"\1", name)


def find_backbone(tensors: dict[str, Tensor], source: str | None = None) -> Backbone:
    """Split a checkpoint's tensors into backbone and heads, and rename them.

    Args:
        tensors: by their name in the checkpoint, see `without_wrappers` too.
        source: one of `SOURCES`; None to recognize it.

    Raises:
        UserError: there is no ResNet or VGG in it, or not exactly one.
    """
    tensors = without_wrappers(tensors)
    source = source or recognize_source(list(tensors))
    if source == "caffe2" and (group_norms := [n for n in tensors if n.endswith("_gn_s")]):
        raise UserError(f"this is a ResNet with GroupNorm ({group_norms[0]}), not one with BN")
    rename = SOURCES[source]
    renamed = {}
    for name in tensors:
        # Of num_batches_tracked Detectron2's BN has no need, and its FrozenBN does not know it;
        # Caffe2's momenta belong to the optimizer.
        if not name.endswith((".num_batches_tracked", "_momentum")):
            renamed[name] = rename(name)
    twice = [name for name, count in Counter(renamed.values()).items() if count > 1]
    if twice:
        raise UserError(f"two tensors of the checkpoint would become {twice[0]}")
    stems = _stems(renamed.values())
    if len(stems) != 1:
        names = ", ".join(prefix + stem for prefix, stem in stems)
        found = f"{len(stems)} ResNets ({names})" if stems else "no ResNet"
        raise UserError(
            f"the checkpoint has {found} by the names of source {source!r}, where one is needed"
        )
    ((prefix, stem),) = stems
    inside = re.compile(f"{re.escape(prefix)}({_INSIDE[stem]}.+)")
    weights, others = {}, {}
    for name, new_name in renamed.items():
        match = inside.fullmatch(new_name)
        if match:
            weights[match[1]] = tensors[name]
        else:
            others[name] = new_name.removeprefix(prefix)
    heads, unused = {}, []
    is_detector = bool(prefix) and any(not _is_classifier(name) for name in others.values())
    for name, new_name in others.items():
        if is_detector:
            heads[name] = tensors[name]
        elif _is_classifier(new_name):
            heads[new_name] = tensors[name]
        else:
            unused.append(name)
    if is_detector:  # the statistics of its heads count too
        names = [name for name in tensors if name.endswith(".num_batches_tracked")]
        heads |= {name: tensors[name] for name in names if not inside.fullmatch(name)}
    if source == "caffe2" and weights.pop("stem.conv1.bias", None) is not None:
        unused.append("conv1_b")  # Detectron2 does not read it either: BN follows
    if source == "vgg":
        vgg.check_depth(tensors)
        weights = vgg.as_convolutions(weights)
    return Backbone(source, prefix if is_detector else "", weights, heads, unused)


def _is_classifier(name: str) -> bool:
    return name in ("linear.weight", "linear.bias")


def recognize_architecture(backbone: Backbone) -> Architecture:
    """Family, depth, block type, groups and widths, from names and shapes.

    Raises:
        UserError: Detectron2 has no such ResNet.
    """
    weights = backbone.weights
    if vgg.STEM in weights:
        groups = range(1, 1 + len(vgg.NUM_CONVS))
        channels = [_shape(weights, f"group{group}.conv1.weight", 4)[0] for group in groups]
        fc_channels = _shape(weights, "fc6.weight", 4)[0]
        config = {"MODEL.VGG.CHANNELS": channels, "MODEL.VGG.FC_CHANNELS": fc_channels}
        return Architecture("vgg", 16, "fc7", config)
    found = {
        (int(match[1]), int(match[2]))
        for match in (re.match(r"res([2-9])\.(\d{1,4})\.", name) for name in weights)
        if match
    }
    stages = sorted({stage for stage, _ in found})
    if not stages:
        raise UserError(f"it has no stage of a ResNet by the names of source {backbone.source!r}")
    counts = tuple(sum(stage == number for number, _ in found) for stage in stages)
    stem = _shape(weights, STEM, 4)
    if backbone.source == "cifar" or (stem[2:] == (3, 3) and 5 not in stages):
        if stages != [2, 3, 4] or len(set(counts)) != 1:
            raise UserError(
                f"this is no ResNet for CIFAR: its stages have {counts} blocks, where three of "
                "equal length are needed"
            )
        return Architecture("cifar", 6 * counts[0] + 2, "res4", {})
    if stem[1:] != (3, 7, 7):
        raise UserError(
            f"its stem has a convolution of {stem[2]}x{stem[3]} on {stem[1]} channels; "
            "Detectron2's ResNet has one of 7x7 on 3"
        )
    bottleneck = "res2.0.conv3.weight" in weights
    # In a detector without FPN the heads hold the last stage.
    depth = next(
        (
            depth
            for (blocks, is_bottleneck), depth in DEPTHS.items()
            if is_bottleneck == bottleneck
            and counts in ((blocks, blocks[:3]) if backbone.prefix else (blocks,))
        ),
        None,
    )
    if depth is None or stages != list(range(2, 2 + len(stages))):
        kind = "bottleneck" if bottleneck else "basic"
        raise UserError(
            f"Detectron2 has no ResNet with {counts} {kind} blocks; there are depths "
            f"{', '.join(str(depth) for depth in DEPTHS.values())}"
        )
    last_conv = "res2.0.conv3.weight" if bottleneck else "res2.0.conv2.weight"
    out_channels = _shape(weights, last_conv, 4)[0]
    width, width_per_group = _shape(weights, "res2.0.conv2.weight", 4)[:2]
    groups = width // width_per_group if bottleneck else 1
    config = {"DEPTH": depth, "NUM_GROUPS": groups, "WIDTH_PER_GROUP": width_per_group}
    if stem[0] != 64:
        config["STEM_OUT_CHANNELS"] = stem[0]
    if out_channels != 256:
        config["RES2_OUT_CHANNELS"] = out_channels
    config = {f"MODEL.RESNETS.{key}": value for key, value in config.items()}
    return Architecture("resnet", depth, f"res{stages[-1]}", config)


def _shape(weights: dict[str, Tensor], name: str, dim: int) -> tuple[int, ...]:
    shape = tuple(weights[name].shape) if name in weights else None
    if shape is None:
        raise UserError(f"the checkpoint has no {name}: it is incomplete or no ResNet")
    if len(shape) != dim or 0 in shape:
        raise UserError(f"{name} has the shape {shape}, which no convolution has")
    return shape
