"""Which norm of a network is layer number k, and which numbers the paper's placements take.

The convolutions of a ResNet are numbered in forward order; the stem's first is 1, and the shortcut
(projection) convolutions are not counted. So are the thirteen of the groups of a VGG-16. A norm has
its convolution's number.

ResNets are known by their structure. Detectron2's have a stem and stages, and each convolution
holds its norm; those of torchvision and timm, and He-style ones for CIFAR, have conv1, bn1 and
layer1, layer2, …, whose blocks have conv1, bn1, conv2, bn2, …. The VGG is this package's.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from detectron2.modeling import ResNet
from torch import nn

from ..errors import UserError
from .vgg import VGG

PLACEMENTS = ("imagenet", "segmentation", "cifar", "released", "vgg", "all", "none")

# The stage of 2048 channels in ResNet-50: whitening it costs most and, says the paper's appendix,
# instance statistics do not belong in deep layers. Networks for CIFAR have no such stage.
EXCLUDED_STAGE = "res5"


@dataclass(frozen=True)
class NumberedConv:
    """A convolution and its place in a ResNet or VGG.

    Attributes:
        number: counted from 1 in forward order.
        name: the module's name inside the network: "res2.1.conv2", "layer1.1.conv2", or
            "group1.conv2".
        stage: "stem", "res2", … whatever the network's own name for it ("res2" is layer1); or
            "group1", ….
        block: index in the stage; 0 for the stem, and for a group.
        index: which convolution of its block or group it is, counted from 1.
        module: the convolution.
        norm_name: the name of its norm inside the network: "res2.1.conv2.norm", "layer1.1.bn2".
    """

    number: int
    name: str
    stage: str
    block: int
    index: int
    module: nn.Module
    norm_name: str

    @property
    def channels(self) -> int:
        return self.module.out_channels


def find_network(model: nn.Module) -> tuple[str, nn.Module]:
    """The ResNet or VGG inside a model, which may be the model itself, and its name there.

    Raises:
        UserError: there is none, or more than one.
    """
    found = [(name, module) for name, module in model.named_modules() if _has_numbers(module)]
    if not found:
        raise UserError(
            f"found no ResNet in {type(model).__name__}: neither Detectron2's, nor a module with "
            "conv1, bn1 and layer1, as those of torchvision and timm have them, nor a VGG of "
            "build_sw_vgg_backbone"
        )
    if len(found) > 1:
        names = ", ".join(name or "the model itself" for name, _ in found)
        raise UserError(
            f"expected one ResNet or VGG in {type(model).__name__}, found {len(found)} ({names}); "
            "pass the one that is meant"
        )
    return found[0]


def _has_numbers(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return is_of_detectron2(module) or {"conv1", "bn1", "layer1"} <= children.keys()


def is_of_detectron2(network: nn.Module) -> bool:
    """A network is built of Detectron2's parts: its convolutions hold and run their norms."""
    return isinstance(network, (ResNet, VGG))


def numbered_convs(network: nn.Module) -> list[NumberedConv]:
    """The convolutions of a ResNet or VGG in forward order, shortcuts and attention left out.

    Raises:
        UserError: a block is not built as this module's docstring says, or a norm and its
            convolution have different channels.
    """
    convs = []
    for prefix, stage, block in _blocks(network):
        for index, (name, norm_name) in enumerate(
            _convs_and_norms(network, prefix, stage), start=1
        ):
            module = network.get_submodule(name)
            number = len(convs) + 1
            conv = NumberedConv(number, name, stage, block, index, module, norm_name)
            channels = channels_of(norm_of(network, conv))
            if channels not in (None, conv.channels):
                raise UserError(
                    f"the structure of this {type(network).__name__} is not understood: "
                    f"{norm_name} has {channels} channels, and {name} gives {conv.channels}"
                )
            convs.append(conv)
    return convs


def channels_of(norm: nn.Module | None) -> int | None:
    """The channels of a norm's input; None if it does not say."""
    return getattr(norm, "num_features", getattr(norm, "num_channels", None))


def norm_of(network: nn.Module, conv: NumberedConv) -> nn.Module | None:
    """The norm after a convolution of `numbered_convs(network)`; None if it has none."""
    owner, _, attribute = conv.norm_name.rpartition(".")
    return getattr(network.get_submodule(owner), attribute)


def _blocks(network: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Of each block the prefix of its names, its stage and its index there; the stem is first."""
    if isinstance(network, VGG):
        yield from ((f"{name}.", name, 0) for name in network.group_names)
        return
    if isinstance(network, ResNet):
        yield "stem.", "stem", 0
        stages = {name: name for name in network.stage_names}
    else:
        yield "", "stem", 0
        stages = {f"layer{k}": f"res{k + 1}" for k in _numbers(network, "layer")}
    for name, stage in stages.items():
        for index, (child, _) in enumerate(getattr(network, name).named_children()):
            yield f"{name}.{child}.", stage, index


def _convs_and_norms(network: nn.Module, prefix: str, stage: str) -> list[tuple[str, str]]:
    """The names of a block's convolutions and of their norms, in forward order.

    Raises:
        UserError: they are not conv1 and its norm, conv2 and its norm, ….
    """
    block = network.get_submodule(prefix.removesuffix("."))
    numbers = _numbers(block, "conv")
    if is_of_detectron2(network):
        # The convolution holds its norm, which can be None.
        held = [k for k in numbers if hasattr(getattr(block, f"conv{k}"), "norm")]
        pairs = [(f"conv{k}", f"conv{k}.norm") for k in held]
    else:
        parts = [part for k in numbers for part in (f"conv{k}", f"bn{k}")]
        # timm can pool with a convolution of stride 2.
        parts += ["maxpool"] if stage == "stem" else []
        names = [name for part in parts for name in _convs_and_norms_inside(block, part)]
        pairs = list(zip(names[::2], names[1::2]))
        if [is_norm(block.get_submodule(name)) for name in names] != [False, True] * len(pairs):
            pairs = []
    if numbers != list(range(1, len(numbers) + 1)) or not 0 < len(numbers) <= len(pairs):
        raise UserError(
            f"the structure of this {type(network).__name__} is not understood: "
            f"{prefix.removesuffix('.') or 'its stem'} should have the convolutions conv1, "
            "conv2, …, each with its norm, but consists of "
            + ", ".join(name for name, _ in block.named_children())
        )
    return [(prefix + conv, prefix + norm) for conv, norm in pairs]


def _numbers(module: nn.Module, kind: str) -> list[int]:
    """The k of a module's children named f"{kind}{k}", in order.

    A deformable block's conv2_offset is none: it predicts offsets and has no norm.
    """
    matches = [re.fullmatch(rf"{kind}(\d+)", name) for name, _ in module.named_children()]
    return sorted(int(match[1]) for match in matches if match)


def _convs_and_norms_inside(block: nn.Module, name: str) -> list[str]:
    """A child of the block by name, or what it consists of; only convolutions and norms.

    The deep stems of timm are sequences of convolutions, norms and activations.
    """
    child = getattr(block, name, None)
    parts = {name: child}
    if isinstance(child, nn.Sequential):
        parts = {f"{name}.{inner}": module for inner, module in child.named_children()}
    return [part for part, m in parts.items() if isinstance(m, nn.Conv2d) or is_norm(m)]


def is_norm(module: nn.Module | None) -> bool:
    """A module is BN of any kind, SW (both have a running mean), or GN."""
    return hasattr(module, "running_mean") or isinstance(module, nn.GroupNorm)


def place(convs: list[NumberedConv], placement: str | Sequence[int]) -> list[NumberedConv]:
    """The convolutions whose norm a placement takes.

    Args:
        convs: from `numbered_convs`.
        placement: a name out of `PLACEMENTS`, or the numbers themselves.

    Raises:
        UserError: an unknown name, a number that is not there, or no layer taken by a placement
            other than "none".
    """
    allowed = [c for c in convs if c.stage != EXCLUDED_STAGE]
    if not isinstance(placement, str):
        return _place_numbers(convs, allowed, placement)
    rules = {
        "imagenet": lambda c: c.number == 1 or c.number % 6 == 0,
        "segmentation": lambda c: c.number == 1 or c.number % 3 == 0,
        "cifar": lambda c: c.number == 1 or c.number % 4 == 0,
        "released": lambda c: c.number == 1 or (c.index == 2 and c.block % 2 == 1),
        "vgg": lambda c: c.stage.startswith("group") and c.index == 1,
        "all": lambda c: True,
        "none": lambda c: False,
    }
    if placement not in rules:
        raise UserError(
            f"unknown placement {placement!r}; there are {', '.join(PLACEMENTS)}, "
            "or an explicit list of layer numbers"
        )
    taken = [c for c in allowed if rules[placement](c)]
    if not taken and placement != "none":
        raise UserError(f"placement {placement!r} hits no layer; {_describe(allowed)}")
    return taken


def _place_numbers(
    convs: list[NumberedConv], allowed: list[NumberedConv], numbers: Sequence[int]
) -> list[NumberedConv]:
    if not numbers:
        raise UserError(f'no layer number given (use placement "none"); {_describe(allowed)}')
    by_number = {c.number: c for c in allowed}
    wrong = sorted(set(numbers) - set(by_number))
    if wrong:
        excluded = sorted(set(wrong) & {c.number for c in convs})
        reason = ""
        if excluded:
            reason = f" ({excluded} lie in the last stage, res5 or layer4, which never gets SW)"
        raise UserError(f"cannot place SW at layers {wrong}{reason}; {_describe(allowed)}")
    return [by_number[number] for number in sorted(set(numbers))]


def _describe(convs: list[NumberedConv]) -> str:
    return "the layers are " + ", ".join(f"{c.number} {c.name}" for c in convs)
