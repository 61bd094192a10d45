"""Whether a ResNet does what the names of its modules say, found by running it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import UserError, one_line
from .observing import in_evaluation, observed
from .placement import NumberedConv, is_norm, is_of_detectron2, norm_of

# Sides of the images to run a network on, in turn until one gets through: networks for CIFAR may
# take 32 x 32 pixels alone, and old ones for ImageNet 224 x 224.
SIDES = (64, 32, 224)


class _Flow:
    """Which convolution's output each norm got, by their names, and in which order they ran."""

    def __init__(self):
        self.convs: list[str] = []
        self.sources: dict[str, set[str | None]] = {}
        self._outputs: dict[int, tuple[str, Tensor, int]] = {}

    def see(self, name: str, x: Tensor, output: Tensor, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d):
            self.convs.append(name)
            # The tensor is kept, so that no other gets its id.
            self._outputs[id(output)] = name, output, output._version
            return
        conv, _, version = self._outputs.get(id(x), (None, None, None))
        # An activation in place, between the two, leaves another version of the tensor.
        self.sources.setdefault(name, set()).add(conv if version == x._version else None)


def check_flow(
    resnet: nn.Module, convs: Sequence[NumberedConv], taken: Sequence[NumberedConv]
) -> None:
    """A run of a ResNet on an image of zeros must show what `numbered_convs` takes for granted.

    The norm of each of `taken` gets the output of its convolution and nothing else, convolutions
    run in the order of their numbers, and none with a norm lies outside of stem and layers. Of what
    is built of Detectron2's parts, whose convolutions run their norms themselves, it is so without
    a run.

    The network is in evaluation mode meanwhile, and as it was afterwards. Its device may be "meta".

    Raises:
        UserError: it is not so, or the network cannot be run.
    """
    if is_of_detectron2(resnet):
        return
    for side in SIDES:
        flow, error = _run(resnet, convs, side)
        if all(conv.norm_name in flow.sources for conv in taken):
            break
    reason = _contradiction(flow, convs, taken)
    if reason:
        failed = f"; the run failed: {one_line(error)}" if error else ""
        raise UserError(
            f"the structure of this {type(resnet).__name__} is not understood: {reason}{failed}"
        )


def _run(
    resnet: nn.Module, convs: Sequence[NumberedConv], side: int
) -> tuple[_Flow, Exception | None]:
    modules = dict(resnet.named_modules())
    layers = {k: m for k, m in modules.items() if isinstance(m, nn.Conv2d) or is_norm(m)}
    layers |= {conv.norm_name: norm_of(resnet, conv) for conv in convs}
    flow = _Flow()
    first = convs[0].module
    # Versions of tensors are counted outside of inference mode only.
    with torch.inference_mode(False), torch.no_grad():
        image = first.weight.new_zeros(1, first.in_channels, side, side)
        see = lambda name, x, output: flow.see(name, x, output, layers[name])  # noqa: E731
        with in_evaluation(resnet), _passed_through(layers), observed(layers, see):
            try:
                resnet(image)
            except Exception as error:  # of any kind, it is someone else's code
                return flow, error
    return flow, None


@contextmanager
def _passed_through(layers: dict[str, nn.Module]) -> Iterator[None]:
    """The norms among some layers hand on what they get. Where it comes from is all that counts,
    and a run then needs none of their kernels, and no types of values that fit."""
    norms = {layer for layer in layers.values() if not isinstance(layer, nn.Conv2d)}
    before = [(norm, vars(norm).get("forward")) for norm in norms]
    for norm in norms:
        norm.forward = lambda x, *_, **__: x.clone()
    try:
        yield
    finally:
        for norm, forward in before:
            del norm.forward
            if forward is not None:
                norm.forward = forward


def _contradiction(
    flow: _Flow, convs: Sequence[NumberedConv], taken: Sequence[NumberedConv]
) -> str | None:
    for conv in taken:
        sources = flow.sources.get(conv.norm_name)
        if sources is None:
            return f"a run of it does not reach {conv.norm_name}"
        if sources != {conv.name}:
            return (
                f"{conv.norm_name} does not get the output of {conv.name} alone; a norm before its "
                "convolution, as in pre-activation blocks, cannot be replaced"
            )
    numbered = {conv.name for conv in convs}
    inside = {conv.name.rpartition(".")[0] + "." for conv in convs if conv.stage != "stem"}
    with_norm = set().union(*flow.sources.values())
    for conv in flow.convs:
        if conv in with_norm - numbered and not conv.startswith(tuple(inside)):
            return f"{conv}, which has a norm, lies outside of its stem and layers"
    order = [name for name in dict.fromkeys(flow.convs) if name in numbered]
    expected = [conv.name for conv in convs if conv.name in order]
    for name, other in zip(order, expected):
        if name != other:
            return f"{name} runs before {other}"
    return None
