"""Switchable Whitening as one autograd function: two passes over the pixels each way.

Forward: one pass for the moments, one for y = A (x - μ̂) + β with A = γ ⊙ Σ̂^(-1/2). Backward: one
pass for Σ dy (x - μ̂)ᵀ and Σ dy, one for dx, which is affine in dy and x. What lies between the
passes is small, (N, g, G, G) at most. Of the size of x, nothing is kept but x itself.
"""

import torch
from torch import Tensor

from .composed import composed_switch_whiten
from .options import Options, Parameters, Running
from .plain import running_values, without_autocast


class FusedSwitchWhiten(torch.autograd.Function):
    """y = apply(x, weight, bias, mean_weight, var_weight, running_mean, running_cov, options,
    backend, extent).

    See `functional.switch_whiten` for the tensors; x is contiguous or channels_last, and its
    samples have pixels, though there may be no sample. `backend` is the package `plain` or
    `triton`; `extent` what counts in statistics, None for all pixels.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mean_weight, var_weight, *rest) -> Tensor:
        *running, options, backend, extent = rest
        parameters = Parameters(weight, bias, mean_weight, var_weight)
        y, kept, extra = backend.forward(x, parameters, Running(*running), options, extent)
        # In training the running values change, and are not used.
        constants = running if options.of_batch and not options.training else (None, None)
        ctx.save_for_backward(x, *parameters, *constants, *kept)
        ctx.options, ctx.backend, ctx.extra, ctx.extent = options, backend, extra, extent
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        parameters, running, kept = Parameters(*rest[:4]), Running(*rest[4:6]), rest[6:]
        if torch.is_grad_enabled():  # somebody is going to differentiate the gradient
            with without_autocast(dy):
                grads = _differentiable_backward(ctx, dy, x, parameters, running)
        else:
            grads = ctx.backend.backward(
                *(dy, x, parameters, kept, ctx.extra, ctx.options, ctx.needs_input_grad[0]),
                ctx.extent,
            )
        return *grads, None, None, None, None, None


def _differentiable_backward(
    ctx, dy: Tensor, x: Tensor, parameters: Parameters, running: Running
) -> list[Tensor | None]:
    """The gradients as a function of dy, x and the parameters that autograd can follow."""
    options: Options = ctx.options
    # What is differentiated are new names of the inputs. For the inputs themselves autograd would
    # go on along their own history, which may lead to one of them again: to the weight, where x
    # comes from another call of the same layer.
    inputs = [None if t is None else t.view_as(t) for t in (x, *parameters)]
    dtype = torch.promote_types(x.dtype, torch.float32)
    values = None if running.mean is None else running_values(running, dtype, options)
    # Statistics of the batch are computed again, with their gradients.
    y, *_ = composed_switch_whiten(*inputs, values, options, ctx.extent)
    needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[i]]
    found = torch.autograd.grad(y, [inputs[i] for i in needed], dy, create_graph=True)
    grads = [None] * len(inputs)
    for i, grad in zip(needed, found):
        grads[i] = grad
    return grads
