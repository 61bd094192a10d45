"""Training and evaluation."""

from .launch import launch
from .setup import argument_parser, load_config, load_model, setup
from .train import train_or_evaluate
from .trainer import Trainer

__all__ = [
    "Trainer",
    "argument_parser",
    "launch",
    "load_config",
    "load_model",
    "setup",
    "train_or_evaluate",
]
