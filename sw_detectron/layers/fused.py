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

from . import kernels, passes
from .composed import composed_switch_whiten
from .inverse_sqrt import (
    eigh_inverse_sqrt_backward,
    eigh_inverse_sqrt_forward,
    newton_inverse_sqrt,
    newton_inverse_sqrt_backward,
)
from .mixing import mix, mix_backward
from .moments import batch_moments, ranks_moments, reduce_gradients
from .options import Options


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
            return _forward(ctx, x, weight, bias, mean_weight, var_weight, running, options)

    @staticmethod
    def backward(ctx, dy: Tensor, *_) -> tuple[Tensor | None, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            if torch.is_grad_enabled():  # somebody is going to differentiate the gradient
                return _backward_composed(ctx, dy)
            return _backward(ctx, dy)


def _forward(ctx, x, weight, bias, mean_weight, var_weight, running, options: Options):
    dtype = torch.promote_types(x.dtype, torch.float32)
    omega_mean = mean_weight.to(dtype).softmax(dim=0)
    omega_cov = omega_mean if var_weight is None else var_weight.to(dtype).softmax(dim=0)

    batch_mean, batch_cov = running or (None, None)
    mean = cov = count = None
    of_this_batch = options.of_batch and running is None
    if options.of_sample or of_this_batch:
        mean, cov = passes.moments(x, options.num_pergroup, options.diagonal)
    if of_this_batch:
        batch_mean, batch_cov, count = _batch(x, mean, cov, options)
    if not options.of_sample:
        mean = cov = None

    mixed_mean, mixed_cov = mix(
        options.statistics, omega_mean, omega_cov, mean, cov, batch_mean, batch_cov, options.eps
    )
    root, for_root = _inverse_sqrt(mixed_cov, options)
    if weight is None:
        matrix, shift = root, torch.zeros_like(mixed_mean)
    else:
        matrix = _scale_rows(_grouped(weight, dtype, options), root)
        shift = _grouped(bias, dtype, options).expand_as(mixed_mean)
    y = passes.affine(x, mixed_mean, matrix, shift)

    ctx.save_for_backward(
        *(x, weight, bias, mean_weight, var_weight),
        *(omega_mean, omega_cov, mean, cov, batch_mean, batch_cov, mixed_mean, root),
        *for_root,
    )
    ctx.options, ctx.count, ctx.of_this_batch = options, count, of_this_batch
    if not of_this_batch:
        return y, None, None, None
    ctx.mark_non_differentiable(batch_mean, batch_cov)
    if isinstance(count, Tensor):
        ctx.mark_non_differentiable(count)
    return y, batch_mean, batch_cov, count


def _backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    options: Options = ctx.options
    x, weight, _, mean_weight, var_weight, omega_mean, omega_cov, *rest = ctx.saved_tensors
    mean, cov, batch_mean, batch_cov, mixed_mean, root, *for_root = rest
    gamma = None if weight is None else _grouped(weight, root.dtype, options)

    product, total = passes.cross_moments(dy, x, mixed_mean, options.diagonal)
    grad_weight = grad_bias = None
    if weight is not None:
        axes = 0 if options.diagonal else (0, -1)
        grad_weight = (product * root).sum(dim=axes).flatten().to(weight.dtype)
        grad_bias = total.sum(dim=0).flatten().to(weight.dtype)
    if root.shape[0] == 1:  # the same for all samples
        product, total = product.sum(dim=0, keepdim=True), total.sum(dim=0, keepdim=True)
    grad_root = product if gamma is None else _scale_rows(gamma, product)
    matrix = root if gamma is None else _scale_rows(gamma, root)
    grad_mixed_cov = _inverse_sqrt_backward(root, for_root, grad_root, options)
    grad_mixed_mean = -_transposed_times(matrix, total)
    grad_omega_mean, grad_omega_cov, grad_mean, grad_cov, grad_batch_mean, grad_batch_cov = (
        mix_backward(
            options.statistics,
            *(omega_mean, omega_cov, mean, cov, batch_mean, batch_cov),
            *(grad_mixed_mean, grad_mixed_cov),
        )
    )
    if var_weight is None:
        grad_omega_mean = grad_omega_mean + grad_omega_cov
        grad_var_weight = None
    else:
        grad_var_weight = _softmax_backward(omega_cov, grad_omega_cov).to(var_weight.dtype)
    grad_mean_weight = _softmax_backward(omega_mean, grad_omega_mean).to(mean_weight.dtype)

    if ctx.of_this_batch and options.group is not None:
        # Every rank takes part, whether it has pixels or not.
        grad_batch_mean, grad_batch_cov = reduce_gradients(
            grad_batch_mean, grad_batch_cov, options.group
        )
    dx = None
    if ctx.needs_input_grad[0]:
        # dx = Aᵀ dy + 2/L dΣ (x - μ) + dμ/L, and the batch's part likewise, around μ̂.
        x_matrix, shift = None, torch.zeros_like(mixed_mean)
        if options.of_sample:
            scale = 1 / (x.shape[2] * x.shape[3])
            x_matrix = 2 * scale * grad_cov
            shift = scale * grad_mean + _times(x_matrix, mixed_mean - mean)
        if ctx.of_this_batch:
            scale = 1 / (ctx.count.clamp(min=1) if isinstance(ctx.count, Tensor) else ctx.count)
            batch_matrix = (2 * scale) * grad_batch_cov[None]
            shift = shift + scale * grad_batch_mean + _times(batch_matrix, mixed_mean - batch_mean)
            x_matrix = batch_matrix if x_matrix is None else x_matrix + batch_matrix
        dx = passes.input_gradient(dy, x, mixed_mean, matrix, x_matrix, shift)
    return dx, grad_weight, grad_bias, grad_mean_weight, grad_var_weight, None, None


def _backward_composed(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors[:5]
    batch_mean, batch_cov = ctx.saved_tensors[9:11]
    # When the batch's statistics were used they are computed again, with their gradients.
    running = None if ctx.of_this_batch or batch_mean is None else (batch_mean, batch_cov)
    y, _, _ = composed_switch_whiten(*inputs, running, ctx.options)
    needed = [i for i in range(5) if ctx.needs_input_grad[i]]
    found = torch.autograd.grad(y, [inputs[i] for i in needed], dy, create_graph=True)
    grads = [None] * 7
    for i, grad in zip(needed, found):
        grads[i] = grad
    return tuple(grads)


def _batch(
    x: Tensor, mean: Tensor, cov: Tensor, options: Options
) -> tuple[Tensor, Tensor, int | Tensor]:
    """Mean, covariance and number of the batch's pixels, on all ranks if synchronized."""
    count = x.shape[0] * x.shape[2] * x.shape[3]
    if count:
        mean, cov = batch_moments(mean, cov)
    else:
        mean, cov = mean.new_zeros(mean.shape[1:]), cov.new_zeros(cov.shape[1:])
    if options.group is None:
        return mean, cov, count
    return ranks_moments(mean, cov, count, options.group)


def _inverse_sqrt(cov: Tensor, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Σ̂^(-1/2), and what its backward needs besides."""
    if options.diagonal:
        return cov.rsqrt(), ()
    if options.whitening == "eigh":
        root, *pairs = eigh_inverse_sqrt_forward(cov, floor=options.eps)
        return root, tuple(pairs)
    iterate = kernels.newton_inverse_sqrt if kernels.available(cov) else newton_inverse_sqrt
    return iterate(cov, options.num_iterations), (cov,)


def _inverse_sqrt_backward(
    root: Tensor, saved: list[Tensor], grad: Tensor, options: Options
) -> Tensor:
    if options.diagonal:
        return -0.5 * root**3 * grad
    if options.whitening == "eigh":
        return eigh_inverse_sqrt_backward(*saved, grad)
    (cov,) = saved
    if kernels.available(cov):
        return kernels.newton_inverse_sqrt_backward(cov, grad, options.num_iterations)
    flat = (cov.flatten(0, 1), grad.flatten(0, 1))
    return newton_inverse_sqrt_backward(*flat, options.num_iterations).view_as(cov)


def _grouped(parameter: Tensor, dtype: torch.dtype, options: Options) -> Tensor:
    return parameter.to(dtype).view(-1, options.num_pergroup)


def _scale_rows(scale: Tensor, matrix: Tensor) -> Tensor:
    return matrix * (scale if matrix.dim() == 3 else scale[..., None])


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    if matrix.dim() == vector.dim():
        return matrix * vector
    return (matrix * vector[..., None, :]).sum(dim=-1)


def _transposed_times(matrix: Tensor, vector: Tensor) -> Tensor:
    return _times(matrix if matrix.dim() == vector.dim() else matrix.mT, vector)


def _softmax_backward(omega: Tensor, grad: Tensor) -> Tensor:
    return omega * (grad - (omega * grad).sum())
