"""Data sets by name in Detectron2's catalogs, and folders of generated ones."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from detectron2.data import DatasetCatalog, MetadataCatalog


def datasets_root() -> Path:
    """The folder that the environment variable DETECTRON2_DATASETS names, or `datasets`."""
    return Path(os.path.expanduser(os.environ.get("DETECTRON2_DATASETS", "datasets")))


def register_dataset(name: str, load: Callable[[], list[dict]], **metadata: object) -> None:
    """Register a data set, in the place of one of that name if there is one.

    Args:
        load: returns the records; it is called when they are needed.
        metadata: `evaluator_type`, the classes, and where the files are; `generated=True` if these
            need not be there before the data set is loaded, else `remedy`, what to do if they are
            missing (by default, to set DETECTRON2_DATASETS).
    """
    if name in DatasetCatalog.list():
        known = MetadataCatalog.get(name)
        if all(known.get(key) == value for key, value in metadata.items()):
            return  # the same; whoever holds its metadata keeps what others have added there
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(**metadata)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside `folder`, which takes that place at the end, whole or not at all.

    When several processes make the same folder, the first one to finish wins.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as staging:
        made = Path(staging) / folder.name
        made.mkdir()
        yield made
        try:
            made.rename(folder)
        except OSError:  # another process was quicker; it made the same files
            if not folder.is_dir():
                raise
