"""Which pixels of feature maps belong to images, where these were padded to a common size.

An image lies in the upper left corner of what it was padded to, and so do its feature maps. Layers
do not get sizes with their input; they look at those of the thread, which whoever runs the network
sets.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

PADDINGS = ("counted", "ignored", "zeroed")
"""What a network does with padding: takes it for pixels of the image; leaves it out of SW's
statistics; and besides, lets convolutions see zeros there, as beyond the border of an image alone.
"""


@dataclass(frozen=True)
class Extent:
    """The part of each of N samples that belongs to its image, from the upper left corner.

    Attributes:
        sides: rows and columns of each, which may be 0.
    """

    sides: tuple[tuple[int, int], ...]
    _tensors: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def pixels(self) -> list[int]:
        """The number of each sample."""
        return [rows * columns for rows, columns in self.sides]

    def of_sample(self, index: int) -> "Extent":
        """That of one sample alone."""
        return Extent(self.sides[index : index + 1])

    def on(self, device: torch.device) -> Tensor:
        """`sides` as (N, 2), int32, copied once to each device."""
        if device not in self._tensors:
            sides = torch.tensor(self.sides, dtype=torch.int32).view(-1, 2)
            self._tensors[device] = sides.to(device)
        return self._tensors[device]

    def mask(self, height: int, width: int, device: torch.device) -> Tensor:
        """(N, 1, H, W), True where a pixel belongs to the image; made once for each device."""
        key = height, width, device
        if key not in self._tensors:
            self._tensors[key] = self._make_mask(*key)
        return self._tensors[key]

    def _make_mask(self, height: int, width: int, device: torch.device) -> Tensor:
        rows, columns = self.on(device)[..., None].unbind(dim=1)
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
    _extents: dict = field(default_factory=dict, repr=False, compare=False)

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
        if (height, width) not in self._extents:
            sides = tuple(
                (-(-h * height // self.height), -(-w * width // self.width)) for h, w in self.sizes
            )
            padded = any(side != (height, width) for side in sides)
            self._extents[height, width] = Extent(sides) if padded else None
        return self._extents[height, width]

    def mask(self, x: Tensor) -> Tensor | None:
        """`Extent.mask` of a map; None if all pixels belong to images."""
        extent = self.extent(x)
        return None if extent is None else extent.mask(*x.shape[2:], x.device)


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
