"""Every change that importing the package makes in Detectron2.

- `detectron2.layers.get_norm` knows the names of `modeling.norms` besides its own.
- `FrozenBatchNorm2d.convert_frozen_batchnorm`, by which Detectron2 freezes the first stages of a
  backbone, freezes SW layers too.
- `detection_utils.read_image`, by which Detectron2's mappers read images, is `data.images`'s: what
  a detector is trained on is what it sees in prediction, and an unreadable file is named.

`python -m sw_detectron.run` makes two more, for the script that it runs; see `run.py`.
"""

import functools
import types

from detectron2.data import detection_utils
from detectron2.layers import FrozenBatchNorm2d, batch_norm

from .data.images import read_image
from .layers import SwitchWhiten2d
from .modeling import norms


def apply_patches() -> None:
    """Make all of them; again, it does nothing."""
    _extend_get_norm()
    _extend_freezing()
    detection_utils.read_image = read_image


def _extend_get_norm() -> None:
    """Put `norms.get_norm` in the place of Detectron2's.

    Some 15 modules have imported the function under a name of their own, and users' modules may
    have. Its code is replaced in place, so that whoever holds it, now or later, has the new one.
    """
    get_norm = batch_norm.get_norm
    # Its globals are those of Detectron2's module; after a reload of `norms` this renews the entry.
    get_norm.__globals__["_sw_detectron_get_norm"] = norms.get_norm
    if hasattr(get_norm, "built_in"):
        return
    get_norm.built_in = types.FunctionType(
        get_norm.__code__,
        get_norm.__globals__,
        "built_in_get_norm",
        get_norm.__defaults__,
        get_norm.__closure__,
    )

    def extended(norm, out_channels):
        return _sw_detectron_get_norm(norm, out_channels)  # noqa: F821, an entry of its globals

    # Another plugin may have wrapped it in a closure, and new code must have as many variables.
    get_norm.__code__ = extended.__code__.replace(co_freevars=get_norm.__code__.co_freevars)


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
