"""The order of training images, continued where a run was interrupted."""

import itertools
from collections.abc import Iterator
from typing import Any

from detectron2.data import build_detection_train_loader
from detectron2.data.samplers import TrainingSampler
from detectron2.utils import comm
from torch.utils.data import DataLoader


class ResumableTrainingSampler(TrainingSampler):
    """A `TrainingSampler` that can begin in the middle of its infinite sequence.

    Attributes:
        start: how many images of the sequence, over all processes, to leave out.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        first = self.start + self._rank
        yield from itertools.islice(self._infinite_indices(), first, None, self._world_size)


def build_resumable_train_loader(
    *args: Any, dataset: list[dict], seed: int = -1, **kwargs: Any
) -> DataLoader:
    """Detectron2's `build_detection_train_loader` over a `ResumableTrainingSampler`.

    Args:
        args, kwargs: those of `build_detection_train_loader`, or a config.
        dataset: the records of all images.
        seed: of the order of the images; negative for a new one each time.

    Returns:
        The loader; its attribute `resumable_sampler` is the sampler.
    """
    given = seed if seed >= 0 else None
    sampler = ResumableTrainingSampler(len(dataset), seed=given)
    # A seed gives the loader a random generator of its own: else starting to load, which happens
    # on resuming too, would draw a number from the one that the model draws from.
    loader = build_detection_train_loader(
        *args,
        dataset=dataset,
        sampler=sampler,
        seed=None if given is None else given + comm.get_rank(),
        **kwargs,
    )
    loader.resumable_sampler = sampler
    return loader
