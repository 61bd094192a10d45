"""Data sets that the package makes by itself."""

from .shapes import generate_shapes, register_shapes

__all__ = ["generate_shapes", "register_shapes"]
