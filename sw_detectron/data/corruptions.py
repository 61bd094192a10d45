"""Images as noise, blur, weather and compression spoil them.

The 15 corruptions in 5 severities are those of Michaelis et al., "Benchmarking Robustness in Object
Detection: Autonomous Driving when Winter is Coming" (arXiv:1907.07484). The library
imagecorruptions computes them. It is imported when it is first needed, and need not be installed
otherwise.
"""

import hashlib
import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
from PIL import Image

from ..errors import UserError

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
SEVERITIES = (1, 2, 3, 4, 5)

SMALLEST_SIDE = 32
"""The least height and width that the library takes, in pixels."""

# Those that draw from a generator of their own, which numpy's global seed does not reach.
_SEEDED_BY_ARGUMENT = ("impulse_noise", "glass_blur")


def load_library() -> ModuleType:
    """The module `imagecorruptions`.

    Raises:
        UserError: it, or something that it needs, is not installed.
    """
    try:
        return importlib.import_module("imagecorruptions")
    except ImportError as error:
        raise UserError(
            f"corruptions need the library imagecorruptions, and {error}: install it with "
            "pip install '.[robustness]'"
        ) from None


def library_version() -> str:
    """The version of the distribution that has the module.

    Raises:
        UserError: it is another one, whose functions take no seeds.
    """
    try:
        return importlib.metadata.version("imagecorruptions-imaug")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the module imagecorruptions is not that of imagecorruptions-imaug: install it with "
            "pip install '.[robustness]'"
        ) from None


def corrupt(pixels: np.ndarray, corruption: str, severity: int, image: str) -> np.ndarray:
    """A corrupted copy of an image.

    What is random follows from the image's name, the corruption and the severity alone, and so is
    the same in every process, order and run. numpy's global generator is as before afterwards.

    An image of less than 32 pixels a side is mirrored at its right and lower border until it has
    them, corrupted, and cut out again.

    Args:
        pixels: (H, W, 3), uint8, RGB.
        corruption: one of `CORRUPTIONS`.
        severity: one of `SEVERITIES`.
        image: a name that tells the image from the others of its data set.

    Returns:
        (H, W, 3), uint8, RGB.

    Raises:
        UserError: the library is not installed.
    """
    library = load_library()
    seed = _seed(image, corruption, severity)
    arguments = {"seed": seed} if corruption in _SEEDED_BY_ARGUMENT else {}
    height, width = pixels.shape[:2]
    missing = [(0, max(0, SMALLEST_SIDE - side)) for side in (height, width)]
    if missing != [(0, 0), (0, 0)]:
        pixels = np.pad(pixels, [*missing, (0, 0)], mode="symmetric")
    with _numpy_seeded(seed):
        corrupted = library.corrupt(
            pixels, severity=severity, corruption_name=corruption, **arguments
        )
    return corrupted[:height, :width]


class ImageCorruption:
    """A corruption in a severity, as `images.images_changed` takes it.

    Args:
        corruption, severity: see `corrupt`.
        names: of `image_names`; images that are not in it, such as label maps, stay as they are.

    Raises:
        UserError: the library is not installed.
    """

    def __init__(self, corruption: str, severity: int, names: Mapping[str | int, str]):
        self._corruption = corruption
        self._severity = severity
        self._names = names
        load_library()
        if corruption == "glass_blur":
            # It is compiled at its first use, which takes seconds. Made here, the workers of a data
            # loader, which are forked from this process, have it.
            corrupt(np.zeros((SMALLEST_SIDE, SMALLEST_SIDE, 3), np.uint8), corruption, severity, "")

    def __call__(self, key: str | int, image: Image.Image) -> Image.Image:
        if key not in self._names:
            return image
        pixels = np.asarray(image.convert("RGB"))
        name = self._names[key]
        return Image.fromarray(corrupt(pixels, self._corruption, self._severity, name))


def image_names(records: Sequence[Mapping]) -> dict[str | int, str]:
    """What names the images of a data set, wherever its folder lies, by the key that they are read
    with: the file name, or the image_id of an image that lies in no file.

    The name is the image_id, or where there is none the path below the folder that holds them all.

    Args:
        records: of the whole data set.

    Raises:
        UserError: an image has neither.
    """
    if not all("file_name" in record or "image_id" in record for record in records):
        raise UserError("images without file_name and image_id cannot be told apart")
    files = [os.path.abspath(record["file_name"]) for record in records if "file_name" in record]
    folder = os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""
    names = {}
    for record in records:
        file = record.get("file_name")
        name = record["image_id"] if "image_id" in record else _below(folder, file)
        names[record["image_id"] if file is None else str(file)] = str(name)
    return names


def _below(folder: str, file: str) -> str:
    return os.path.relpath(os.path.abspath(file), folder).replace(os.sep, "/")


def _seed(image: str, corruption: str, severity: int) -> int:
    """32 bits, as many as numpy's and numba's generators take."""
    text = "\0".join((image, corruption, str(severity)))
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:4], "little")


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    before = np.random.get_state()  # noqa: NPY002  the library draws from this generator
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
