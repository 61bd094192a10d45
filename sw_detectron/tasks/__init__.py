"""The tasks; importing them makes them known by name."""

from . import classification, detection, segmentation  # noqa: F401  they register themselves
