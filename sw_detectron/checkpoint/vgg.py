"""torchvision's VGG-16 as the backbone of DeepLab: names, and the shape of the last layers.

Chen et al., DeepLab (TPAMI 2018): fc6 and fc7 become convolutions of a quarter of the channels, of
which fc6 sees every third of the seven pixels that it saw.
"""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from ..errors import UserError
from ..modeling.vgg import FC_CHANNELS, NUM_CONVS

STEM = "group1.conv1.weight"

# Names of torchvision's layers that are fully connected, with the input of fc6.
_FC6, _FC7 = "classifier.0.", "classifier.3."
_FC_INPUT, _FC_OUTPUT, _POOLED = 512, 4096, 7


def _convolutions() -> dict[str, str]:
    """Ours by torchvision's: numbers there count convolutions, ReLUs and poolings."""
    names, number = {}, 0
    for group, convs in enumerate(NUM_CONVS, start=1):
        for conv in range(1, convs + 1):
            names[f"features.{number}."] = f"group{group}.conv{conv}."
            number += 2
        number += 1
    return names


_NAMES = _convolutions() | {_FC6: "fc6.", _FC7: "fc7."}


def is_vgg(names: Iterable[str]) -> bool:
    """Tensors have the names of a VGG of torchvision's, of any depth."""
    return {"features.0.weight", "classifier.0.weight"} <= set(names)


def vgg_name(name: str) -> str:
    """The name in our VGG of one of torchvision's; the same if there is none."""
    prefix, kind = re.fullmatch(r"(.*?)(\w*)", name).groups()
    return _NAMES.get(prefix, prefix) + kind


def check_depth(names: Iterable[str]) -> None:
    """A VGG of torchvision's is the one with sixteen layers and no norm.

    Raises:
        UserError: it is another.
    """
    features = {name.rpartition(".")[0] + "." for name in names if name.startswith("features.")}
    if features != set(_convolutions()):
        raise UserError(
            "this is a VGG, but not torchvision's vgg16 without BN, which is the one that DeepLab "
            "takes; use vgg16"
        )


def as_convolutions(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a VGG-16, by our names, with fc6 and fc7 as DeepLab has them.

    Args:
        weights: fc6.weight is (4096, 25088), fc7.weight (4096, 4096); what is a convolution
            already stays.

    Raises:
        UserError: they have other shapes.
    """
    weights = dict(weights)
    fc6, fc7 = weights.get("fc6.weight"), weights.get("fc7.weight")
    if fc6 is None or fc7 is None or fc6.dim() == 4:
        return weights
    step = _FC_OUTPUT // FC_CHANNELS
    for name, inputs in (("fc6", _FC_INPUT * _POOLED**2), ("fc7", _FC_OUTPUT)):
        shape = tuple(weights[f"{name}.weight"].shape)
        if shape != (_FC_OUTPUT, inputs):
            raise UserError(
                f"{name}.weight has the shape {shape}, where VGG-16 has {(_FC_OUTPUT, inputs)}"
            )
        weights[f"{name}.bias"] = weights[f"{name}.bias"][::step].clone()
    windows = fc6.unflatten(1, (_FC_INPUT, _POOLED, _POOLED))
    weights["fc6.weight"] = windows[::step, :, ::3, ::3].clone()
    # fc7 saw one pixel: the middle one of three.
    middle = fc7.new_zeros(FC_CHANNELS, FC_CHANNELS, 3, 3)
    middle[:, :, 1, 1] = fc7[::step, ::step]
    weights["fc7.weight"] = middle
    return weights
