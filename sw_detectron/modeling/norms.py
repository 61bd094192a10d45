"""Norms by name: SW's sets of statistics, users' variants, and Detectron2's own."""

import difflib
import functools
from collections.abc import Callable

from detectron2.layers import batch_norm
from torch import nn

from ..errors import UserError
from ..layers import SwitchWhiten2d

NormFactory = Callable[[int], nn.Module]

# Detectron2's own names, but for those that it has for debugging.
BUILT_IN = ("BN", "SyncBN", "FrozenBN", "GN", "LN", "naiveSyncBN")

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


class UnknownNorm(UserError, KeyError):
    """No norm has a name; a KeyError too, for that is what Detectron2 raises then."""

    __str__ = Exception.__str__  # a KeyError's puts quotes around the message


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


def get_norm(norm: str | NormFactory | None, out_channels: int) -> nn.Module | None:
    """What Detectron2's `get_norm` is since the package was imported.

    Args:
        norm: a registered or built-in name, a factory, or "" or None for no norm.

    Raises:
        UnknownNorm: no norm has that name.
        UserError: the channels do not suit a registered norm.
    """
    if isinstance(norm, str) and norm in _registered:
        try:
            return _registered[norm](out_channels)
        except ValueError as error:
            raise UserError(f"norm {norm!r} does not fit: {error}") from error
    if isinstance(norm, str) and norm and not _is_built_in(norm):
        names = [*BUILT_IN, *_registered]
        similar = difflib.get_close_matches(norm, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise UnknownNorm(f"unknown norm {norm!r}: {hint}there are {', '.join(names)}")
    return _get_built_in_norm(norm, out_channels)


def _get_built_in_norm(norm: str | NormFactory | None, out_channels: int) -> nn.Module | None:
    """Detectron2's `get_norm` as it was before `detectron2_patches`."""
    return getattr(batch_norm, "built_in_get_norm", batch_norm.get_norm)(norm, out_channels)


@functools.cache
def _is_built_in(name: str) -> bool:
    try:
        _get_built_in_norm(name, 1)
    except KeyError:
        return False
    except Exception:
        pass  # known, but it wants other channels or a GPU
    return True


for _name, _factory in SW_NORMS.items():
    register_norm(_name, _factory)
