"""Data sets that the package makes by itself."""

from .shapes import generate_shapes, register_shapes
from .shapes_sem_seg import register_shapes_sem_seg

__all__ = ["generate_shapes", "register_shapes", "register_shapes_sem_seg"]
