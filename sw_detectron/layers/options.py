"""What a call of the operation shares with all others of its layer."""

from typing import NamedTuple

from torch.distributed import ProcessGroup

from .mixing import OF_BATCH, OF_SAMPLE, WHITENING


class Options(NamedTuple):
    """See `functional.switch_whiten` for all but the last.

    Attributes:
        group: the ranks whose batches are one; None for this rank alone.
    """

    statistics: tuple[str, ...]
    num_pergroup: int
    momentum: float
    eps: float
    whitening: str
    num_iterations: int
    group: ProcessGroup | None

    @property
    def diagonal(self) -> bool:
        """No statistic of the set needs more of a covariance than its diagonal."""
        return not WHITENING & set(self.statistics)

    @property
    def of_sample(self) -> bool:
        """Some statistic depends on the sample."""
        return bool(OF_SAMPLE & set(self.statistics))

    @property
    def of_batch(self) -> bool:
        """Some statistic depends on the batch."""
        return bool(OF_BATCH & set(self.statistics))
