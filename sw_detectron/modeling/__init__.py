"""Where SW goes in a network, and the backbones that have it."""

from . import backbone  # noqa: F401  registers the backbones
from .calibration import calibrate, input_moments, unfuse
from .placement import PLACEMENTS, NumberedConv, find_resnet, numbered_convs, place
from .surgery import replace_norms

__all__ = [
    "PLACEMENTS",
    "NumberedConv",
    "calibrate",
    "find_resnet",
    "input_moments",
    "numbered_convs",
    "place",
    "replace_norms",
    "unfuse",
]
