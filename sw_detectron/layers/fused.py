"""Switchable Whitening as one autograd function: two passes over the pixels each way.

Shape shorthand in this module:
    N: samples;  C: channels;  H, W: height, width;  L = H * W: pixels of a sample
    g: channel groups;  G: channels in a group;  C = g * G;  K: statistics in the set
    M: pixels of the batch, on all ranks if synchronized

Forward: one pass for the moments, one for y = A (x - μ̂) + β with A = γ ⊙ Σ̂^(-1/2). Backward: one
pass for Σ dy (x - μ̂)ᵀ and Σ dy, one for dx, which is affine in dy and x. What lies between the
passes is small, (N, g, G, G) at most. Of the size of x, nothing is kept but x itself.

In a set without "bw" and "iw" every matrix is diagonal and is held as its diagonal, (…, g, G).
"""

import torch
from torch import Tensor

from . import passes, small_kernels
from .composed import composed_switch_whiten
from .moments import batch_moments, ranks_moments, reduce_gradients
from .options import Options
from .whitening import (
    Parameters,
    Statistics,
    input_coefficients,
    takes_small_kernels,
    whitening_transform,
    whitening_transform_backward,
)


class FusedSwitchWhiten(torch.autograd.Function):
    """y = FusedSwitchWhiten.apply(x, weight, bias, mean_weight, var_weight, running, options).

    See `functional.switch_whiten` for the tensors, and `composed` for `running`; x is contiguous or
    channels_last, and its samples have pixels, though there may be no sample. Returns y, and
    the batch's mean, covariance and number of pixels, None if they were not taken from the batch;
    the number is a tensor () if it is that of several ranks.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mean_weight, var_weight, running, options: Options):
        with torch.autocast(x.device.type, enabled=False):
            parameters = Parameters(weight, bias, mean_weight, var_weight)
            return _forward(ctx, x, parameters, running, options)

    @staticmethod
    def backward(ctx, dy: Tensor, *_) -> tuple[Tensor | None, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            if torch.is_grad_enabled():  # somebody is going to differentiate the gradient
                return _backward_composed(ctx, dy)
            return _backward(ctx, dy)


def _forward(ctx, x: Tensor, parameters: Parameters, running, options: Options):
    dtype = torch.promote_types(x.dtype, torch.float32)
    of_this_batch = options.of_batch and running is None
    mean = cov = count = None
    batch_mean, batch_cov = running or (None, None)
    if options.of_sample or of_this_batch:
        mean, cov = passes.moments(x, options.num_pergroup, options.diagonal)
    if of_this_batch:
        batch_mean, batch_cov, count = _batch(x, mean, cov, options)
    of_samples = (mean, cov) if options.of_sample else (None, None)
    statistics = Statistics(*of_samples, batch_mean, batch_cov)
    transform = whitening_transform(statistics, parameters, dtype, options)
    y = passes.affine(x, transform.center, transform.matrix, transform.shift)

    ctx.save_for_backward(x, *parameters, *statistics, transform.center, *transform.saved)
    ctx.options, ctx.of_this_batch, ctx.count = options, of_this_batch, count
    if not of_this_batch:
        return y, None, None, None
    ctx.mark_non_differentiable(batch_mean, batch_cov)
    if isinstance(count, Tensor):
        ctx.mark_non_differentiable(count)
    return y, batch_mean, batch_cov, count


def _backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    options: Options = ctx.options
    x, parameters, statistics, center, saved = _unpack(ctx)
    product, total = passes.cross_moments(dy, x, center, options.diagonal)
    grad_parameters, grad_statistics, matrix = whitening_transform_backward(
        product, total, saved, statistics, parameters, options
    )
    if not ctx.of_this_batch:  # the running values are constants
        grad_statistics = grad_statistics._replace(batch_mean=None, batch_cov=None)
    elif options.group is not None:
        # Every rank takes part, whether it has pixels or not.
        batch_mean, batch_cov = reduce_gradients(*grad_statistics[2:], options.group)
        grad_statistics = grad_statistics._replace(batch_mean=batch_mean, batch_cov=batch_cov)
    dx = None
    if ctx.needs_input_grad[0]:
        length = x.shape[2] * x.shape[3]
        x_matrix, shift = input_coefficients(
            grad_statistics, statistics, center, length, ctx.count, options
        )
        dx = passes.input_gradient(dy, x, center, matrix, x_matrix, shift)
    grads = (None if g is None else g.to(p.dtype) for g, p in zip(grad_parameters, parameters))
    return dx, *grads, None, None


def _backward_composed(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, parameters, statistics, _, _ = _unpack(ctx)
    inputs = (x, *parameters)
    # When the batch's statistics were used they are computed again, with their gradients.
    constant = statistics.batch_mean is not None and not ctx.of_this_batch
    running = statistics[2:] if constant else None
    y, _, _ = composed_switch_whiten(*inputs, running, ctx.options)
    needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[i]]
    found = torch.autograd.grad(y, [inputs[i] for i in needed], dy, create_graph=True)
    grads = [None] * 7
    for i, grad in zip(needed, found):
        grads[i] = grad
    return tuple(grads)


def _unpack(ctx) -> tuple[Tensor, Parameters, Statistics, Tensor, tuple[Tensor, ...]]:
    x, *rest = ctx.saved_tensors
    return x, Parameters(*rest[:4]), Statistics(*rest[4:8]), rest[8], tuple(rest[9:])


def _batch(
    x: Tensor, mean: Tensor, cov: Tensor, options: Options
) -> tuple[Tensor, Tensor, int | Tensor]:
    """Mean, covariance and number of the batch's pixels, on all ranks if synchronized."""
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if count:
        by_kernels = takes_small_kernels(options, mean, cov)
        mean, cov = (small_kernels.batch_moments if by_kernels else batch_moments)(mean, cov)
    else:
        mean, cov = mean.new_zeros(mean.shape[1:]), cov.new_zeros(cov.shape[1:])
    if options.group is None:
        return mean, cov, count
    return ranks_moments(mean, cov, count, options.group)
