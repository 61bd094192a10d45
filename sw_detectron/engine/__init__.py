"""What all tasks share: from a config to a trained and evaluated model."""

from .corruption import corruption_benchmark
from .image_arguments import add_image_arguments, batches_of
from .launch import launch
from .lazy import load_lazy_config, train_or_evaluate_lazy
from .padding_benchmark import padding_benchmark
from .setup import argument_parser, load_config, load_model, setup
from .train import train_or_evaluate
from .trainer import Trainer

__all__ = [
    "Trainer",
    "add_image_arguments",
    "argument_parser",
    "batches_of",
    "corruption_benchmark",
    "launch",
    "load_config",
    "load_lazy_config",
    "load_model",
    "padding_benchmark",
    "setup",
    "train_or_evaluate",
    "train_or_evaluate_lazy",
]
