"""Norms by name: makes Detectron2's `get_norm` know Switchable Whitening and users' variants."""

import functools
import types
from collections.abc import Callable

from detectron2.layers import FrozenBatchNorm2d, batch_norm
from torch import nn

from .switch_whiten import SwitchWhiten2d

NormFactory = Callable[[int], nn.Module]

# The sets of the paper's experiments under the names that a config can use.
SW_NORMS: dict[str, NormFactory] = {
    "SW": functools.partial(SwitchWhiten2d, statistics=("bw", "iw")),
    "SWa": functools.partial(SwitchWhiten2d, statistics=("bw", "iw")),
    "SWb": functools.partial(SwitchWhiten2d, statistics=("bw", "iw", "bn", "in", "ln")),
    "SN": functools.partial(SwitchWhiten2d, statistics=("bn", "in", "ln")),
    "BW": functools.partial(SwitchWhiten2d, statistics=("bw",)),
    "IW": functools.partial(SwitchWhiten2d, statistics=("iw",)),
}

_registered: dict[str, NormFactory] = {}


def register_norm(name: str, factory: NormFactory, overwrite: bool = False) -> None:
    """Make `name` a norm that every Detectron2 component accepts, in code and in configs.

    Args:
        name: what a config's NORM key says.
        factory: called with the number of channels, returns the layer.
        overwrite: replace a norm of that name, which may be a built-in one.

    Raises:
        ValueError: the name is taken by another norm and `overwrite` is false.
    """
    if not name:
        raise ValueError("a norm needs a name: the empty name means no norm in Detectron2")
    same = _registered.get(name) is factory
    if not (overwrite or same) and (name in _registered or _is_built_in(name)):
        raise ValueError(f"norm {name!r} exists already; pass overwrite=True to replace it")
    _registered[name] = factory


def _is_built_in(name: str) -> bool:
    try:
        _built_in_get_norm(name, 1)
    except KeyError:
        return False
    except Exception:
        pass  # known, but it wants other channels or a GPU
    return True


def _get_norm(norm, out_channels):
    if isinstance(norm, str) and norm in _registered:
        return _registered[norm](out_channels)
    try:
        return _built_in_get_norm(norm, out_channels)
    except KeyError:
        raise KeyError(
            f"unknown norm {norm!r}: neither one of Detectron2's nor one of {sorted(_registered)}"
        ) from None


def _extend_get_norm() -> NormFactory:
    """Teach Detectron2's `get_norm` the registered names; returns the function as it was.

    Some 15 modules have imported the function under a name of their own, and users' modules may
    have. Its code is replaced in place, so that whoever holds it, now or later, has the new one.
    """
    get_norm = batch_norm.get_norm
    if not hasattr(get_norm, "_built_in"):
        get_norm._built_in = types.FunctionType(
            get_norm.__code__, get_norm.__globals__, "built_in_get_norm"
        )

        def extended(norm, out_channels):
            return _sw_detectron_get_norm(norm, out_channels)  # noqa: F821, see below

        get_norm.__code__ = extended.__code__
    # Its globals are those of Detectron2's module; a reload of this module renews the entry.
    get_norm.__globals__["_sw_detectron_get_norm"] = _get_norm
    return get_norm._built_in


def _extend_freezing() -> None:
    """Let Detectron2's freezing of a stage, which knows BN types only, freeze SW layers too."""
    if hasattr(FrozenBatchNorm2d, "_freezes_sw"):
        return
    convert = FrozenBatchNorm2d.convert_frozen_batchnorm.__func__

    @functools.wraps(convert)
    def convert_and_freeze(cls, module):
        for layer in module.modules():
            if isinstance(layer, SwitchWhiten2d):
                layer.freeze()
        return convert(cls, module)

    FrozenBatchNorm2d.convert_frozen_batchnorm = classmethod(convert_and_freeze)
    FrozenBatchNorm2d._freezes_sw = True


_built_in_get_norm = _extend_get_norm()
_extend_freezing()
for _name, _factory in SW_NORMS.items():
    register_norm(_name, _factory)
