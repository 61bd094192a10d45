"""Reading and writing checkpoints."""

from .checkpointer import Checkpointer

__all__ = ["Checkpointer"]
