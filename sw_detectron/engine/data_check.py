"""A run's data sets are looked at before anything is built or written."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from omegaconf import DictConfig, OmegaConf

from ..data.check import Classes, Wanted, check_contents, check_dataset, check_images
from ..errors import UserError
from ..task import all_tasks, evaluator_builders, find_task

_WHOLE_ONLY = ("cityscapes_instance", "coco_panoptic_seg", "lvis", "pascal_voc")
"""Types of data sets whose evaluators read the ground truth of all images."""


def check_datasets(cfg: CfgNode, training: bool) -> None:
    """Every data set of the run is there, see `check_dataset`, and can be evaluated.

    Raises:
        UserError: naming the data set and the remedy.
    """
    train = cfg.DATASETS.TRAIN if training else ()
    if training and not train:
        raise UserError("DATASETS.TRAIN is empty: name a registered data set to train on")
    unlabelled = find_task(cfg).unlabelled(cfg) if training else ()
    for name in dict.fromkeys((*train, *unlabelled, *cfg.DATASETS.TEST)):
        check_dataset(name)
    for name in cfg.DATASETS.TEST if find_task(cfg).labelled else ():
        _check_evaluation(name)


def check_data(cfg: CfgNode, training: bool) -> None:
    """The data sets that `check_datasets` has seen fit the model and each other.

    Raises:
        UserError: they do not; naming the data set, what is wrong and the remedy.
    """
    task = find_task(cfg)
    train = cfg.DATASETS.TRAIN if training else ()
    _check_contents(train, cfg.DATASETS.TEST, task.wanted(cfg))
    check_images(task.unlabelled(cfg) if training else ())


def check_lazy_data(cfg: DictConfig, training: bool) -> None:
    """As `check_datasets` and `check_data`, of a Python config whose loaders name data sets."""
    train = lazy_dataset_names(cfg, "train") if training else []
    test = lazy_dataset_names(cfg, "test")
    for name in dict.fromkeys((*train, *test)):
        check_dataset(name)
    _check_contents(train, test, _wanted_by_lazy(cfg, [*train, *test]))


def lazy_dataset_names(cfg: DictConfig, split: str) -> list[str]:
    """Those that the config's loader names; empty if it has a loader of another kind."""
    names = OmegaConf.select(cfg, f"dataloader.{split}.dataset.names", default=())
    return [names] if isinstance(names, str) else list(names)


@contextmanager
def logs_held_back() -> Iterator[list[logging.LogRecord]]:
    """What is logged meanwhile; for a time at which it is not known yet where logs go to."""
    held: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = held.append
    loggers = [logging.getLogger(name) for name in ("detectron2", "sw_detectron")]
    before = [(log, log.handlers, log.propagate, log.level) for log in loggers]
    for log in loggers:
        log.handlers, log.propagate = [handler], False
        log.setLevel(logging.INFO)
    try:
        yield held
    finally:
        for log, log.handlers, log.propagate, level in before:
            log.setLevel(level)


def release_logs(held: Sequence[logging.LogRecord]) -> None:
    """Log what was held back."""
    for record in held:
        logging.getLogger(record.name).handle(record)


def _check_contents(train: Sequence[str], test: Sequence[str], wanted: Wanted) -> None:
    checks = {kind: check for task in all_tasks() for kind, check in task.checks.items()}
    check_contents(train, test, wanted, checks)


def _check_evaluation(name: str) -> None:
    """Its evaluator is known, and can do with a part of a data set if it is one."""
    metadata = MetadataCatalog.get(name)
    kind, builders = metadata.get("evaluator_type"), evaluator_builders()
    if kind not in builders:
        raise UserError(
            f"data set {name!r} declares evaluator_type {kind!r}; set "
            f"MetadataCatalog.get({name!r}).evaluator_type to one of {', '.join(builders)}"
        )
    if metadata.get("sliced_from") and kind in _WHOLE_ONLY:
        raise UserError(
            f"data set {name!r}: the evaluation of {kind} reads the ground truth of all images; "
            f"name {metadata.sliced_from!r} as a whole"
        )


def _wanted_by_lazy(cfg: DictConfig, names: Sequence[str]) -> Wanted:
    """What the model of a Python config wants, where Detectron2's models have these arguments."""
    # A detector's classes are an argument of its heads, or of the model itself.
    kinds = {"model.roi_heads.num_classes": "thing_classes"}
    labelled = any(MetadataCatalog.get(name).get("list_classes") for name in names)
    kinds["model.num_classes"] = "list_classes" if labelled else "thing_classes"
    kinds["model.sem_seg_head.num_classes"] = "stuff_classes"
    found = {key: OmegaConf.select(cfg, key, default=None) for key in kinds}
    mapper = OmegaConf.select(cfg, "dataloader.train.mapper", default=None) or {}
    ignore = "model.sem_seg_head.ignore_value"
    return Wanted(
        classes={kinds[key]: Classes(key, n) for key, n in found.items() if isinstance(n, int)},
        mask_format=mapper.get("instance_mask_format", "polygon")
        if mapper.get("use_instance_mask")
        else "",
        ignore=(ignore, OmegaConf.select(cfg, ignore, default=255)),
        filter_empty=OmegaConf.select(cfg, "dataloader.train.dataset.filter_empty", default=True),
    )
