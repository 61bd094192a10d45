"""A look at data sets before a model is built: what a run would trip over, or learn wrongly."""

import json
import logging
import os
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import Image
from torch.utils.data import Dataset
from tqdm import tqdm

from ..errors import UserError, one_line
from .annotations import drop_unusable, mended_coco_files
from .slices import register_slice, spread

logger = logging.getLogger(__name__)

_EXIF_ORIENTATION = 274


@dataclass(frozen=True)
class Classes:
    """Of one kind of output of a model: how many classes it tells apart, by which key.

    Attributes:
        key: of the config.
        number: its value.
    """

    key: str
    number: int


@dataclass(frozen=True)
class Wanted:
    """What a model takes of its data sets.

    Attributes:
        classes: by the entry of the metadata that has their names, such as "thing_classes".
        mask_format: "polygon" or "bitmask"; empty if masks are not wanted.
        ignore: the key and the value of the label to ignore, of models of label maps.
        filter_empty: whether images without annotations take no part in training.
    """

    classes: dict[str, Classes] = field(default_factory=dict)
    mask_format: str = ""
    ignore: tuple[str, int] | None = None
    filter_empty: bool = True


@dataclass(frozen=True)
class LoadedSet:
    """A data set that is there.

    Attributes:
        name: as registered.
        records: empty if they are not looked at: the package generates the data set, or they are
            a `Dataset` of the user's own, which may read files at each access.
        training: whether it is trained on.
    """

    name: str
    records: list[dict]
    training: bool


Check = Callable[[Sequence[LoadedSet], Classes, Wanted], None]
"""Of the data sets of a run, for one kind of classes; warns, or raises a `UserError`."""


class CheckedLoader:
    """In the place of a data set's registered function: returns records that can be used.

    What a run cannot read of the annotations is left out, with one warning; what is wrong with the
    whole is a `UserError`.

    Attributes:
        masks: whether the masks of objects are wanted.
    """

    def __init__(self, name: str, load: Callable[[], list[dict]]):
        self.load = load
        self.masks = False
        self._name = name
        self._kept: list[dict] | None = None
        self._warned = False

    def __call__(self) -> list[dict]:
        kept, self._kept = self._kept, None
        return self._load_checked() if kept is None else kept

    def keep(self) -> list[dict]:
        """The records, which the next one to load them is given too, without loading them again."""
        self._kept = self._load_checked()
        return self._kept

    def _load_checked(self) -> list[dict]:
        with mended_coco_files(self._name) as found:
            try:
                records = self.load()
                if isinstance(records, Dataset):  # of the user's own; it may read at each access
                    return records
                records = records if isinstance(records, list) else list(records)
            except UserError:
                raise
            except Exception as error:  # a loader is a program: anything can go wrong
                raise UserError(self._explain(error)) from error
        if not records:
            raise UserError(f"data set {self._name!r} has no images")
        if not all(isinstance(record, dict) for record in records):
            raise UserError(f"data set {self._name!r}: its records must be dicts")
        try:
            records, dropped = drop_unusable(records, self.masks, mended=bool(found))
        except (TypeError, AttributeError):
            raise UserError(
                f"data set {self._name!r}: 'annotations' of a record must be a list of dicts"
            ) from None
        self._warn(sum(found, dropped))
        return records

    def _explain(self, error: Exception) -> str:
        name = self._name
        path = MetadataCatalog.get(MetadataCatalog.get(name).get("sliced_from", name)).get(
            "json_file", "its annotation file"
        )
        if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, RecursionError)):
            return f"data set {name!r}: {path} is no whole JSON file ({error}); get it again"
        if isinstance(error, AssertionError) and "annotation file format" in str(error):
            return f"data set {name!r}: {path} is not of COCO's format, an object with 'images'"
        if isinstance(error, AssertionError) and "different value" in str(error):
            return (
                f"data set {name!r}: the categories of {path} are not the classes that are "
                "registered under this name; register the file under a name of its own, by "
                "detectron2.data.datasets.register_coco_instances"
            )
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"data set {name!r} cannot be loaded: {type(error).__name__}: {one_line(error)} "
            f"({os.path.basename(place.filename)}, line {place.lineno})"
        )

    def _warn(self, dropped: Counter[str]) -> None:
        if dropped and not self._warned:
            reasons = "; ".join(f"{number} {reason}" for reason, number in dropped.items())
            logger.warning(f"Data set {self._name!r} without annotations that {reasons}")
        self._warned = True


def check_dataset(name: str) -> None:
    """A data set is registered and its files are there; loading it is checked from here on.

    A name such as "coco_2017_train[:8]" stands for the first images of a registered data set.

    Raises:
        UserError: naming the data set, the file and the remedy.
    """
    register_slice(name)
    if name not in DatasetCatalog.list():
        raise UserError(
            f"data set {name!r} is not registered; there are "
            f"{', '.join(sorted(DatasetCatalog.list()))}"
        )
    load = DatasetCatalog[name]
    load = load.load if isinstance(load, CheckedLoader) else load
    DatasetCatalog[name] = CheckedLoader(name, load)
    metadata = MetadataCatalog.get(MetadataCatalog.get(name).get("sliced_from", name))
    if metadata.get("generated"):
        return
    for key in ("json_file", "image_root", "panoptic_root", "sem_seg_root", "image_dir", "gt_dir"):
        path = getattr(metadata, key, None)
        if path and not PathManager.exists(path):
            remedy = metadata.get("remedy") or (
                "set the environment variable DETECTRON2_DATASETS to the folder that contains it"
            )
            raise UserError(f"data set {name!r} is not there: no {path!r}; {remedy}")


def check_contents(
    train: Sequence[str], test: Sequence[str], wanted: Wanted, checks: dict[str, Check]
) -> None:
    """Data sets that `check_dataset` has seen fit the model and each other.

    Args:
        checks: by the kind of the classes.

    Raises:
        UserError: they do not; naming the data set, what is wrong and the remedy.
    """
    for split, names in (("train", train), ("test", test)):
        for name, times in Counter(names).items():
            if times > 1:
                logger.warning(f"The data sets to {split} on name {name!r} {times} times")
    for name in {*train, *test}:
        DatasetCatalog[name].masks = bool(wanted.mask_format)
    sets = [_load(name, training=True) for name in dict.fromkeys(train)]
    sets += [_load(name, training=False) for name in dict.fromkeys(test) if name not in train]
    for kind, classes in wanted.classes.items():
        checks[kind](sets, classes, wanted)
        _check_same_classes([s.name for s in sets], kind)
    if "list_classes" not in wanted.classes:  # classifiers leave out images that they cannot read
        for dataset in sets:
            _check_images(dataset, wanted.filter_empty)


def check_images(names: Sequence[str]) -> None:
    """The images of data sets that `check_dataset` has seen are there, and are images.

    Raises:
        UserError: they are not.
    """
    for name in dict.fromkeys(names):
        _check_images(_load(name, training=True), filter_empty=False)


def classes_of(name: str, kind: str) -> tuple[str, ...]:
    """The names of a registered data set's classes; empty if it declares none of this kind."""
    declared = MetadataCatalog.get(name).get(kind)
    return tuple(declared() if callable(declared) else declared or ())


def progress(items: Sequence, name: str) -> tqdm:
    """A bar, which shows only when the work takes longer than a moment."""
    hidden = not comm.is_main_process()
    text = f"checking {name}"
    return tqdm(items, desc=text, unit="file", delay=2, leave=False, disable=hidden)


def check_files_there(name: str, what: str, paths: Sequence[str]) -> None:
    """The files of a data set exist. Folders are listed: to ask for each file alone is slow.

    Raises:
        UserError: with their number, and the first of those that are missing.
    """
    by_folder = defaultdict(list)
    for path in paths:
        if "://" not in path:  # of a server, which is asked when they are read
            folder, file = os.path.split(path)
            by_folder[folder].append(file)
    missing = []
    for folder, files in by_folder.items():
        there = _listing(folder) if len(files) > 100 else set()
        paths_there = (os.path.join(folder, file) for file in files if file not in there)
        missing += [path for path in paths_there if not os.path.exists(path)]
    if missing:
        raise UserError(
            f"data set {name!r}: {len(missing)} of {len(paths)} {what} are not there, such as "
            f"{min(missing)!r}; put the files there, or correct their names"
        )


def _listing(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder or "."))
    except OSError:
        return set()


def _load(name: str, training: bool) -> LoadedSet:
    metadata = MetadataCatalog.get(name)
    if metadata.get("generated") and not metadata.get("sliced_from"):
        return LoadedSet(name, [], training)
    records = DatasetCatalog[name].keep()
    return LoadedSet(name, [] if isinstance(records, Dataset) else records, training)


def _check_same_classes(names: Sequence[str], kind: str) -> None:
    """One number means one class in all data sets; a data set may lack the last ones."""
    declaring = [(name, classes) for name in names if (classes := classes_of(name, kind))]
    for name, classes in declaring[1:]:
        first, expected = declaring[0]
        for number, (a, b) in enumerate(zip(expected, classes)):
            if a != b:
                raise UserError(
                    f"data sets {first!r} and {name!r} differ in their classes: number {number} is "
                    f"{a!r} in one and {b!r} in the other; give both the same {kind}"
                )


def _check_images(dataset: LoadedSet, filter_empty: bool) -> None:
    """The images are there; of some of them, they have the size that the record says."""
    records = dataset.records
    if dataset.training and filter_empty:
        records = [r for r in records if r.get("annotations") != []]
    if any("file_name" not in record for record in records):
        raise UserError(f"data set {dataset.name!r} has records without a file_name")
    paths = [os.fspath(record["file_name"]) for record in records]
    check_files_there(dataset.name, "images", paths)
    local = [record for record, path in zip(records, paths) if "://" not in path]
    for record in progress(spread(local), dataset.name):
        given = record.get("width"), record.get("height")
        size = image_size(record["file_name"])
        if None not in given and size != given:
            raise UserError(
                f"data set {dataset.name!r}: {record['file_name']!r} has {size[0]} x {size[1]} "
                f"pixels, but its record says {given[0]} x {given[1]}; correct width and height"
            )


def image_size(path: str) -> tuple[int, int]:
    """Width and height of an image, turned upright, from the first bytes of its file.

    Raises:
        UserError: it is no image.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(_EXIF_ORIENTATION, 1) >= 5
    except Exception as error:  # Pillow's decoders have many kinds of errors
        raise UserError(f"image {str(path)!r} cannot be read: {one_line(error)}") from None
    return (height, width) if turned else (width, height)
