"""Switchable Whitening (Pan et al., ICCV 2019) for Detectron2.

Importing this package makes the norms "SW", "SWa", "SWb", "SN", "BW" and "IW" known wherever
Detectron2 takes a norm's name, and registers the backbones, the classifier, the segmentation
network and the data sets.
"""

import warnings

from . import quiet  # noqa: F401  before others are imported that have something to say

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
        "'make setup' in sw_detectron's checkout, or see docs/install.md there",
        name="detectron2",
    ) from None

from . import tasks  # noqa: F401  they register themselves, their models and their data sets
from .config import add_sw_config
from .detectron2_patches import apply_patches
from .errors import UserError
from .layers import SwitchWhiten2d, set_backend
from .modeling import register_norm, replace_norms

__version__ = "0.1.0"
__all__ = [
    "SwitchWhiten2d",
    "UserError",
    "add_sw_config",
    "register_norm",
    "replace_norms",
    "set_backend",
]

apply_patches()
