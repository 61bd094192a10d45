"""Switchable Whitening as operators of the library, one each way: how it enters a compiled graph.

Composed of plain operations, a compiled layer would keep three times its input and run some 275 of
them; as an operator it keeps its input, and costs what it costs without a compiler. An operator
changes nothing in place: it returns the new running values, which the graph then copies.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from . import plain, triton
from .backend import backend_of_call
from .options import Options, Parameters, Running


def compiled_switch_whiten(
    x: Tensor, parameters: Parameters, running: Running, options: Options
) -> Tensor:
    """See `functional.switch_whiten`; x is contiguous or channels_last."""
    group = "" if options.group is None else options.group.group_name
    numbers = (",".join(options.statistics), *options[1:6], group, options.training)
    y, _, mean, cov = _whiten(x, *parameters, *running, *numbers)
    if options.of_this_batch:
        running.mean.copy_(mean.detach())
        running.cov.copy_(cov.detach())
    return y


@torch.library.custom_op("sw_detectron::switch_whiten", mutates_args=())
def _whiten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor | None,
    running_mean: Tensor,
    running_cov: Tensor,
    statistics: str,
    num_pergroup: int,
    momentum: float,
    eps: float,
    whitening: str,
    num_iterations: int,
    group: str,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, all that `backward` needs in one tensor, and the running values."""
    options = _options(
        statistics, num_pergroup, momentum, eps, whitening, num_iterations, group, training
    )
    parameters = Parameters(weight, bias, mean_weight, var_weight)
    running = Running(running_mean.clone(), running_cov.clone())
    backend = backend_of_call(x, parameters, running, options)
    y, kept, count = backend.forward(x, parameters, running, options)
    if backend is triton:
        packed = kept[0]  # the running values, behind it in evaluation, are given to the backward
    else:
        counts = [count] if isinstance(count, Tensor) else []
        packed = torch.cat([t.reshape(-1) for t in (*kept, *counts) if t is not None])
    return y, packed, *running


@_whiten.register_fake
def _(x, weight, bias, mean_weight, var_weight, running_mean, running_cov, *numbers):
    options = _options(*numbers)
    parameters = Parameters(weight, bias, mean_weight, var_weight)
    running = Running(running_mean, running_cov)
    if backend_of_call(x, parameters, running, options) is triton:
        size = triton.kept_size(x, options)
    else:
        size = sum(math.prod(shape) for shape in plain.kept_shapes(x, options) if shape)
    dtype = torch.promote_types(x.dtype, torch.float32)
    moved = torch.empty_like(running_mean), torch.empty_like(running_cov)
    return torch.empty_like(x), x.new_empty(size, dtype=dtype), *moved


@torch.library.custom_op("sw_detectron::switch_whiten_backward", mutates_args=())
def _whiten_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor | None,
    running_mean: Tensor | None,
    running_cov: Tensor | None,
    packed: Tensor,
    statistics: str,
    num_pergroup: int,
    momentum: float,
    eps: float,
    whitening: str,
    num_iterations: int,
    group: str,
    training: bool,
) -> list[Tensor]:
    """The gradients of x and of the parameters that there are."""
    options = _options(
        statistics, num_pergroup, momentum, eps, whitening, num_iterations, group, training
    )
    parameters = Parameters(weight, bias, mean_weight, var_weight)
    # In training the running values have changed since, and play no part.
    running = Running(*((packed, packed) if training else (running_mean, running_cov)))
    backend = backend_of_call(x, parameters, running, options)
    if backend is triton:
        constant = options.of_batch and not training
        kept = [packed, *running] if constant else [packed]
        extra = triton.plan_of(x, parameters, running, options)
    else:
        shapes = plain.kept_shapes(x, options)
        parts = iter(packed.split([math.prod(shape) for shape in shapes if shape]))
        kept = [None if shape is None else next(parts).view(shape) for shape in shapes]
        extra = x.shape[0] * x.shape[2] * x.shape[3]
        if group and options.of_this_batch:
            extra = kept.pop()[0]
    dx, *grads = backend.backward(dy, x, parameters, kept, extra, options, True)
    # Results of an operator may not share memory, as the parameters' gradients do.
    return [dx, *(g.clone() for g in grads if g is not None)]


@_whiten_backward.register_fake
def _(dy, x, weight, bias, mean_weight, var_weight, *_):
    present = (p for p in (x, weight, bias, mean_weight, var_weight) if p is not None)
    return [torch.empty_like(p) for p in present]


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    running = (None, None) if inputs[-1] else inputs[5:7]
    ctx.save_for_backward(*inputs[:5], *running, output[1])
    ctx.numbers = inputs[7:]


def _backward(ctx, dy, *_):
    *tensors, packed = ctx.saved_tensors
    grads = iter(_whiten_backward(dy, *tensors, packed, *ctx.numbers))
    of_inputs = [None if t is None else next(grads) for t in tensors[:5]]
    return *of_inputs, *[None] * (2 + len(ctx.numbers))


_whiten.register_autograd(_backward, setup_context=_save)


def _options(statistics: str, *numbers) -> Options:
    *some, group, training = numbers
    ranks = dist.distributed_c10d._resolve_process_group(group) if group else None
    return Options(tuple(statistics.split(",")), *some, ranks, training)
