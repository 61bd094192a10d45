"""What a kind of training has of its own, and the tasks by name.

A task is a folder of `tasks/`. What all of them share is in `engine/`, which asks a task here and
knows none by heart.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import Metadata
from detectron2.engine import DefaultPredictor, DefaultTrainer
from detectron2.evaluation import DatasetEvaluator

from .data.check import Check, Wanted
from .errors import UserError

EvaluatorBuilder = Callable[[str, str], DatasetEvaluator]
"""From a data set's name and the folder of the predictions to its evaluator."""


class Task:
    """A kind of training; subclasses override what they have of their own.

    Attributes:
        name: as the config's key TASK says it, and the task's folder.
        output: the key of the model's outputs that `results` reads.
        meta_architectures: a config without TASK is of the task that lists its
            MODEL.META_ARCHITECTURE here, and of "detection" if none does.
        confidence: the lowest score of a prediction's result, if none is asked for.
        labelled: whether its data sets have classes; else any images do, and no results but
            pictures come of them.
        trainer: the subclass of `engine.Trainer`.
        evaluators: by the `evaluator_type` that a data set's metadata declares.
        checks: of data sets, by the entry of their metadata that has the classes' names.
        lowest: the least value of the task's keys that training reads, or of each of their items.
        choices: the values that the task's keys can have.
    """

    name: str
    output: str
    meta_architectures: tuple[str, ...] = ()
    confidence = 0.5
    labelled = True
    trainer: type[DefaultTrainer]
    evaluators: Mapping[str, EvaluatorBuilder] = {}
    checks: Mapping[str, Check] = {}
    lowest: Mapping[str, float] = {}
    choices: Mapping[str, Sequence[str]] = {}

    def add_config(self, cfg: CfgNode) -> None:
        """Add the task's keys, with their defaults, to a Detectron2 config."""

    def register_datasets(self, cfg: CfgNode) -> None:
        """Register the data sets that keys of the config describe.

        Raises:
            UserError: a description is wrong.
        """

    def follow_data(self, cfg: CfgNode, given: Collection[str]) -> None:
        """Set what the registered data sets leave no doubt about, such as the number of classes.

        Args:
            given: the keys that the user sets, in a file or on the command line; these stay.
        """

    def unlabelled(self, cfg: CfgNode) -> Sequence[str]:
        """The names of further data sets that training reads, and wants the images of alone.

        Raises:
            UserError: it cannot do without any.
        """
        return ()

    def wanted(self, cfg: CfgNode) -> Wanted:
        """What the config's model takes of its data sets."""
        return Wanted()

    def class_names(self, metadata: Metadata) -> Sequence[str]:
        """The classes of a data set in the order of the model's outputs; empty if not known."""
        return ()

    def build_predictor(self, cfg: CfgNode, confidence: float) -> Callable[[np.ndarray], dict]:
        """A function from a picture (H, W, 3), uint8, BGR, to the model's outputs.

        It may have a method `batch`, of several pictures at once, which gives a list of the outputs
        that it gives of each alone, and a method `check`, which raises a `UserError` for a picture
        that it does not take. Its attribute `model` is the model, with the weights of
        MODEL.WEIGHTS or, if that is empty, with those that it was initialized with.

        Args:
            confidence: the lowest score of a result that is wanted.
        """
        return DefaultPredictor(cfg)

    def results(
        self, outputs: dict, frame: np.ndarray, metadata: Metadata, confidence: float
    ) -> tuple[list[dict], np.ndarray]:
        """What the model's outputs say of a picture, and the picture with it drawn in.

        Args:
            outputs: of the predictor.
            frame: (H, W, 3), uint8, BGR.
            metadata: of the data set whose classes the model knows.
            confidence: the lowest score of a result, in [0, 1].

        Returns:
            The results, which lack only where they are from, and the picture (H', W', 3), uint8,
            BGR.
        """
        raise UserError(f"tools/predict.py does not know the task {self.name!r}")

    def page_sections(
        self, keys: Mapping, test_datasets: Sequence[str], folder: Path
    ) -> dict[str, str]:
        """What the page of a run shows of this task alone: HTML by headline.

        Args:
            keys: the run's config, a Python config's too: then every task is asked.
            test_datasets: the names of those that the run was evaluated on.
            folder: of the run.
        """
        return {}


_tasks: dict[str, Task] = {}


def register_task(task: Task) -> None:
    """Make a task known under its name, in the place of one that had it."""
    _tasks[task.name] = task


def all_tasks() -> list[Task]:
    """The registered tasks, in the order of their registration."""
    return list(_tasks.values())


def find_task(cfg: CfgNode) -> Task:
    """The task of a config, by TASK or, if that is empty, by MODEL.META_ARCHITECTURE.

    Raises:
        UserError: there is no such task.
    """
    if cfg.TASK:
        if cfg.TASK not in _tasks:
            raise UserError(f"TASK {cfg.TASK!r}: there are {', '.join(_tasks)}")
        return _tasks[cfg.TASK]
    having = (t for t in all_tasks() if cfg.MODEL.META_ARCHITECTURE in t.meta_architectures)
    return next(having, _tasks["detection"])


def evaluator_builders() -> dict[str, EvaluatorBuilder]:
    """Of all tasks, by the `evaluator_type` of data sets."""
    return {kind: build for task in all_tasks() for kind, build in task.evaluators.items()}
