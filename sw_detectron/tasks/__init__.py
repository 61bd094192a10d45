"""The tasks; importing them makes them known by name."""

from . import (  # noqa: F401  they register themselves
    classification,
    detection,
    domain_adaptation,
    segmentation,
    style_transfer,
)
