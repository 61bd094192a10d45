"""Which norm of a ResNet is layer number k, and which numbers the paper's placements take.

The convolutions of a ResNet are numbered in forward order; the stem's first is 1, and the shortcut
(projection) convolutions are not counted. A norm has its convolution's number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from detectron2.modeling import ResNet
from torch import nn

from ..errors import UserError

PLACEMENTS = ("imagenet", "segmentation", "cifar", "released", "all", "none")

# The stage of 2048 channels in ResNet-50: whitening it costs most and, says the paper's appendix,
# instance statistics do not belong in deep layers.
EXCLUDED_STAGE = "res5"


@dataclass(frozen=True)
class NumberedConv:
    """A convolution and its place in a ResNet.

    Attributes:
        number: counted from 1 in forward order.
        name: the module's name inside the ResNet, such as "res2.1.conv2".
        stage: "stem", "res2", …
        block: index in the stage; 0 for the stem.
        index: which convolution of its block it is, counted from 1.
        module: the convolution, whose attribute `norm` is the norm of that number.
    """

    number: int
    name: str
    stage: str
    block: int
    index: int
    module: nn.Module

    @property
    def channels(self) -> int:
        return self.module.out_channels


def find_resnet(model: nn.Module) -> tuple[str, ResNet]:
    """The ResNet inside a model, which may be the model itself, and its name there.

    Raises:
        UserError: there is none, or more than one.
    """
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, ResNet)]
    if len(found) != 1:
        raise UserError(
            f"expected one Detectron2 ResNet in {type(model).__name__}, found {len(found)}"
        )
    return found[0]


def numbered_convs(resnet: ResNet) -> list[NumberedConv]:
    """The convolutions of a Detectron2 ResNet in forward order, shortcuts left out."""
    blocks = [("stem", "stem", 0, resnet.stem)]
    for stage_name, stage in zip(resnet.stage_names, resnet.stages):
        blocks += [(f"{stage_name}.{i}", stage_name, i, block) for i, block in enumerate(stage)]
    convs = []
    for prefix, stage, block_index, block in blocks:
        # A deformable block also has a convN_offset: it predicts offsets and has no norm.
        inner = [
            (name, module)
            for name, module in block.named_children()
            if name.startswith("conv") and not name.endswith("_offset")
        ]
        for index, (name, module) in enumerate(inner, start=1):
            number = len(convs) + 1
            convs.append(
                NumberedConv(number, f"{prefix}.{name}", stage, block_index, index, module)
            )
    return convs


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
        reason = f" ({excluded} lie in {EXCLUDED_STAGE}, which never gets SW)" if excluded else ""
        raise UserError(f"cannot place SW at layers {wrong}{reason}; {_describe(allowed)}")
    return [by_number[number] for number in sorted(set(numbers))]


def _describe(convs: list[NumberedConv]) -> str:
    return "the layers are " + ", ".join(f"{c.number} {c.name}" for c in convs)
