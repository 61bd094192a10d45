"""The config of a run, and the names of its classes, from a checkpoint that it left."""

import functools
import os
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import Metadata

from ..checkpoint.reading import fetched, read_file
from ..checkpoint.run_record import RunRecord, run_record_in
from ..errors import UserError, one_line


def adopt_config(cfg: CfgNode, weights: str) -> None:
    """Make `cfg` that of the run that a checkpoint is of. OUTPUT_DIR is `output/` plus the name of
    the checkpoint's folder.

    Args:
        cfg: with all keys of the package.
        weights: path or URL of the checkpoint.

    Raises:
        UserError: there is no such file, it carries no config, or one that this version does not
            take.
    """
    if not weights:
        raise UserError("--config is missing: name a config, or weights that carry one")
    try:
        cfg.merge_from_other_cfg(CfgNode(_record(weights).config))
    except UserError:
        raise
    except Exception as error:  # yacs asserts, and raises KeyError and ValueError
        raise UserError(
            f"weights {weights!r} carry a config that this version does not take "
            f"({one_line(error)}); give --config"
        ) from None
    cfg.OUTPUT_DIR = f"output/{Path(weights).absolute().parent.name}"


def carried_metadata(weights: str) -> Metadata:
    """The classes of the data set that the run of a checkpoint was on, which need not be here.

    Raises:
        UserError: there is no such file, or it carries none.
    """
    record = _record(weights)
    entries = {key: value for key, value in record.metadata.items() if key.endswith("_classes")}
    if "list_classes" in entries:
        names = tuple(entries["list_classes"])
        entries["list_classes"] = lambda: names
    metadata = Metadata(name=record.dataset, **entries)
    if "category_ids" in record.metadata:
        ids = record.metadata["category_ids"]
        metadata.thing_dataset_id_to_contiguous_id = {number: i for i, number in enumerate(ids)}
    return metadata


def _record(weights: str) -> RunRecord:
    path = fetched(weights) if "://" in weights else weights
    try:
        return _read_record(weights, path, os.stat(path).st_mtime_ns)
    except FileNotFoundError:
        raise UserError(f"weights {weights!r} do not exist") from None


@functools.lru_cache(maxsize=1)
def _read_record(weights: str, path: str, _modified: int) -> RunRecord:
    record = run_record_in(read_file(path))
    if record is None:
        raise UserError(
            f"--config is missing, and weights {weights!r} carry no config: name the config"
        )
    return record
