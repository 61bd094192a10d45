"""Where SW goes in a network, the backbones that have it, and the segmentation network."""

from . import dilated_resnet, psp_head, segmentor  # noqa: F401  they register themselves
from .backbone import with_norms  # importing it registers the backbones
from .calibration import calibrate, input_moments, unfuse
from .classifier import ImageClassifier
from .placement import PLACEMENTS, NumberedConv, find_resnet, numbered_convs, place
from .surgery import replace_norms

__all__ = [
    "PLACEMENTS",
    "ImageClassifier",
    "NumberedConv",
    "calibrate",
    "find_resnet",
    "input_moments",
    "numbered_convs",
    "place",
    "replace_norms",
    "unfuse",
    "with_norms",
]
