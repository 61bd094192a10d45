"""The normalization layer, its mathematics, and its names in Detectron2."""

from .mixing import STATISTICS
from .norm_registry import SW_NORMS, register_norm
from .switch_whiten import SwitchWhiten2d

__all__ = ["STATISTICS", "SW_NORMS", "SwitchWhiten2d", "register_norm"]
