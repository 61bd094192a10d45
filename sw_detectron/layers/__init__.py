"""The normalization layer and its mathematics; nothing here knows Detectron2."""

from .backend import set_backend
from .mixing import STATISTICS
from .switch_whiten import SwitchWhiten2d

__all__ = ["STATISTICS", "SwitchWhiten2d", "set_backend"]
