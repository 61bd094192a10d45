"""Single launches of the Triton kernels as functions of tensors, which allocate their results."""

from typing import NamedTuple

import torch
from torch import Tensor

from helpers.kernel_cases import DEVICE
from sw_detectron.layers.mixing import Statistics
from sw_detectron.layers.options import Parameters
from sw_detectron.layers.triton import plan
from sw_detectron.layers.triton.common import Chunks, Map, map_of, summing_chunks
from sw_detectron.layers.triton.cross_moments import parts_of
from sw_detectron.layers.triton.launch import current_stream
from sw_detectron.layers.triton.mixture import SLOTS

STREAM = current_stream(torch.empty(0, device=DEVICE).device)


def empty(*shape):
    # Whatever is not written stays visible.
    return torch.full(shape, float("nan"), device=DEVICE)


def moments(x, num_pergroup, most_chunks):
    """Mean (N, g, chunks, G) and covariance (N, g, chunks, G, G), and the pixels of a chunk."""
    map = map_of(x, num_pergroup)
    chunks = summing_chunks(map, most_chunks)
    mean = empty(map.samples, map.groups, chunks.number, num_pergroup)
    cov = empty(*mean.shape, num_pergroup)
    plan.moments(map, chunks)(STREAM, x, mean, cov, None)
    return mean, cov, chunks.length


def batch_moments(chunk_mean, chunk_cov, chunk_length, length, of_samples):
    """Mean and covariance of samples or None, and mean, covariance and number of the batch."""
    n, groups, number, num_pergroup = chunk_mean.shape
    map = Map(n, groups, num_pergroup, length, (0, 0, 0))
    mean = cov = None
    if of_samples:
        mean, cov = empty(n, groups, num_pergroup), empty(n, groups, num_pergroup, num_pergroup)
    batch_mean, packed = empty(groups, num_pergroup), empty(groups * num_pergroup**2 + 1)
    plan.batch_moments(map, Chunks(0, chunk_length, number), of_samples)(
        STREAM, chunk_mean, chunk_cov, batch_mean, packed, mean, cov, None
    )
    return mean, cov, batch_mean, packed[:-1].view(groups, num_pergroup, -1), packed[-1]


def ranks_moments(gathered, running, momentum):
    """Mean, covariance and number of pixels of all ranks; running values change in place."""
    groups, num_pergroup, _ = running.mean.shape
    map = Map(1, groups, num_pergroup, 1, (0, 0, 0))
    mean, packed = empty(groups, num_pergroup), empty(groups * num_pergroup**2 + 1)
    plan.ranks_moments(map, len(gathered), momentum)(STREAM, gathered, mean, packed, *running)
    return mean, packed[:-1].view(groups, num_pergroup, -1), packed[-1:]


def whiten(x, statistics, moment_length, parameters, running, options):
    """y, the statistics of whole samples, μ̂, and with "ln" mean and variance of samples."""
    map = map_of(x, options.num_pergroup)
    y = torch.empty_like(x)
    n = map.samples if options.of_sample else 1
    center = empty(n, map.groups, map.num_pergroup)
    layer = empty(n, 2) if "ln" in options.statistics else None
    number = 1 if statistics.mean is None else statistics.mean.shape[2]
    of_sample = (None, None)
    if number > 1:
        of_sample = empty(*center.shape), empty(*center.shape, map.num_pergroup)
    plan.whiten(map, number, moment_length, options)(
        *(STREAM, x, y, parameters.mean_weight, parameters.var_weight),
        *(parameters.weight, parameters.bias, *statistics, *(running or (None, None))),
        *(center, *of_sample, layer, None),
    )
    return y, Statistics(*of_sample, *statistics[2:]), center, layer


def cross_moments(dy, x, center, of_sample):
    """D (N', g, parts, G, G) and s (N', g, parts, G)."""
    map = map_of(x, center.shape[-1])
    parts = parts_of(map, of_sample)
    pixels = dy.flatten(2)
    total = empty(*center.shape[:2], parts.number, center.shape[2])
    product = empty(*total.shape, center.shape[2])
    launch = plan.cross_moments(map, pixels.stride(), parts)
    launch(STREAM, pixels, x, center, product, total)
    return product, total


class TransformGradients(NamedTuple):
    matrix: Tensor
    weight: Tensor | None
    bias: Tensor
    center: Tensor
    mixed: Tensor
    inner: Tensor


def whiten_backward(product, total, statistics, layer, parameters, options):
    n, groups, parts, num_pergroup = total.shape
    map = Map(n, groups, num_pergroup, 1, (0, 0, 0))
    vectors = [empty(n, groups, num_pergroup) for _ in range(3)]
    matrices = [empty(n, groups, num_pergroup, num_pergroup) for _ in range(2)]
    gradients = TransformGradients(
        *(matrices[0], None if parameters.weight is None else vectors[0], *vectors[1:]),
        *(matrices[1], empty(n, groups, 2, SLOTS.value)),
    )
    plan.whiten_backward(map, n * groups, parts, options)(
        *(STREAM, product, total, parameters.mean_weight, parameters.var_weight),
        *(parameters.weight, *statistics, layer, *gradients),
        empty(n, groups, max(1, options.num_iterations - 1), 2, map.side, map.side),
    )
    return gradients


def sum_gradients(gradients, parameters, options):
    """The gradients of the parameters, and of the batch's moments, None if constants."""
    n, groups, num_pergroup = gradients.center.shape
    map = Map(n, groups, num_pergroup, 1, (0, 0, 0))
    of_parameters = Parameters(*(None if p is None else empty(*p.shape) for p in parameters))
    of_batch = (None, None)
    if options.of_this_batch:
        of_batch = empty(groups, num_pergroup), empty(groups, num_pergroup, num_pergroup)
    plan.sum_gradients(map, n, options)(
        *(STREAM, parameters.mean_weight, parameters.var_weight, *gradients[1:]),
        *(*of_parameters, *of_batch),
    )
    return of_parameters, of_batch


def input_gradient(
    dy, x, center, gradients, of_batch, statistics, layer, count, parameters, options
):
    map = map_of(x, options.num_pergroup)
    dx, pixels = torch.empty_like(x), dy.flatten(2)
    plan.input_gradient(map, pixels.stride(), options)(
        *(STREAM, pixels, x, dx, parameters.mean_weight, parameters.var_weight),
        *(gradients.matrix, center, statistics.mean, statistics.batch_mean),
        *(gradients.center, gradients.mixed, gradients.inner, layer, *of_batch, count, None),
    )
    return dx
