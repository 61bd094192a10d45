"""The SW layers of a model, for people to read."""

import logging
from collections import Counter
from typing import NamedTuple

from tabulate import tabulate
from torch import nn

from ..errors import UserError
from ..layers import SwitchWhiten2d
from .observing import observed
from .placement import find_network, norm_of, numbered_convs

logger = logging.getLogger(__name__)


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
        _, network = find_network(model)
        norms = [(conv, norm_of(network, conv)) for conv in numbered_convs(network)]
    except UserError:  # not one network, or another kind of it: nothing has a number
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


def warn_of_shared_layers(model: nn.Module) -> None:
    """Warn, after the model's next run in training, of SW layers that it has called more than once.

    Each call has statistics of its own then, and evaluation has one set of running values for all:
    so it is where a head of the user's own runs on all levels of a pyramid. Detectron2's heads give
    each level a layer, see `detectron2_patches`.
    """
    layers = {
        row.name: row.layer
        for row in sw_layers(model)
        if row.layer.uses_batch and not row.layer.frozen
    }
    calls = Counter()
    watching = observed(layers, lambda name, x, output: calls.update([name]))
    watching.__enter__()

    def tell(*_) -> None:
        if model.training:
            watching.__exit__(None, None, None)
            handle.remove()
            if shared := [name for name, number in calls.items() if number > 1]:
                logger.warning(
                    f"A run of the model calls {', '.join(shared)} {max(calls.values())} times: "
                    "evaluation will use the same running values for all calls, which differs from "
                    "training if their inputs differ; give each a layer of its own"
                )
        calls.clear()

    handle = model.register_forward_hook(tell)
