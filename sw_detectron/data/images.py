"""Reading images: one file, all of a folder, and batches of them as a network takes them."""

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from detectron2.data.detection_utils import _apply_exif_orientation, convert_PIL_to_numpy
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import functional
from tqdm import tqdm

from ..errors import UserError, one_line

SUFFIXES = tuple(sorted(IMG_EXTENSIONS))

logger = logging.getLogger(__name__)

Change = Callable[[str | int, Image.Image], Image.Image]
"""From an image's file name, or its image_id if it lies in no file, and the upright image of 8 bits
to another one of the same size."""

_change: Change | None = None


@contextmanager
def images_changed(change: Change) -> Iterator[None]:
    """Meanwhile images are read as `change` makes them, whoever reads them, in this process and in
    those that it forks."""
    global _change
    before, _change = _change, change
    try:
        yield
    finally:
        _change = before


def as_changed(name: str | int, image: Image.Image) -> Image.Image:
    """What `images_changed` makes of an image; else the image itself."""
    return image if _change is None else _change(name, image)


def read_image(file_name: str | os.PathLike, format: str | None = None) -> np.ndarray:
    """The pixels of an image, upright as its EXIF data says, as Detectron2's function has them.

    Grey images of more than 8 bits, which that function cuts off at 255, are scaled. For 16 bits
    65535 becomes 255. Whole numbers of 32 bits, and floating-point numbers, are taken for values
    of the first of these ranges that holds all of the image: 0 to 1 (only the latter), 0 to 255, 0
    to 65535, from its least to its greatest value. Transparency is left out, colours of a palette
    and CMYK become RGB, and of an animation it is the first picture.

    Args:
        format: a mode of Pillow, "BGR" or "YUV-BT.601"; None leaves the pixels as in the file.

    Returns:
        (H, W, 3), uint8, for "RGB" and "BGR".

    Raises:
        UserError: the file is missing, or no image that can be decoded.
    """
    try:
        return decode_image(file_name, format)
    except Exception as error:  # Pillow's decoders have many kinds of errors
        raise UserError(
            f"{str(file_name)!r} is not a readable image: {why_unreadable(error)}"
        ) from None


def decode_image(file_name: str | os.PathLike, format: str | None) -> np.ndarray:
    """As `read_image`, but with the errors of the decoder, which are of many kinds."""
    with PathManager.open(str(file_name), "rb") as file, Image.open(file) as image:
        if format is not None:
            image.info.pop("transparency", None)  # Pillow warns of it in a palette
            image = _to_8_bits(image)
        image = _apply_exif_orientation(image)
        if format is not None:
            image = as_changed(str(file_name), image)
        return convert_PIL_to_numpy(image, format)


def why_unreadable(error: Exception) -> str:
    """What an error of `decode_image` says, in one line without the file's name."""
    if isinstance(error, UnidentifiedImageError):
        return "it is empty, or of a format that Pillow does not know"
    return getattr(error, "strerror", None) or one_line(error)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """An image of one channel of more than 8 bits as one of mode L; others as they are."""
    if image.mode not in ("F", "I") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.float64)
    low, high = values.min(), values.max()
    if not np.isfinite([low, high]).all():
        raise ValueError("not all of its values are finite")
    # Pillow has whole numbers of 16 bits from these formats in 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        low, high = 0, 65535
    else:
        ranges = (255, 65535) if image.mode == "I" else (1, 255, 65535)
        low, high = next(((0, top) for top in ranges if low >= 0 and high <= top), (low, high))
    return Image.fromarray(np.rint((values - low) * (255 / (high - low or 1))).astype(np.uint8))


def is_visible(name: str) -> bool:
    """Whether a name in a folder is none of those that systems and programs put there, such as
    `.ipynb_checkpoints`, and macOS's `._photo.jpg` and `__MACOSX`."""
    return not name.startswith(".") and name != "__MACOSX"


def image_files(directory: str | os.PathLike) -> list[Path]:
    """The files below a directory that end in one of `SUFFIXES`, of upper or lower case, sorted.

    Those with hidden names, and those of folders with such names, are left out. Links are followed.

    Raises:
        UserError: the directory, or one in it, cannot be read.
    """
    found, folders, seen = [], [os.fspath(directory)], set()
    while folders:
        folder = folders.pop()
        if (real := os.path.realpath(folder)) in seen:
            continue  # a link has led in a circle
        seen.add(real)
        try:
            entries = [entry for entry in os.scandir(folder) if is_visible(entry.name)]
        except OSError as error:
            raise UserError(f"folder {folder!r} cannot be read: {error.strerror}") from None
        for entry in entries:
            if entry.is_dir():
                folders.append(entry.path)
            elif entry.name.lower().endswith(SUFFIXES) and (entry.is_file() or entry.is_symlink()):
                found.append(
                    Path(entry.path)
                )  # also links that lead nowhere, which are to be named
    return sorted(found)


class ImageFolder:
    """All image files below a directory, sorted by path; see `image_files`.

    Iterating decodes them one by one to RGB, (H, W, 3) uint8, see `read_image`. A file that cannot
    be decoded is left out, with a warning that names it.

    Attributes:
        files: their paths.

    Raises:
        UserError: there is no such directory, or no image file below it.
    """

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        if not directory.is_dir():
            raise UserError(f"image folder {str(directory)!r} is not a directory")
        self.files = image_files(directory)
        if not self.files:
            raise UserError(
                f"no image below {str(directory)!r}: give a folder with files of "
                f"{', '.join(SUFFIXES)}"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[np.ndarray]:
        for path in self.files:
            try:
                image = read_image(path, "RGB")
            except UserError as error:
                logger.warning(f"Skipped a file: {error}")
                continue
            yield image


def image_batches(
    directory: str | Path,
    num_images: int,
    size: int,
    batch_size: int,
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    format: str = "BGR",
) -> Iterator[Tensor]:
    """Square, normalized images of a folder, in batches, with a progress bar.

    The shorter side is resized to `size` and the middle is cut out, so an image of that size
    already keeps its pixels.

    Args:
        directory: see `ImageFolder`.
        num_images: at most so many, the first in the order of their paths.
        size: height and width of the result, in pixels.
        batch_size: images in a batch; the last one may have fewer.
        pixel_mean, pixel_std: per channel, for values from 0 to 255, as MODEL.PIXEL_MEAN and
            MODEL.PIXEL_STD.
        format: the order of the channels, as INPUT.FORMAT.

    Yields:
        (N, 3, size, size), float32.

    Raises:
        UserError: there is no image, or none can be decoded.
    """
    folder = ImageFolder(directory)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (pixel_mean, pixel_std))
    images = itertools.islice(folder, num_images)
    total = min(num_images, len(folder))
    hidden = not comm.is_main_process()
    normalized = ((_square(image, size, format) - mean) / std for image in images)
    used = 0
    with tqdm(total=total, desc="images", unit="image", disable=hidden) as bar:
        while batch := list(itertools.islice(normalized, batch_size)):
            used += len(batch)
            bar.update(len(batch))
            yield torch.stack(batch)
    if not used:
        raise UserError(f"none of the images below {str(directory)!r} can be decoded")


def _square(image: np.ndarray, size: int, format: str) -> Tensor:
    """(3, size, size), float32, from (H, W, 3) uint8 RGB."""
    picture = functional.center_crop(functional.resize(Image.fromarray(image), size), size)
    pixels = np.ascontiguousarray(convert_PIL_to_numpy(picture, format), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)
