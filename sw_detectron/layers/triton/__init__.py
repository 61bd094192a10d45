"""The layer as Triton kernels: three launches forward and four backward.

One operation a file, each kernel beside its launcher; `common`, `mixture` and `running` hold the
parts that several kernels share. The package `plain` computes the same.
"""

import torch
from torch import Tensor

from ..mixing import Statistics
from ..options import Options, Parameters, Running
from ..sync import gather_moments
from ..sync import sum_gradients as sum_over_ranks
from .batch_moments import batch_moments, packed_moments
from .common import HAS_TRITON, INTERPRETED, LARGEST_GROUP, SMALLEST_GROUP, cannot_run_on
from .cross_moments import cross_moments
from .input_gradient import input_gradient
from .moments import CHUNKS_IN_PLACE, moments
from .ranks_moments import ranks_moments
from .sum_gradients import sum_gradients
from .whiten import whiten
from .whiten_backward import whiten_backward

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "backward",
    "cannot_run_on",
    "forward",
    "has_kernels",
]


def has_kernels(x: Tensor, running: Running, options: Options) -> bool:
    """Whether there are kernels for a call, on a device that can run them."""
    return (
        options.whitening == "newton"
        and not options.diagonal
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and SMALLEST_GROUP <= options.num_pergroup <= LARGEST_GROUP
        and all(t.is_contiguous() for t in running)
    )


def forward(
    x: Tensor, parameters: Parameters, running: Running, options: Options
) -> tuple[Tensor, tuple[Tensor | None, ...], int | Tensor | None]:
    """y, and what `backward` needs: tensors, and the number of the batch's pixels on all ranks.

    Args:
        x: (N, C, H, W), contiguous or channels_last. N is 0 only where other ranks have samples.
        running: updated where the statistics of the batch are taken.
    """
    parameters = Parameters(*(None if p is None else p.contiguous() for p in parameters))
    n, length = x.shape[0], x.shape[2] * x.shape[3]
    mean = cov = batch_mean = batch_cov = count = None
    moment_length = 0
    if n and (options.of_sample or options.of_this_batch):
        # Chunks that nothing puts together before they are used have to be few.
        most = length if options.of_this_batch else CHUNKS_IN_PLACE
        mean, cov, moment_length = moments(x, options.num_pergroup, most)
    if options.of_this_batch:
        count = n * length
        if n:
            packed, batch_mean, batch_cov, mean, cov = batch_moments(
                mean, cov, moment_length, length, options.of_sample
            )
        else:
            packed = packed_moments(running.mean.float(), *running.mean.shape[:2])[0].zero_()
        if options.group is not None:
            gathered = gather_moments(packed, options.group)
            batch_mean, batch_cov, count = ranks_moments(gathered, running, options.momentum)
        if mean is not None:
            mean, cov, moment_length = mean[:, :, None], cov[:, :, None], length
    elif options.of_batch:
        batch_mean, batch_cov = running
    statistics = Statistics(mean, cov, batch_mean, batch_cov)
    if not n:
        return torch.empty_like(x), (*statistics, None, None), count
    move = running if options.of_this_batch and options.group is None else None
    y, statistics, center, layer = whiten(x, statistics, moment_length, parameters, move, options)
    return y, (*statistics, center, layer), count


def backward(
    dy: Tensor,
    x: Tensor,
    parameters: Parameters,
    kept: list[Tensor | None],
    count: int | Tensor | None,
    options: Options,
    needs_dx: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, None if it needs none, and of the parameters.

    Args:
        dy: (N, C, H, W), of any strides.
        kept, count: by `forward`.
    """
    parameters = Parameters(*(None if p is None else p.contiguous() for p in parameters))
    statistics, center, layer = Statistics(*kept[:4]), *kept[4:]
    if not len(x):
        # The other ranks wait for this one.
        _, groups, num_pergroup = statistics.batch_cov.shape
        channels = groups * num_pergroup
        sum_over_ranks(
            x.new_zeros(channels * (1 + num_pergroup), dtype=torch.float32), options.group
        )
        return torch.empty_like(x), *(
            None if p is None else torch.zeros_like(p) for p in parameters
        )
    product, total = cross_moments(dy, x, center, options.of_sample)
    gradients = whiten_backward(product, total, statistics, layer, parameters, options)
    of_parameters, of_batch = sum_gradients(gradients, parameters, options)
    if of_batch is not None and options.group is not None:
        of_batch = sum_over_ranks(of_batch, options.group)
    dx = None
    if needs_dx:
        dx = input_gradient(
            dy,
            x,
            center,
            gradients,
            of_batch,
            statistics,
            layer,
            count,
            parameters,
            options,
        )
    grads = (None if g is None else g.to(p.dtype) for g, p in zip(of_parameters, parameters))
    return dx, *grads
