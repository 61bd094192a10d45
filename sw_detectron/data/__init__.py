"""What several tasks read: images, videos, generated scenes, and data sets by name."""

from .shapes import generate_shapes, register_shapes

__all__ = ["generate_shapes", "register_shapes"]
