"""What a call of the operation is given besides the feature map."""

from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from .mixing import OF_BATCH, OF_SAMPLE, WHITENING


class Parameters(NamedTuple):
    """γ and β, (C,) or None; λ, (K,); λ', (K,) or None if tied."""

    weight: Tensor | None
    bias: Tensor | None
    mean_weight: Tensor
    var_weight: Tensor | None


class Running(NamedTuple):
    """The running mean (g, G, 1) and covariance (g, G, G)."""

    mean: Tensor
    cov: Tensor


class Options(NamedTuple):
    """See `functional.switch_whiten` for all but the last two.

    Attributes:
        group: the ranks whose batches are one; None for this rank alone.
        training: take the statistics of the batch, as opposed to the running ones.
    """

    statistics: tuple[str, ...]
    num_pergroup: int
    momentum: float
    eps: float
    whitening: str
    num_iterations: int
    group: ProcessGroup | None
    training: bool = True

    @property
    def diagonal(self) -> bool:
        """No statistic of the set needs more of a covariance than its diagonal."""
        return WHITENING.isdisjoint(self.statistics)

    @property
    def of_sample(self) -> bool:
        """Some statistic depends on the sample."""
        return not OF_SAMPLE.isdisjoint(self.statistics)

    @property
    def of_batch(self) -> bool:
        """Some statistic is that of the batch, or stands for it in evaluation."""
        return not OF_BATCH.isdisjoint(self.statistics)

    @property
    def of_this_batch(self) -> bool:
        """Some statistic is taken from the batch that is being computed."""
        return self.training and self.of_batch
