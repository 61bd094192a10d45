"""The order of training images, continued where a run was interrupted."""

import itertools
from collections.abc import Iterator

from detectron2.data.samplers import TrainingSampler


class ResumableTrainingSampler(TrainingSampler):
    """A `TrainingSampler` that can begin in the middle of its infinite sequence.

    Attributes:
        start: how many images of the sequence, over all processes, to leave out.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        first = self.start + self._rank
        yield from itertools.islice(self._infinite_indices(), first, None, self._world_size)
