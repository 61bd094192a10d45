"""Data sets of images alone, each a folder."""

from detectron2.config import CfgNode

from ..errors import UserError
from .images import ImageFolder
from .registration import register_dataset


def register_configured_images(cfg: CfgNode) -> None:
    """Register the data sets that DATASETS.IMAGE_FOLDERS describes.

    Raises:
        UserError: one is described by something else than a folder.
    """
    for name, folder in cfg.DATASETS.IMAGE_FOLDERS.items():
        if not isinstance(folder, str):
            raise UserError(f"DATASETS.IMAGE_FOLDERS.{name} {folder!r} must be a folder of images")
        register_images(name, folder, f"set DATASETS.IMAGE_FOLDERS.{name} to a folder of images")


def register_images(name: str, folder: str, remedy: str | None) -> None:
    """Register a data set of all images below a folder.

    Args:
        remedy: what to do if it is not there, if not to set DETECTRON2_DATASETS.
    """
    register_dataset(
        name,
        lambda: [{"file_name": str(file)} for file in ImageFolder(folder).files],
        image_root=folder,
        remedy=remedy,
    )
