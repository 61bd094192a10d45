"""Reading, converting and writing checkpoints."""

from .checkpointer import Checkpointer
from .reading import read_checkpoint

__all__ = ["Checkpointer", "read_checkpoint"]
