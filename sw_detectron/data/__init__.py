"""The data sets that the package registers, and their loading."""

from .classification import register_class_folders, register_classification
from .classification_shapes import register_shape_classes
from .shapes import generate_shapes, register_shapes
from .shapes_sem_seg import register_shapes_sem_seg

__all__ = [
    "generate_shapes",
    "register_class_folders",
    "register_classification",
    "register_shape_classes",
    "register_shapes",
    "register_shapes_sem_seg",
]
