"""Where SW goes in a network, and the backbones that have it."""

from .backbone import with_norms  # importing it registers the backbones
from .calibration import calibrate, input_moments, unfuse
from .norms import SW_NORMS, NormFactory, register_norm
from .placement import PLACEMENTS, NumberedConv, find_network, numbered_convs, place
from .surgery import replace_norms

__all__ = [
    "PLACEMENTS",
    "SW_NORMS",
    "NormFactory",
    "NumberedConv",
    "calibrate",
    "find_network",
    "input_moments",
    "numbered_convs",
    "place",
    "register_norm",
    "replace_norms",
    "unfuse",
    "with_norms",
]
