"""Where SW goes in a network, and the backbones that have it."""

from . import backbone  # noqa: F401  registers the backbones
from .classifier import ImageClassifier
from .placement import PLACEMENTS, NumberedConv, find_resnet, numbered_convs, place
from .surgery import replace_norms

__all__ = [
    "PLACEMENTS",
    "ImageClassifier",
    "NumberedConv",
    "find_resnet",
    "numbered_convs",
    "place",
    "replace_norms",
]
