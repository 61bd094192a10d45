"""The layer's two passes each way, and what lies between them, in plain PyTorch operations.

Shape shorthand as in `passes` and `transform`. In a set without "bw" and "iw" every matrix is
diagonal and is held as its diagonal, (…, g, G).
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..mixing import Statistics
from ..options import Options, Parameters, Running
from ..padding import Extent
from ..sync import ranks_moments, sum_gradients
from .passes import affine, cross_moments, input_gradient, moments
from .running import running_values, update_running
from .transform import (
    batch_moments,
    input_coefficients,
    whitening_transform,
    whitening_transform_backward,
)

__all__ = [
    "backward",
    "batch_moments",
    "forward",
    "moments",
    "running_values",
    "update_running",
    "without_autocast",
]


def without_autocast(x: Tensor) -> AbstractContextManager:
    """All is computed in float32 at least, whatever autocast is set to for the device of x."""
    kind = x.device.type
    available = torch.amp.is_autocast_available(kind)  # not for the meta device
    return torch.autocast(kind, enabled=False) if available else nullcontext()


def forward(
    x: Tensor,
    parameters: Parameters,
    running: Running,
    options: Options,
    extent: Extent | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...], int | Tensor | None]:
    """y, and what `backward` needs: tensors, and the number of the batch's pixels on all ranks.

    Args:
        x: (N, C, H, W), contiguous or channels_last.
        running: updated where the statistics of the batch are taken.
        extent: the pixels that statistics are of; None for all.
    """
    with without_autocast(x):
        return _forward(x, parameters, running, options, extent)


def backward(
    dy: Tensor,
    x: Tensor,
    parameters: Parameters,
    kept: list[Tensor | None],
    count: int | Tensor | None,
    options: Options,
    needs_dx: bool,
    extent: Extent | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, None if it needs none, and of the parameters.

    Args:
        dy: (N, C, H, W), of any strides.
        kept, count: by `forward`.
        extent: as given to `forward`.
    """
    with without_autocast(x):
        return _backward(dy, x, parameters, kept, count, options, needs_dx, extent)


def kept_shapes(x: Tensor, options: Options) -> list[tuple[int, ...] | None]:
    """The shapes of what `forward` keeps for `backward`, and of the number of all ranks' pixels."""
    side = options.num_pergroup
    n, groups = x.shape[0], x.shape[1] // side
    vector = (groups, side)
    matrix = vector if options.diagonal else (groups, side, side)
    each = n if options.of_sample else 1
    shapes = [(n, *vector), (n, *matrix)] if options.of_sample else [None, None]
    shapes += [vector, matrix] if options.of_batch else [None, None]
    shapes += [(each, *vector), (each, *matrix)]
    if not options.diagonal:
        if options.whitening == "eigh":
            shapes.append((each, *vector))
        shapes.append((each, *matrix))
    return shapes + [(1,)] * (options.of_this_batch and options.group is not None)


def _forward(x: Tensor, parameters: Parameters, running: Running, options: Options, extent):
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean = cov = batch_mean = batch_cov = count = None
    if options.of_sample or options.of_this_batch:
        mean, cov = moments(x, options.num_pergroup, options.diagonal, extent)
    if options.of_this_batch:
        pixels = None if extent is None else extent.pixels
        batch_mean, batch_cov = batch_moments(mean, cov, pixels)
        count = x.shape[0] * x.shape[2] * x.shape[3] if pixels is None else sum(pixels)
        if options.group is not None:
            batch_mean, batch_cov, count = ranks_moments(
                batch_mean, batch_cov, count, options.group
            )
        update_running(running, batch_mean, batch_cov, count, options.momentum)
    elif options.of_batch:
        batch_mean, batch_cov = running_values(running, dtype, options)
    of_samples = (mean, cov) if options.of_sample else (None, None)
    statistics = Statistics(*of_samples, batch_mean, batch_cov)
    transform = whitening_transform(statistics, parameters, dtype, options)
    y = affine(x, transform.center, transform.matrix, transform.shift)
    return y, (*statistics, transform.center, *transform.saved), count


def _backward(dy: Tensor, x: Tensor, parameters, kept, count, options: Options, needs_dx, extent):
    statistics, center, saved = Statistics(*kept[:4]), kept[4], tuple(kept[5:])
    product, total = cross_moments(dy, x, center, options.diagonal)
    grad_parameters, gradients, matrix = whitening_transform_backward(
        product, total, saved, statistics, parameters, options
    )
    if not options.of_this_batch:  # the running values are constants
        gradients = gradients._replace(batch_mean=None, batch_cov=None)
    elif options.group is not None:
        # Every rank takes part, whether it has pixels or not.
        of_batch = gradients[2:]
        packed = sum_gradients(torch.cat([t.flatten() for t in of_batch]), options.group)
        parts = packed.split([t.numel() for t in of_batch])
        gradients = Statistics(*gradients[:2], *(p.view_as(t) for p, t in zip(parts, of_batch)))
    dx = None
    if needs_dx:
        length = x.shape[2] * x.shape[3]
        if extent is not None:
            length = center.new_tensor(extent.pixels).view(-1, 1, 1)
        x_matrix, shift = input_coefficients(gradients, statistics, center, length, count)
        dx = input_gradient(dy, x, center, matrix, x_matrix, shift, extent)
    grads = (None if g is None else g.to(p.dtype) for g, p in zip(grad_parameters, parameters))
    return dx, *grads
