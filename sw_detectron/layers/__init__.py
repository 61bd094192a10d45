"""The normalization layer and its mathematics; nothing here knows Detectron2."""

from .mixing import STATISTICS
from .switch_whiten import SwitchWhiten2d

__all__ = ["STATISTICS", "SwitchWhiten2d"]
