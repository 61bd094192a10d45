"""The data sets that the package registers, and their loading."""

from .classification import register_class_folders, register_classification
from .classification_shapes import register_shape_classes
from .shapes import generate_shapes, register_shapes

__all__ = [
    "generate_shapes",
    "register_class_folders",
    "register_classification",
    "register_shape_classes",
    "register_shapes",
]
