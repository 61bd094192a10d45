"""Data sets of labelled images: folders of classes, ImageNet, CIFAR-10 and CIFAR-100.

A registered data set is a list of records. Each has a `label`, the index of its class, and either
a `file_name` or the pixels themselves, an `image` (H, W, 3), uint8 RGB, and its `image_id`.
"""

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetFromList, MetadataCatalog
from PIL import Image
from torch.utils.data import Dataset
from torchvision import datasets as torchvision_datasets
from torchvision.transforms import v2

from ...data.images import as_changed, decode_image, image_files, is_visible, why_unreadable
from ...data.registration import datasets_root, register_dataset
from ...errors import UserError
from .model import IGNORED_LABEL

__all__ = [
    "MAX_CORRUPT_SHARE",
    "CorruptImages",
    "LabelledImages",
    "class_names",
    "collate",
    "load_records",
    "register_class_folders",
    "register_classification",
    "test_transform",
    "train_transform",
]

logger = logging.getLogger(__name__)

MAX_CORRUPT_SHARE = 0.01
"""The share of a data set's images that may be unreadable before a run stops."""


# Registration


def register_classification(root: str | os.PathLike | None = None) -> None:
    """Register imagenet_{train,val}, cifar10_{train,test} and cifar100_{train,test}.

    Nothing is read until a data set is loaded. They are looked for in

    - `root/imagenet/{train,val}/CLASS/*`,
    - `root/cifar-10-batches-py` and `root/cifar-100-python`, as torchvision unpacks them, or else
      `root/cifar10/{train,test}/CLASS/*` and `root/cifar100/{train,test}/CLASS/*`.

    Args:
        root: the folder of data sets; by default what the environment variable
            `DETECTRON2_DATASETS` names at the time of the call, or `datasets`.
    """
    root = datasets_root() if root is None else Path(root)
    for split in ("train", "val"):
        register_class_folders(f"imagenet_{split}", root / "imagenet" / split)
    for name, dataset in (
        ("cifar10", torchvision_datasets.CIFAR10),
        ("cifar100", torchvision_datasets.CIFAR100),
    ):
        for split in ("train", "test"):
            _register_cifar(root, name, split, dataset)


def register_class_folders(name: str, folder: str | os.PathLike, remedy: str = "") -> None:
    """Register the images `folder/CLASS/*` as a data set; classes are numbered alphabetically.

    Args:
        remedy: what to do if the folder is missing; by default, to set DETECTRON2_DATASETS.
    """
    folder = Path(folder)
    register_images(
        name, folder, lambda: find_images(folder), lambda: _find_classes(folder), remedy=remedy
    )


def register_images(
    name: str,
    image_root: Path,
    load: Callable[[], list[dict]],
    list_classes: Callable[[], tuple[str, ...]],
    **metadata: object,
) -> None:
    """Register a data set of labelled images, in the place of one of that name if there is one."""
    register_dataset(
        name,
        load,
        image_root=str(image_root),
        evaluator_type="classification",
        list_classes=list_classes,
        **metadata,
    )


def _register_cifar(root: Path, name: str, split: str, dataset: type) -> None:
    folders, unpacked = root / name / split, root / dataset.base_folder
    remedy = (
        f"unpack {dataset.url} in {str(root)!r}, or put images into {str(folders)!r}/CLASS/, or "
        "set the environment variable DETECTRON2_DATASETS to the folder that contains either"
    )
    if folders.is_dir() and not unpacked.is_dir():
        register_class_folders(f"{name}_{split}", folders)
        return
    read = functools.partial(_read_cifar, dataset, root, split == "train")
    register_images(
        f"{name}_{split}",
        unpacked,
        lambda: [
            {"image": x, "label": y, "image_id": i}
            for i, (x, y) in enumerate(zip(read().data, read().targets))
        ],
        lambda: tuple(read().classes),
        remedy=remedy,
    )


@functools.lru_cache(maxsize=2)
def _read_cifar(dataset: type, root: Path, train: bool) -> torchvision_datasets.CIFAR10:
    try:
        return dataset(root, train=train, download=False)
    except RuntimeError:
        raise UserError(
            f"{str(root / dataset.base_folder)!r} is incomplete or corrupt (checksums differ); "
            f"unpack {dataset.url} again"
        ) from None


def _find_classes(folder: Path) -> tuple[str, ...]:
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise UserError(
            f"class folders {str(folder)!r} cannot be read: {error.strerror}; set DATASETS.FOLDER, "
            "or the environment variable DETECTRON2_DATASETS, to where the images are"
        ) from None
    classes = tuple(sorted(e.name for e in entries if e.is_dir() and is_visible(e.name)))
    if not classes:
        raise UserError(f"no class folders in {str(folder)!r}; images belong in {folder}/CLASS/")
    return classes


def find_images(folder: Path) -> list[dict]:
    images = [
        (str(file), label)
        for label, name in enumerate(_find_classes(folder))
        for file in image_files(folder / name)
    ]
    if not images:
        raise UserError(f"no images in {str(folder)!r}; they belong in {folder}/CLASS/")
    # By name, so that the first images of a data set that is numbered over all classes, such as
    # ImageNet's validation images, are of all classes.
    images.sort(key=lambda image: (os.path.basename(image[0]), image[1]))
    return [{"file_name": file_name, "label": label} for file_name, label in images]


# Loading


def class_names(name: str) -> tuple[str, ...]:
    """The names of a registered data set's classes, in the order of their labels.

    Raises:
        UserError: it is not a data set of labelled images.
    """
    list_classes = MetadataCatalog.get(name).get("list_classes")
    if list_classes is None:
        raise UserError(f"data set {name!r} has no image labels to train or test a classifier on")
    return list_classes()


def load_records(names: tuple[str, ...], num_classes: int) -> DatasetFromList:
    """The records of registered data sets, one after the other.

    Raises:
        UserError: the classes of a data set are not `num_classes`, or not those of the first one.
    """
    check_classes(names, num_classes)
    records = [record for name in names for record in DatasetCatalog.get(name)]
    return DatasetFromList(records, copy=False)  # one buffer, which worker processes share


def check_classes(names: tuple[str, ...], num_classes: int) -> None:
    """All data sets have the same classes, `num_classes` of them.

    Raises:
        UserError: they have not.
    """
    first = class_names(names[0])
    if len(first) != num_classes:
        raise UserError(
            f"data set {names[0]!r} has {len(first)} classes; set MODEL.CLASSIFIER.NUM_CLASSES to "
            f"that instead of {num_classes}"
        )
    for name in names[1:]:
        differing = sorted(set(first) ^ set(class_names(name)))
        if differing:
            raise UserError(
                f"data sets {names[0]!r} and {name!r} differ in their classes: {differing[0]!r} is "
                "in one alone"
            )


class LabelledImages(Dataset):
    """Decoded and transformed images with their labels.

    An item is a dict of `image` (3, S, S), uint8; `label`, int; and `corrupt`, a dict from the
    name of each file that could not be read to the reason. For an unreadable image the next ones
    of the data set are tried; if they are unreadable too, the item is black and labelled
    IGNORED_LABEL.

    Args:
        records: of a registered data set.
        transform: from a PIL image to the tensor.
        size: S.
        tries: how many images to try for one item.
    """

    def __init__(self, records: DatasetFromList, transform: v2.Compose, size: int, tries: int = 1):
        self._records = records
        self._transform = transform
        self._size = size
        self._tries = tries

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict:
        corrupt = {}
        for i in range(index, index + self._tries):
            record = self._records[i % len(self._records)]
            try:
                image = _decode(record)
            except Exception as error:
                corrupt[record["file_name"]] = why_unreadable(error)
                continue
            return {"image": self._transform(image), "label": record["label"], "corrupt": corrupt}
        black = torch.zeros(3, self._size, self._size, dtype=torch.uint8)
        return {"image": black, "label": IGNORED_LABEL, "corrupt": corrupt}


def collate(samples: list[dict]) -> dict:
    """A batch: `image` (N, 3, S, S), uint8; `label` (N,), int64; `corrupt` of all samples."""
    return {
        "image": torch.stack([sample["image"] for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
        "corrupt": {k: v for sample in samples for k, v in sample["corrupt"].items()},
    }


class CorruptImages:
    """The unreadable images of a data set that a run has met.

    Args:
        num_images: of the data set.
    """

    def __init__(self, num_images: int):
        self._num_images = num_images
        self._reasons: dict[str, str] = {}

    def add(self, found: dict[str, str]) -> None:
        """Name those that are new, as a warning.

        Raises:
            UserError: more than `MAX_CORRUPT_SHARE` of the data set cannot be read.
        """
        for file_name in sorted(found.keys() - self._reasons.keys()):
            logger.warning(f"Skipped {file_name!r}, which cannot be read: {found[file_name]}")
        self._reasons |= found
        if len(self._reasons) > MAX_CORRUPT_SHARE * self._num_images:
            raise UserError(
                f"{len(self._reasons)} of {self._num_images} images cannot be read, such as "
                f"{min(self._reasons)!r}; more than {MAX_CORRUPT_SHARE:.0%} stop a run: replace "
                "the files"
            )

    def report(self) -> None:
        """Log how many there were, if any."""
        if self._reasons:
            logger.warning(
                f"Skipped {len(self._reasons)} of {self._num_images} images, which cannot be read"
            )


def _decode(record: dict) -> Image.Image:
    if "image" in record:
        return as_changed(record.get("image_id", ""), Image.fromarray(record["image"]))
    return Image.fromarray(decode_image(record["file_name"], "RGB"))


# Transforms


def train_transform(cfg: CfgNode) -> v2.Compose:
    """The crop of INPUT.CLASSIFIER.TRAIN_CROP, and INPUT.RANDOM_FLIP.

    Raises:
        UserError: there is no such crop or flip.
    """
    keys, flip = cfg.INPUT.CLASSIFIER, cfg.INPUT.RANDOM_FLIP
    crops = {
        "random_resized": lambda: [v2.RandomResizedCrop(keys.SIZE)],
        "padded": lambda: [v2.RandomCrop(keys.SIZE, padding=keys.PADDING)],
    }
    flips = {"horizontal": [v2.RandomHorizontalFlip()], "none": []}
    if keys.TRAIN_CROP not in crops:
        raise UserError(
            f"INPUT.CLASSIFIER.TRAIN_CROP {keys.TRAIN_CROP!r}: there are {', '.join(crops)}"
        )
    if flip not in flips:
        raise UserError(f"INPUT.RANDOM_FLIP {flip!r}: classifiers know {', '.join(flips)}")
    return v2.Compose([*crops[keys.TRAIN_CROP](), *flips[flip], *_to_tensor(cfg)])


def test_transform(cfg: CfgNode) -> v2.Compose:
    """The central crop of the image resized to INPUT.CLASSIFIER.RESIZE_TEST."""
    keys = cfg.INPUT.CLASSIFIER
    return v2.Compose([v2.Resize(keys.RESIZE_TEST), v2.CenterCrop(keys.SIZE), *_to_tensor(cfg)])


def _to_tensor(cfg: CfgNode) -> list:
    reverse = [_reverse_channels] if cfg.INPUT.FORMAT == "BGR" else []
    return [v2.PILToTensor(), *reverse]


def _reverse_channels(image: torch.Tensor) -> torch.Tensor:
    return image.flip(0)
