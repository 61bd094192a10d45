"""What a checkpoint of a training run says of the run: its config, and the names of the classes.

Plain data, so that a checkpoint can be used where nothing else of the run is there.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from ..config import plain
from .facts import FACTS_KEY

_CLASSES = ("thing_classes", "stuff_classes")


@dataclass(frozen=True)
class RunRecord:
    """Of a run.

    Attributes:
        config: nested, all of its keys but OUTPUT_DIR, which says nothing of the model.
        dataset: the one that the classes are of; the first to test on, or else to train on.
        metadata: as far as it is there: `thing_classes`, `stuff_classes`, `list_classes` as names,
            and `category_ids`, the data set's own for each of `thing_classes`.
    """

    config: dict
    dataset: str
    metadata: dict


def run_record(cfg: CfgNode) -> RunRecord:
    """Of a run with this config, whose data sets have been loaded."""
    names = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)
    dataset = names[0] if names else ""
    known = MetadataCatalog.get(dataset) if dataset else {}
    metadata = {key: list(known.get(key)) for key in _CLASSES if known.get(key)}
    if known.get("list_classes"):
        metadata["list_classes"] = list(known.get("list_classes")())
    contiguous = known.get("thing_dataset_id_to_contiguous_id")
    if contiguous:
        metadata["category_ids"] = sorted(contiguous, key=contiguous.get)
    config = {key: plain(value) for key, value in cfg.items() if key != "OUTPUT_DIR"}
    return RunRecord(config, dataset, metadata)


def run_record_in(checkpoint: Mapping) -> RunRecord | None:
    """That of a loaded checkpoint; None if it has none that is well formed."""
    carried = checkpoint.get(FACTS_KEY)
    run = carried.get("run") if isinstance(carried, Mapping) else None
    if not isinstance(run, Mapping):
        return None
    config, dataset, metadata = (run.get(key) for key in ("config", "dataset", "metadata"))
    if not isinstance(config, dict) or not isinstance(dataset, str):
        return None
    if not isinstance(metadata, dict) or not all(isinstance(v, list) for v in metadata.values()):
        return None
    names = [name for key in (*_CLASSES, "list_classes") for name in metadata.get(key, ())]
    if not all(isinstance(name, str) for name in names):
        return None
    ids = metadata.get("category_ids", [])
    if not all(isinstance(number, int) for number in ids):
        return None
    return RunRecord(config, dataset, metadata)


def changed_record(record: RunRecord, keys: Mapping[str, object]) -> RunRecord:
    """With other values for keys such as "MODEL.SW.NORM"."""
    config = copy.deepcopy(record.config)
    for key, value in keys.items():
        *sections, last = key.split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return replace(record, config=config)
