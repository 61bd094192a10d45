"""One's own data: a folder with images and COCO annotations, by DATASETS.COCO_FOLDER."""

import functools
import json
import logging
import os
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from ...data.annotations import mend_coco, mended_coco_files
from ...data.registration import register_dataset
from ...errors import UserError, one_line
from .check import wanted_by_detector

logger = logging.getLogger(__name__)

_PREFIX = "own_"
_WHOLE = "own_all"
_REMEDY = "set DATASETS.COCO_FOLDER to the folder of images and annotations"
_SPLIT = re.compile(
    r"(?P<split>train|val|test)(ing|id|idation)?[_-]?(20\d\d)?(?P<part>|[_-].+)", re.IGNORECASE
)
_LAYOUTS = (
    "annotations/instances_train2017.json with train2017/; annotations/train.json with train/; "
    "train/_annotations.coco.json beside the images; or one file, as instances_default.json or "
    "result.json, with images/"
)


@dataclass(frozen=True)
class _Content:
    """What is asked of an annotation file before it is loaded.

    Attributes:
        classes: by their ids, in the order of these.
        first_image: its file_name; "" if there is none.
        has_rle: whether a mask is an RLE, which only MASK_FORMAT bitmask reads.
    """

    classes: dict[int, str]
    first_image: str
    has_rle: bool


def add_coco_folder_config(cfg: CfgNode) -> None:
    """Add the keys of one's own data, with their defaults, to a Detectron2 config."""
    # A folder of images and COCO annotations: gives own_train, own_val and own_test, as far as they
    # are there. Without another word of the command line, those are trained and tested on.
    cfg.DATASETS.COCO_FOLDER = ""
    # Of a folder with one annotation file: the share of its images that are own_val.
    cfg.DATASETS.COCO_VAL_SHARE = 0.2


def register_coco_folder(cfg: CfgNode) -> None:
    """Register the data sets of DATASETS.COCO_FOLDER.

    An annotation file of a part, such as `val_stained.json`, gives `own_val_stained`. Without a
    folder, those that the config names say when they are loaded what is missing.

    Raises:
        UserError: there is nothing known in the folder.
    """
    for name in [n for n in DatasetCatalog.list() if n.startswith(_PREFIX)]:
        DatasetCatalog.remove(name)  # of another folder, in the same process
        MetadataCatalog.remove(name)
    folder = Path(os.path.expanduser(cfg.DATASETS.COCO_FOLDER))
    if not cfg.DATASETS.COCO_FOLDER or not folder.is_dir():
        problem = f"DATASETS.COCO_FOLDER {cfg.DATASETS.COCO_FOLDER!r} is no folder"
        for name in {"own_train", "own_val", *_own_names(cfg)}:
            load = functools.partial(_not_there, name, problem)
            register_dataset(name, load, evaluator_type="coco")
        return
    files = _annotation_files(folder)
    if len(files) == 1:
        _register_parts(folder, *files.values(), cfg.DATASETS.COCO_VAL_SHARE)
        return
    for name, path in files.items():
        _register(name, path, _image_root(folder, path, name))


def follow_coco_folder(cfg: CfgNode, given: Collection[str]) -> None:
    """Set what DATASETS.COCO_FOLDER leaves no doubt about: the data sets, the number of classes and
    the format of masks.

    Args:
        given: the keys that the user sets, in a file or on the command line; these stay.
    """
    if not cfg.DATASETS.COCO_FOLDER:
        return
    names = [n for n in DatasetCatalog.list() if n.startswith(_PREFIX)]
    for key, candidates in (("TRAIN", ["own_train"]), ("TEST", ["own_val", "own_test"])):
        is_own = any(name.startswith(_PREFIX) for name in cfg.DATASETS[key])
        found = [name for name in candidates if name in names]
        if not is_own and f"DATASETS.{key}" not in given:
            cfg.DATASETS[key] = tuple(found[:1])
    known = [MetadataCatalog.get(name) for name in _own_names(cfg) if name in names]
    known = [metadata for metadata in known if metadata.get("thing_classes")]
    if not known:
        return
    follows = {}
    classes = wanted_by_detector(cfg).classes.get("thing_classes")
    if classes and classes.key not in given:
        follows[classes.key] = len(known[0].thing_classes)
    if cfg.MODEL.MASK_ON and "INPUT.MASK_FORMAT" not in given:
        follows["INPUT.MASK_FORMAT"] = "bitmask" if any(m.has_rle for m in known) else "polygon"
    for key, value in follows.items():
        cfg.merge_from_list([key, value])
    text = "".join(f", {key} {value}" for key, value in follows.items())
    logger.info(
        f"{cfg.DATASETS.COCO_FOLDER!r} has {', '.join(names)}: DATASETS.TRAIN "
        f"{tuple(cfg.DATASETS.TRAIN)}, DATASETS.TEST {tuple(cfg.DATASETS.TEST)}{text}"
    )


def _own_names(cfg: CfgNode) -> list[str]:
    """The data sets of one's own that the config names; of a slice, the whole."""
    names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    return [name.partition("[")[0] for name in names if name.startswith(_PREFIX)]


def _not_there(name: str, problem: str) -> list[dict]:
    raise UserError(f"data set {name!r} is not there: {problem}; {_REMEDY}")


def _annotation_files(folder: Path) -> dict[str, Path]:
    """Of the first layout that is there, by the name of the data set."""
    annotations = sorted((folder / "annotations").glob("*.json"))
    instances = [path for path in annotations if path.stem.startswith("instances_")]
    beside = [
        path
        for path in sorted(folder.glob("*/*.json"))
        if path.parent.name != "annotations" and _split_of(path.parent.name)
    ]
    alone = sorted(folder.glob("*.json"))
    for layout in (instances, annotations, beside, alone):
        named = {name: path for path in layout if (name := _name(path))}
        if len(layout) == 1 or named:
            return named if len(layout) > 1 else {_WHOLE: layout[0]}
    raise UserError(f"DATASETS.COCO_FOLDER {str(folder)!r} has no annotations: it takes {_LAYOUTS}")


def _split_of(text: str) -> re.Match | None:
    return _SPLIT.fullmatch(text.removeprefix("instances_"))


def _name(path: Path) -> str:
    """The data set's name by the file's, or else by its folder's; "" if neither says one."""
    match = _split_of(path.stem) or _split_of(path.parent.name)
    return _PREFIX + (match["split"] + match["part"].replace("-", "_")).lower() if match else ""


def _image_root(folder: Path, path: Path, name: str) -> Path:
    """The folder that the file names of an annotation file start from."""
    first = _read(path).first_image
    places = list(dict.fromkeys(_places(folder, path, name)))
    for place in places:
        if (place / first).is_file():
            return place
    looked = ", ".join(repr(str(place)) for place in places)
    raise UserError(f"{str(path)!r}: its first image {first!r} is not there; looked in {looked}")


def _places(folder: Path, path: Path, name: str) -> Iterator[Path]:
    if path.parent not in (folder, folder / "annotations"):
        yield path.parent
    stem = path.stem.removeprefix("instances_")
    for parent in (folder, folder / "images"):
        yield parent / stem
        subfolders = sorted(p for p in parent.iterdir() if p.is_dir()) if parent.is_dir() else []
        for subfolder in subfolders:
            match = _split_of(subfolder.name)
            if match and name.startswith(_PREFIX + match["split"].lower()):
                yield subfolder
    yield folder / "images"
    yield folder


def _register(name: str, path: Path, root: Path) -> None:
    content = _read(path)

    def load() -> list[dict]:
        with mended_coco_files(name):
            return load_coco_json(str(path), str(root), name)

    register_dataset(
        name,
        load,
        json_file=str(path),
        image_root=str(root),
        thing_classes=[*content.classes.values()],
        thing_dataset_id_to_contiguous_id={key: i for i, key in enumerate(content.classes)},
        has_rle=content.has_rle,
        evaluator_type="coco",
        remedy=_REMEDY,
    )


def _register_parts(folder: Path, path: Path, share: float) -> None:
    """own_train and own_val, as a seeded share of one file's images."""
    if not 0 < share < 1:
        raise UserError(f"DATASETS.COCO_VAL_SHARE is {share}; it must lie between 0 and 1")
    _register(_WHOLE, path, _image_root(folder, path, _WHOLE))
    logger.info(
        f"{str(path)!r} is the only annotation file: a share of {share:g} of its images, drawn "
        "with a fixed seed, is own_val, and the others are own_train"
    )
    whole = MetadataCatalog.get(_WHOLE).as_dict()
    for name in ("own_train", "own_val"):
        load = functools.partial(_load_part, share, name == "own_val")
        shared = {k: v for k, v in whole.items() if k not in ("name", "json_file")}
        register_dataset(name, load, sliced_from=_WHOLE, **shared)


def _load_part(share: float, is_val: bool) -> list[dict]:
    records = DatasetCatalog.get(_WHOLE)
    if len(records) < 2:
        raise UserError(f"{MetadataCatalog.get(_WHOLE).json_file!r} has too few images to split")
    number = min(max(1, round(share * len(records))), len(records) - 1)
    drawn = set(random.Random(0).sample(range(len(records)), number))
    return [record for i, record in enumerate(records) if (i in drawn) == is_val]


def _read(path: Path) -> _Content:
    """See `_Content`; read once as long as the file stays the same.

    Raises:
        UserError: it cannot be read, or is not of COCO's format.
    """
    try:
        return _read_version(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"annotations {str(path)!r} cannot be read: {one_line(error)}") from None


@functools.lru_cache(maxsize=16)
def _read_version(path: Path, _modified: int) -> _Content:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise UserError(f"annotations {str(path)!r} are not of COCO's format")
    mend_coco(content, f"annotations {str(path)!r}")
    images, annotations = content["images"], content.get("annotations", [])
    categories = sorted(content["categories"], key=lambda category: category["id"])
    return _Content(
        classes={category["id"]: category["name"] for category in categories},
        first_image=images[0]["file_name"] if images else "",
        has_rle=any(isinstance(a.get("segmentation"), dict) for a in annotations),
    )
