"""The normalization layer and its mathematics."""

from .backend import set_backend
from .mixing import STATISTICS
from .norm_registry import SW_NORMS, register_norm
from .switch_whiten import SwitchWhiten2d

__all__ = ["STATISTICS", "SW_NORMS", "SwitchWhiten2d", "register_norm", "set_backend"]
