"""Schedules written in epochs."""

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from tabulate import tabulate

from ..errors import UserError

EPOCH_KEYS = {
    "SOLVER.EPOCHS": "SOLVER.MAX_ITER",
    "SOLVER.STEP_EPOCHS": "SOLVER.STEPS",
    "SOLVER.WARMUP_EPOCHS": "SOLVER.WARMUP_ITERS",
    "SOLVER.IMPORTANCE_STOP_EPOCH": "SOLVER.IMPORTANCE_STOP_ITER",
    "SOLVER.CHECKPOINT_EPOCHS": "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_EPOCHS": "TEST.EVAL_PERIOD",
}
"""The key in iterations that each key in epochs gives."""


def epochs_to_iterations(cfg: CfgNode, given: list[str]) -> str:
    """Set the keys in iterations from those in epochs that are not zero or empty, in place.

    An epoch is as many images as DATASETS.TRAIN has; iterations are rounded to the nearest.

    Args:
        given: the keys that the command line sets.

    Returns:
        A table of both for the log; empty if nothing is in epochs.

    Raises:
        UserError: the command line sets a key in iterations that one in epochs would replace.
    """
    in_epochs = {key: value for key in EPOCH_KEYS if (value := _get(cfg, key))}
    if not in_epochs:
        return ""
    for key in in_epochs:
        if EPOCH_KEYS[key] in given and key not in given:
            nothing = "()" if key == "SOLVER.STEP_EPOCHS" else "0"
            raise UserError(
                f"{EPOCH_KEYS[key]} is given, but the config's {key} would replace it; give "
                f"{key}, or {key} {nothing} as well"
            )
    num_images = sum(len(DatasetCatalog.get(name)) for name in cfg.DATASETS.TRAIN)
    per_epoch = num_images / cfg.SOLVER.IMS_PER_BATCH
    rows = []
    for key, epochs in in_epochs.items():
        many = isinstance(epochs, (list, tuple))
        iterations = tuple(max(1, round(e * per_epoch)) for e in (epochs if many else [epochs]))
        cfg.merge_from_list([EPOCH_KEYS[key], iterations if many else iterations[0]])
        rows.append((key, epochs, EPOCH_KEYS[key], iterations if many else iterations[0]))
    table = tabulate(rows, headers=["in epochs", "", "in iterations", ""], tablefmt="simple")
    return (
        f"{num_images} images, {cfg.SOLVER.IMS_PER_BATCH} a step: an epoch is {per_epoch:g} "
        f"iterations.\n{table}"
    )


def _get(cfg: CfgNode, key: str):
    for part in key.split("."):
        cfg = cfg[part]
    return cfg
