"""Where SW goes in a network, and the backbones that have it."""

from .backbone import with_norms  # importing it registers the backbones
from .placement import PLACEMENTS, NumberedConv, find_resnet, numbered_convs, place
from .surgery import replace_norms

__all__ = [
    "PLACEMENTS",
    "NumberedConv",
    "find_resnet",
    "numbered_convs",
    "place",
    "replace_norms",
    "with_norms",
]
