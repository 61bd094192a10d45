"""The SW layers of a model, for people to read."""

from typing import NamedTuple

from tabulate import tabulate
from torch import nn

from ..errors import UserError
from ..layers import SwitchWhiten2d
from .placement import find_resnet, norm_of, numbered_convs


class SWLayer(NamedTuple):
    """An SW layer in a model.

    Attributes:
        number: of its convolution in the backbone; None outside of the backbone's numbering.
        name: its convolution's name in the backbone ("res3.0.conv2"), or its own in the model.
        layer: the module.
    """

    number: int | None
    name: str
    layer: SwitchWhiten2d


def sw_layers(model: nn.Module) -> list[SWLayer]:
    """All SW layers of a model, the backbone's numbered ones first, in forward order."""
    try:
        _, resnet = find_resnet(model)
        norms = [(conv, norm_of(resnet, conv)) for conv in numbered_convs(resnet)]
    except UserError:  # not one ResNet, or another kind of it: nothing has a number
        norms = []
    numbered = [
        SWLayer(conv.number, conv.name, norm)
        for conv, norm in norms
        if isinstance(norm, SwitchWhiten2d)
    ]
    known = {id(row.layer) for row in numbered}
    others = [
        SWLayer(None, name.removeprefix("module."), module)
        for name, module in model.named_modules()
        if isinstance(module, SwitchWhiten2d) and id(module) not in known
    ]
    return numbered + others


def sw_table(model: nn.Module) -> str:
    """The table of a model's SW layers: number, module, channels, groups, statistics."""
    rows = [
        (
            row.number or "-",
            row.name,
            row.layer.num_features,
            f"{row.layer.running_mean.shape[0]} x {row.layer.num_pergroup}",
            ", ".join(row.layer.statistics),
            "frozen" if row.layer.frozen else "",
        )
        for row in sw_layers(model)
    ]
    if not rows:
        return "no SW layers"
    headers = ["number", "module", "channels", "groups", "statistics", ""]
    if not any(row[-1] for row in rows):
        rows, headers = [row[:-1] for row in rows], headers[:-1]
    return tabulate(rows, headers=headers, tablefmt="simple")
