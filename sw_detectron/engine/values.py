"""Values of a config that cannot work are refused before anything is built, or named when what is
built by them fails."""

import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from detectron2.config import CfgNode, get_cfg
from detectron2.utils import comm
from omegaconf import DictConfig, OmegaConf

from ..config import add_sw_config, flatten
from ..errors import UserError, one_line
from ..layers.padding import PADDINGS
from ..task import all_tasks
from .schedule import EPOCH_KEYS

# The lowest value of a key that training reads, or of each item of one that is a list. None, where
# a key may be that, is no value.
LOWEST = {
    "SOLVER.MAX_ITER": 1,
    "SOLVER.IMS_PER_BATCH": 1,
    "SOLVER.CHECKPOINT_PERIOD": 1,
    "SOLVER.STEPS": 1,
    "SOLVER.REFERENCE_WORLD_SIZE": 0,
    "SOLVER.BASE_LR": 0,
    "SOLVER.GAMMA": 0,
    "SOLVER.MOMENTUM": 0,
    "SOLVER.POLY_LR_POWER": 0,
    "SOLVER.POLY_LR_MAX_ITER": 0,
    "SOLVER.WARMUP_FACTOR": 0,
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.WEIGHT_DECAY": 0,
    "SOLVER.WEIGHT_DECAY_NORM": 0,
    "SOLVER.WEIGHT_DECAY_BIAS": 0,
    "SOLVER.WEIGHT_DECAY_IMPORTANCE": 0,
    "SOLVER.BIAS_LR_FACTOR": 0,
    "SOLVER.HEAD_LR_FACTOR": 0,
    "SOLVER.IMPORTANCE_LR_FACTOR": 0,
    "SOLVER.IMPORTANCE_STOP_ITER": 0,
    "INPUT.MIN_SIZE_TRAIN": 0,
    "INPUT.MAX_SIZE_TRAIN": 1,
    "TEST.EVAL_PERIOD": 0,
    "TEST.PRECISE_BN.NUM_ITER": 1,
    **dict.fromkeys(EPOCH_KEYS, 0),
}
# Of keys that evaluation reads too.
LOWEST_ALWAYS = {
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TEST": 0,
    "INPUT.MAX_SIZE_TEST": 1,
    "MODEL.SW.EPS": 0,
    "MODEL.SW.MOMENTUM": 0,
}
CHOICES = {
    "INPUT.FORMAT": ("BGR", "RGB", "L", "YUV-BT.601"),
    "INPUT.MASK_FORMAT": ("polygon", "bitmask"),
    "INPUT.RANDOM_FLIP": ("horizontal", "vertical", "none"),
    "MODEL.SW.PADDING": PADDINGS,
}
LAZY_LOWEST = {
    "train.max_iter": 1,
    "train.eval_period": 0,
    "train.checkpointer.period": 1,
    "train.importance_stop_iter": 0,
    "dataloader.train.total_batch_size": 1,
    "dataloader.train.num_workers": 0,
}


def check_values(cfg: CfgNode, training: bool) -> None:
    """No key of a config has a value that is out of its range, or none of its choices.

    Raises:
        UserError: one has; it names the key, the value and the range.
    """
    values = flatten(cfg)
    # What the keys in epochs are going to replace.
    replaced = [in_iterations for key, in_iterations in EPOCH_KEYS.items() if values[key]]
    lowest = (LOWEST | of_tasks("lowest") if training else {}) | LOWEST_ALWAYS
    check_lowest(values, {key: low for key, low in lowest.items() if key not in replaced})
    for key, choices in (CHOICES | of_tasks("choices")).items():
        if values[key] not in choices:
            raise UserError(f"{key} {values[key]!r} is none of {', '.join(choices)}")
    for entry in values["TEST.EXPECTED_RESULTS"]:
        if not (isinstance(entry, list) and len(entry) == 4):
            raise UserError(
                f"TEST.EXPECTED_RESULTS {entry!r} is not [task, metric, value, tolerance]"
            )


def of_tasks(what: str) -> dict[str, object]:
    """What tasks say of their own keys, by key: `Task.lowest` or `Task.choices`."""
    return {key: value for task in all_tasks() for key, value in getattr(task, what).items()}


def check_lowest(values: Mapping[str, object], lowest: Mapping[str, float]) -> None:
    """Keys have numbers that are finite and not below their lowest; see `check_values`."""
    for key, low in lowest.items():
        items = values.get(key)
        for value in items if isinstance(items, list) else [items]:
            if value is None:
                continue
            if isinstance(value, str):
                raise UserError(f"{key} {value!r} is not a number; in YAML, 1e-4 is written 1.0e-4")
            if not low <= value < math.inf:
                raise UserError(f"{key} {value} must be {low} or more, and finite")


def check_batch(cfg: CfgNode) -> None:
    """Every process has as many images of a step as any other, else a `UserError` says so."""
    images, processes = cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size()
    if images % processes:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {images} must be a multiple of the number of processes, "
            f"{processes}"
        )


def check_output_folder(key: str, path: str) -> None:
    """The folder of a run is there, or can be made, and can be written to.

    Raises:
        UserError: it cannot; it names the key and the folder.
    """
    if "://" in path:
        return  # a place that Detectron2 knows how to write to
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror
        if os.path.islink(path) and not os.path.exists(path):
            reason = f"it is a link to {os.readlink(path)!r}, which is not there"
        elif os.path.exists(path) and not os.path.isdir(path):
            reason = "it is a file"
        raise UserError(
            f"{key} {path!r} cannot be written to: {reason}; give another folder"
        ) from None


@contextmanager
def named_by_key(cfg: CfgNode | DictConfig) -> Iterator[None]:
    """What Detectron2 and PyTorch raise while something is built by a config becomes a UserError
    of one line. It has their message, and the keys that have the name or number it complains of."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # a registry's KeyError, an assertion, …
        text = one_line(error)
        text = text if len(text) <= 400 else f"{text[:400]} …"
        keys = _keys_in(text, cfg)
        if isinstance(error, UserError) and (not keys or any(key in text for key in keys)):
            raise
        if keys:
            told = f"{' or '.join(keys)} cannot be right: {text}"
        else:
            told = f"the config cannot be built: {type(error).__name__}: {text}"
        raise UserError(told) from error


def _keys_in(text: str, cfg: CfgNode | DictConfig) -> list[str]:
    """The keys with the first value in the text that the user has chosen; of several, three."""
    if isinstance(cfg, CfgNode):
        defaults = get_cfg()
        add_sw_config(defaults)
        defaults, values = flatten(defaults), flatten(cfg)
    else:
        defaults, values = {}, flatten(OmegaConf.to_container(cfg, resolve=False))
    chosen = {key: value for key, value in values.items() if defaults.get(key, ...) != value}
    # Nothing is built by the folder of the run, whose name may be a word of any sentence.
    chosen = {k: v for k, v in chosen.items() if not k.lower().endswith("output_dir")}
    for word in re.findall(r"[^\s'\"`;:()\[\]{}=,]+", text):
        if keys := [key for key, value in chosen.items() if _is_said(value, word.rstrip("."))]:
            return keys[:3]
    return []


def _is_said(value: object, word: str) -> bool:
    if isinstance(value, list):
        return any(_is_said(item, word) for item in value)
    # Small numbers occur everywhere.
    telling = isinstance(value, str) or (isinstance(value, (int, float)) and value < 0)
    return telling and str(value) == word
