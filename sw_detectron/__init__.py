"""Switchable Whitening (Pan et al., ICCV 2019) for Detectron2.

Importing this package makes the norms "SW", "SWa", "SWb", "SN", "BW" and "IW" known wherever
Detectron2 takes a norm's name, and registers the backbones, the classifier, the segmentation
network and the data sets.
"""

import warnings

try:
    with warnings.catch_warnings():
        # Detectron2 scripts functions while it is being imported, which newer torch deprecates.
        warnings.filterwarnings("ignore", message=".*torch.jit", category=FutureWarning)
        import detectron2.modeling  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "detectron2":
        raise
    raise ModuleNotFoundError(
        "sw_detectron needs Detectron2: with a C++ compiler, pip install "
        "'git+https://github.com/facebookresearch/detectron2.git'; without one, run "
        "'make setup' in sw_detectron's checkout, or see 'Installing' in its README",
        name="detectron2",
    ) from None

from .config import add_sw_config, find_bases_by_name
from .data import (
    register_classification,
    register_shape_classes,
    register_shapes,
    register_shapes_sem_seg,
)
from .errors import UserError
from .layers import SwitchWhiten2d, register_norm
from .modeling import replace_norms

__version__ = "0.1.0"
__all__ = [
    "SwitchWhiten2d",
    "UserError",
    "add_sw_config",
    "register_norm",
    "replace_norms",
]

find_bases_by_name()
register_shapes()
register_shape_classes()
register_classification()
register_shapes_sem_seg()
