"""Every change that importing the package makes in Detectron2.

- `detectron2.layers.get_norm` knows the names of `modeling.norms` besides its own.
- `FrozenBatchNorm2d.convert_frozen_batchnorm`, by which Detectron2 freezes the first stages of a
  backbone, freezes SW layers too.
- `RetinaNetHead` and its subclasses, which run one head on all levels of a pyramid, give SW
  statistics for each level, as they give BN.
- `PreciseBN` finds the precise statistics of SW in the run in which it finds those of BN.
- `CfgNode.load_yaml_with_base`, by which configs are read, finds the package's configs by their
  bare names in `_BASE_`.
- `detection_utils.read_image`, by which Detectron2's mappers read images, is `data.images`'s: what
  a detector is trained on is what it sees in prediction, and an unreadable file is named.
- `ImageList` notes the sizes of its images, for norms that leave padding out of their statistics.
- `build_model`'s meta-architectures do with padding what MODEL.SW.PADDING says.

`python -m sw_detectron.run` makes two more, for the script that it runs; see `run.py`.
"""

import functools
import gc
import logging
import sys
import types
from collections.abc import Sequence

from detectron2.config import CfgNode, configurable
from detectron2.data import detection_utils
from detectron2.engine import hooks
from detectron2.layers import CycleBatchNormList, FrozenBatchNorm2d, batch_norm
from detectron2.modeling.meta_arch import build, retinanet
from detectron2.structures import ImageList
from torch import nn

from .config import load_yaml_with_base
from .data.images import read_image
from .layers import SwitchWhiten2d
from .modeling import norms
from .modeling.calibration import PooledMoments, calibrated_layers, set_running_values
from .modeling.padding import note_image_sizes, set_padding

logger = logging.getLogger(__name__)


def apply_patches() -> None:
    """Make all of them; again, it does nothing."""
    _extend_get_norm()
    CfgNode.load_yaml_with_base = classmethod(load_yaml_with_base)
    detection_utils.read_image = read_image
    if not hasattr(FrozenBatchNorm2d, "_freezes_sw"):
        FrozenBatchNorm2d._freezes_sw = True
        _extend_freezing()
        _extend_retinanet_head()
        _extend_precise_bn()
        _extend_image_list()
        _extend_build_model()


def _extend_get_norm() -> None:
    """Put `norms.get_norm` in the place of Detectron2's.

    Some 15 modules have imported the function under a name of their own, and users' modules may
    have. Its code is replaced in place, so that whoever holds it, now or later, has the new one. So
    has another plugin that has put a function of its own before it, wherever that keeps it.
    """

    def extended(norm, out_channels):
        return _sw_detectron_get_norm(norm, out_channels)  # noqa: F821, an entry of its globals

    # Its globals are those of Detectron2's module; after a reload of `norms` this renews the entry.
    batch_norm._sw_detectron_get_norm = norms.get_norm
    originals = [
        function
        for function in gc.get_referrers(vars(batch_norm))
        if isinstance(function, types.FunctionType) and function.__name__ == "get_norm"
    ]
    untouched = [f for f in originals if f.__code__ != extended.__code__]
    for function in untouched:
        batch_norm.built_in_get_norm = types.FunctionType(
            function.__code__, function.__globals__, "built_in_get_norm"
        )
        function.__code__ = extended.__code__
    if untouched or not originals:
        _warn_of_others(originals)


def _warn_of_others(originals: list[types.FunctionType]) -> None:
    """A function that stands in the place of Detectron2's has to pass on the names of SW."""
    held = {
        id(function): function
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "detectron2" and (function := getattr(module, "get_norm", None))
    }
    for key in held.keys() - set(map(id, originals)):
        try:
            knows = isinstance(held[key]("SW", 16), SwitchWhiten2d)
        except Exception:  # whatever it does with a name that it does not know
            knows = False
        if not knows:
            name = getattr(held[key], "__module__", None) or type(held[key]).__module__
            logger.warning(
                f"the get_norm of {name} stands in place of Detectron2's and refuses SW; let it "
                "hand on names that it does not know to the function that it replaces"
            )


def _extend_freezing() -> None:
    """Let Detectron2's freezing of a stage, which knows BN types only, freeze SW layers too."""
    convert = FrozenBatchNorm2d.convert_frozen_batchnorm.__func__

    @functools.wraps(convert)
    def convert_and_freeze(cls, module):
        for layer in module.modules():
            if isinstance(layer, SwitchWhiten2d):
                layer.freeze()
        return convert(cls, module)

    FrozenBatchNorm2d.convert_frozen_batchnorm = classmethod(convert_and_freeze)


def _extend_retinanet_head() -> None:
    """Give the heads of RetinaNet and FCOS SW layers for each level; Detectron2 gives them BN."""
    build = retinanet.RetinaNetHead.__init__.__wrapped__  # without the reading of a config

    @functools.wraps(build)
    def build_with_levels(self, *, input_shape, conv_dims, norm="", **kwargs):
        norm = _norm_of_levels(norm, len(input_shape), conv_dims)
        build(self, input_shape=input_shape, conv_dims=conv_dims, norm=norm, **kwargs)
        if any(isinstance(module, CycleBatchNormList) for module in self.modules()):
            self.register_forward_pre_hook(_start_with_first_level)

    retinanet.RetinaNetHead.__init__ = configurable(build_with_levels)


def _start_with_first_level(head: nn.Module, _: tuple) -> None:
    # Also after a run that was broken off between two levels, by an error or by hand.
    for module in head.modules():
        if isinstance(module, CycleBatchNormList):
            module._pos = 0


def _norm_of_levels(
    norm: str | norms.NormFactory | None, num_levels: int, channels: Sequence[int]
) -> str | norms.NormFactory | None:
    """The norm of a head that runs on one level of a pyramid after the other.

    An SW layer that takes statistics of the batch becomes one layer a level, in Detectron2's
    `CycleBatchNormList`, as Detectron2 does it with BN: the levels differ in their statistics, and
    evaluation with running values of all levels would be far from what was trained. As there, γ
    and β are shared; importance weights are each level's own. Any other norm stays what it is.

    Args:
        norm: as `get_norm` takes it.
        num_levels: how often the head runs.
        channels: of the layers that the head is going to have.
    """
    layer = retinanet.get_norm(norm, channels[0]) if channels else None
    if not (isinstance(layer, SwitchWhiten2d) and layer.uses_batch):
        return norm

    def of_level(num_features: int, affine: bool) -> SwitchWhiten2d:
        level = retinanet.get_norm(norm, num_features)
        level.affine, level.weight, level.bias = affine, None, None
        return level

    def make(num_features: int) -> CycleBatchNormList | None:
        if num_features not in channels:  # Detectron2 asks for 32 to see the type of the norm
            return None
        return CycleBatchNormList(
            num_levels, of_level, num_features=num_features, affine=layer.affine
        )

    return make


def _extend_precise_bn() -> None:
    """Let the hook of TEST.PRECISE_BN, which knows BN types only, do the same for SW layers."""
    update = hooks.PreciseBN.update_stats

    @functools.wraps(update)
    def update_with_sw(self):
        layers = {} if self._disabled else calibrated_layers(self._model)
        with PooledMoments(layers) as pooled:
            update(self)
        for name, (mean, cov) in pooled.result().items():
            set_running_values(layers[name][0], mean, cov)

    hooks.PreciseBN.update_stats = update_with_sw


def _extend_image_list() -> None:
    """Let the layers know the sizes of the images that a model puts into one tensor."""
    initialize = ImageList.__init__

    @functools.wraps(initialize)
    def initialize_and_note(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        note_image_sizes(self)

    ImageList.__init__ = initialize_and_note


def _extend_build_model() -> None:
    """Let models do what MODEL.SW.PADDING says, outside of their backbone too.

    The function is replaced in place, for those who have imported it under a name of their own.
    """
    function = build.build_model
    original = types.FunctionType(function.__code__, function.__globals__, "built_in_build_model")

    def build_with_padding(cfg):
        return _sw_detectron_build_model(cfg)  # noqa: F821, an entry of its globals

    def extended(cfg):
        model = original(cfg)
        if "SW" in cfg.MODEL:
            set_padding(model, cfg.MODEL.SW.PADDING)
        return model

    build._sw_detectron_build_model = extended
    function.__code__ = build_with_padding.__code__
