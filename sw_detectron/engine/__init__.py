"""Training and evaluation."""

from .launch import launch
from .lazy import load_lazy_config, train_or_evaluate_lazy
from .setup import argument_parser, load_config, setup
from .train import train_or_evaluate
from .trainer import Trainer

__all__ = [
    "Trainer",
    "argument_parser",
    "launch",
    "load_config",
    "load_lazy_config",
    "setup",
    "train_or_evaluate",
    "train_or_evaluate_lazy",
]
