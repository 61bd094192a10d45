"""Watching the layers of a model while it runs, and leaving the model as it was."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

See = Callable[[str, Tensor, Tensor], None]


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode inside, and each of its modules as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def observed(layers: Mapping[str, nn.Module], see: See) -> Iterator[None]:
    """Inside, `see(name, input, output)` is called after every call of one of the layers."""
    handles = [
        layer.register_forward_hook(
            lambda _, inputs, output, name=name: see(name, inputs[0], output)
        )
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
