"""The launches of one signature of calls, and the memory between them.

A plan is made at the first call of its signature, and holds all that such calls have in common. Its
temporary tensors are parts of one allocation, what is kept for the backward pass is another one,
and the parameters' gradients are a third.
"""

from functools import cached_property
from itertools import compress

import torch
from torch import Tensor

from ..options import Options, Parameters, Running
from ..sync import gather_moments
from ..sync import sum_gradients as sum_over_ranks
from .batch_moments import batch_moments
from .common import map_of, summing_chunks
from .cross_moments import cross_moments, parts_of
from .input_gradient import input_gradient
from .launch import Launch, current_stream
from .mixture import CHUNKS_IN_PLACE, SLOTS
from .moments import moments
from .ranks_moments import ranks_moments
from .sum_gradients import sum_gradients
from .whiten import whiten
from .whiten_backward import whiten_backward


class Block:
    """Float32 tensors in one allocation; None in the place of those that are not needed.

    Args:
        sizes: values of each.
        needed: which of them there are.
    """

    def __init__(self, sizes: list[int], needed: list[bool]):
        self._sizes = list(compress(sizes, needed))
        self._needed = needed
        self._total = sum(self._sizes)

    def has(self, index: int) -> bool:
        return self._needed[index]

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self._total, dtype=torch.float32, device=device)

    def split(self, whole: Tensor) -> list[Tensor | None]:
        parts = iter(whole.split_with_sizes(self._sizes))
        return [next(parts) if needed else None for needed in self._needed]


class Plan:
    """Forward and backward of calls with the same shapes, strides, dtypes and options.

    Args:
        x: (N, C, H, W), contiguous or channels_last. N is 0 only where other ranks have samples.
        padded: whether calls have an extent.
    """

    def __init__(self, x: Tensor, parameters: Parameters, options: Options, padded: bool):
        self._map = map = map_of(x, options.num_pergroup)
        self._options = options
        self._padded = padded
        self._of_ranks = options.of_this_batch and options.group is not None
        n, c, matrix = map.samples, map.channels, map.channels * map.num_pergroup
        self._samples = n if options.of_sample else 1  # N'
        self._vector, self._matrix = c, matrix
        self._kept = Block(
            [n * c, n * matrix, c, matrix + 1, self._samples * c, 2 * n],
            [options.of_sample] * 2
            + [options.of_this_batch] * 2
            + [n > 0, "ln" in options.statistics],
        )
        k = len(options.statistics)
        self._gradients = Block([c, c, k, k], [p is not None for p in parameters])
        self._backward_launches: dict[tuple, tuple[Launch, ...]] = {}

        if n == 0:
            return
        self._moments = self._batch_moments = None
        number, length = 1, map.length
        separate = False
        if options.of_sample or options.of_this_batch:
            most = map.length if options.of_this_batch else CHUNKS_IN_PLACE.value
            chunks = summing_chunks(map, most)
            self._moments = moments(map, chunks)
            self._several = chunks.number > 1
            separate = self._several or not options.of_sample
            if options.of_this_batch:
                of_samples = options.of_sample and self._several
                self._batch_moments = batch_moments(map, chunks, of_samples)
            else:
                number, length = chunks.number, chunks.length
            self._temporary = Block(
                [n * c * chunks.number, n * matrix * chunks.number, c, matrix + 1],
                [separate] * 2 + [self._of_ranks] * 2,
            )
        self._separate = separate
        self._whiten = whiten(map, number, length, options)

    @cached_property
    def _ranks_moments(self) -> Launch:
        ranks = torch.distributed.get_world_size(self._options.group)
        return ranks_moments(self._map, ranks, self._options.momentum)

    def forward(
        self, x: Tensor, parameters: Parameters, running: Running, extent: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y, and the tensors that `backward` needs."""
        options, stream = self._options, current_stream(x.device)
        kept = self._kept.allocate(x.device)
        mean, cov, batch_mean, batch_cov, center, layer = self._kept.split(kept)
        y = torch.empty_like(x)
        if not len(x):
            self._combine_ranks(
                stream, kept.new_zeros(self._vector + self._matrix + 1), running, kept
            )
            return y, (kept,)

        chunk_mean, chunk_cov, packed_mean, packed_cov = mean, cov, None, None
        if self._moments is not None:
            if self._separate or self._of_ranks:
                temporary = self._temporary.allocate(x.device)
                *chunked, packed_mean, packed_cov = self._temporary.split(temporary)
                if self._separate:
                    chunk_mean, chunk_cov = chunked
            self._moments(stream, x, chunk_mean, chunk_cov, extent)
        moved, of_sample = (None, None), (None, None)
        if options.of_this_batch:
            of_batch = (packed_mean, packed_cov) if self._of_ranks else (batch_mean, batch_cov)
            combined = (mean, cov) if self._several else (None, None)
            self._batch_moments(stream, chunk_mean, chunk_cov, *of_batch, *combined, extent)
            chunk_mean, chunk_cov = mean, cov
            if self._of_ranks:
                packed = temporary[-(self._vector + self._matrix + 1) :]
                self._combine_ranks(stream, packed, running, kept)
            else:
                moved = running
        else:
            batch_mean, batch_cov = running if options.of_batch else (None, None)
            of_sample = (mean, cov) if self._separate else (None, None)
        self._whiten(
            *(stream, x, y, parameters.mean_weight, parameters.var_weight),
            *(parameters.weight, parameters.bias, chunk_mean, chunk_cov, batch_mean, batch_cov),
            *(*moved, center, *of_sample, layer, extent),
        )
        if options.of_this_batch:
            # For autograd, if it has kept the values from before for some other call.
            torch.autograd.graph.increment_version(running)
        return y, (kept,) if options.of_this_batch or not options.of_batch else (kept, *running)

    def _combine_ranks(self, stream, packed: Tensor, running: Running, kept: Tensor) -> None:
        _, _, batch_mean, batch_cov, _, _ = self._kept.split(kept)
        gathered = gather_moments(packed, self._options.group)
        self._ranks_moments(stream, gathered, batch_mean, batch_cov, *running)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        parameters: Parameters,
        kept: list[Tensor],
        needs_dx: bool,
        extent: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, None if it needs none, and of the parameters, float32."""
        options, device = self._options, x.device
        if not len(x):
            # The other ranks wait for this one.
            sum_over_ranks(kept[0].new_zeros(self._vector + self._matrix), options.group)
            return torch.empty_like(x), *map(_zeros, parameters)

        pixels = dy if dy.stride() == x.stride() else dy.flatten(2)
        key = pixels.stride(), dy.dtype, pixels.data_ptr() % 16
        if key not in self._backward_launches:
            self._backward_launches[key] = self._make_backward(dy)
        cross, through, sums, to_input = self._backward_launches[key]
        mean, cov, batch_mean, batch_cov, center, layer = self._kept.split(kept[0])
        if len(kept) > 1:
            batch_mean, batch_cov = kept[1:]
        temporary = self._backward_temporary.allocate(device)
        parts = self._backward_temporary.split(temporary)
        product, total, *gradients, iterates, sum_mean, sum_cov = parts
        matrix, _, _, of_center, of_mixed, inner = gradients
        of_parameters = self._gradients.split(self._gradients.allocate(device))
        ratios, stream = (parameters.mean_weight, parameters.var_weight), current_stream(device)

        cross(stream, pixels, x, center, product, total)
        through(
            *(stream, product, total, *ratios, parameters.weight),
            *(mean, cov, batch_mean, batch_cov, layer, *gradients, iterates),
        )
        sums(stream, *ratios, *gradients[1:], *of_parameters, sum_mean, sum_cov)
        count = dx = None
        if self._of_ranks:
            sum_over_ranks(temporary[-(self._vector + self._matrix) :], options.group)
        if options.of_this_batch and (self._of_ranks or self._padded):
            count = batch_cov[-1:]
        if needs_dx:
            dx = torch.empty_like(x)
            to_input(
                *(stream, pixels, x, dx, *ratios, matrix, center, mean, batch_mean),
                *(of_center, of_mixed, inner, layer, sum_mean, sum_cov, count, extent),
            )
        return dx, *of_parameters

    def _make_backward(self, dy: Tensor) -> tuple[Launch, ...]:
        map, options = self._map, self._options
        strides = dy.flatten(2).stride()
        parts = parts_of(map, options.of_sample)
        samples, matrices = self._samples, self._samples * map.groups
        return (
            cross_moments(map, strides, parts),
            whiten_backward(map, matrices, parts.number, options),
            sum_gradients(map, samples, options),
            input_gradient(map, strides, options),
        )

    @cached_property
    def _backward_temporary(self) -> Block:
        """Of the sums in parts, of each sample and group's gradients, scratch, of the batch's."""
        map, options, n = self._map, self._options, self._samples
        parts = parts_of(map, options.of_sample).number
        vectors, matrices = n * self._vector, n * self._matrix
        weighted = self._gradients.has(0)
        iterates = n * map.groups * max(options.num_iterations - 1, 1) * 2 * map.side**2
        return Block(
            [matrices * parts, vectors * parts]
            + [matrices, vectors, vectors, vectors, matrices, n * map.groups * 2 * SLOTS.value]
            + [iterates, self._vector, self._matrix],
            [True, True, True, weighted] + [True] * 5 + [options.of_this_batch] * 2,
        )


def _zeros(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else torch.zeros_like(parameter)
