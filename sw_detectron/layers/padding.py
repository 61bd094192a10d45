"""Which pixels of feature maps belong to images, where these were padded to a common size.

An image lies in the upper left corner of what it was padded to, and so do its feature maps. Layers
do not get sizes with their input; they look at those of the thread, which whoever runs the network
sets.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

PADDINGS = ("counted", "ignored", "zeroed")
"""What a network does with padding: takes it for pixels of the image; leaves it out of SW's
statistics; and besides, lets convolutions see zeros there, as beyond the border of an image alone.
"""


class Extent(NamedTuple):
    """The part of each of N samples that belongs to its image, from the upper left corner.

    Attributes:
        rows, columns: N numbers each, which may be 0.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def pixels(self) -> list[int]:
        """The number of each sample."""
        return [rows * columns for rows, columns in zip(self.rows, self.columns)]

    def of_sample(self, index: int) -> "Extent":
        """That of one sample alone."""
        return Extent(self.rows[index : index + 1], self.columns[index : index + 1])

    def mask(self, height: int, width: int, device: torch.device) -> Tensor:
        """(N, 1, H, W), True where a pixel belongs to the image."""
        rows, columns = (torch.tensor(t, device=device)[:, None] for t in self)
        inside_rows = torch.arange(height, device=device) < rows
        inside_columns = torch.arange(width, device=device) < columns
        return (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]


@dataclass(frozen=True)
class ImageSizes:
    """Of the N images of a batch.

    Attributes:
        sizes: height and width of each, h_i and w_i, in pixels.
        height, width: that they were padded to, h' and w'.
    """

    sizes: tuple[tuple[int, int], ...]
    height: int
    width: int
    _masks: dict = field(default_factory=dict, repr=False, compare=False)

    def extent(self, x: Tensor) -> Extent | None:
        """The first ceil(h H / h') rows and ceil(w W / w') columns of each sample of a map.

        Args:
            x: (N, C, H, W).

        Returns:
            None if all pixels belong to images.

        Raises:
            ValueError: there are not N images.
        """
        if len(x) != len(self.sizes):
            raise ValueError(
                f"a feature map of {len(x)} samples, where the batch has {len(self.sizes)} images"
            )
        height, width = x.shape[2:]
        if self.height == 0 or self.width == 0:
            return None
        rows = tuple(-(-h * height // self.height) for h, _ in self.sizes)
        columns = tuple(-(-w * width // self.width) for _, w in self.sizes)
        if min(rows, default=height) == height and min(columns, default=width) == width:
            return None
        return Extent(rows, columns)

    def mask(self, x: Tensor) -> Tensor | None:
        """`Extent.mask` of a map; None if all pixels belong to images."""
        extent = self.extent(x)
        if extent is None:
            return None
        key = (*x.shape[2:], x.device)
        if key not in self._masks:
            self._masks[key] = extent.mask(*key)
        return self._masks[key]


class _Thread(threading.local):
    sizes: ImageSizes | None = None


_thread = _Thread()


def current_sizes() -> ImageSizes | None:
    """Those that this thread's feature maps are of; None if nobody has said them."""
    return _thread.sizes


def set_current_sizes(sizes: ImageSizes | None) -> ImageSizes | None:
    """Returns those from before."""
    before, _thread.sizes = _thread.sizes, sizes
    return before


@contextmanager
def image_sizes(
    sizes: Sequence[tuple[int, int]] | ImageSizes | None, padded: tuple[int, int] = (0, 0)
) -> Iterator[None]:
    """Inside, feature maps of this thread are of images of these sizes.

    Args:
        sizes: (height, width) of each, in pixels; None for unknown ones.
        padded: height and width that they were padded to.
    """
    if sizes is not None and not isinstance(sizes, ImageSizes):
        sizes = ImageSizes(tuple((int(h), int(w)) for h, w in sizes), *map(int, padded))
    before = set_current_sizes(sizes)
    try:
        yield
    finally:
        set_current_sizes(before)
