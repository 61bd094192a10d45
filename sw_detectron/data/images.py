"""Unlabelled images of a folder, and batches of them as a network takes them."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from detectron2.data.detection_utils import convert_PIL_to_numpy, read_image
from detectron2.utils import comm
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional
from tqdm import tqdm

from ..errors import UserError

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")

logger = logging.getLogger(__name__)


class ImageFolder:
    """All image files below a directory, sorted by path.

    Iterating decodes them one by one to RGB, (H, W, 3) uint8, upright as their EXIF data says. A
    file that cannot be decoded is left out, with a warning that names it.

    Attributes:
        files: the paths of the files ending in one of `SUFFIXES`, of upper or lower case.

    Raises:
        UserError: there is no such directory, or no image file below it.
    """

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        if not directory.is_dir():
            raise UserError(f"image folder {str(directory)!r} is not a directory")
        paths = directory.rglob("*")
        self.files = sorted(p for p in paths if p.suffix.lower() in SUFFIXES and p.is_file())
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
                image = read_image(str(path), "RGB")
            except Exception as error:  # Pillow's decoders have many kinds of errors
                logger.warning(f"Skipping {str(path)!r}, which is not a readable image: {error}")
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
