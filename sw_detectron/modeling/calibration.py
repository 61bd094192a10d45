"""Exact statistics of norms' inputs: for SW's running values, and for norms that have none.

Shape shorthand in this module:
    N: images;  C: channels;  H, W: height, width
    g: channel groups;  G: channels in a group;  C = g * G

All moments are biased (divided by the number of pixels), in float64, and pooled: over every pixel
of every image of every rank, whatever the images' sizes and however they are cut into batches.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from torch import Tensor, nn
from tqdm import tqdm

from ..errors import UserError
from ..layers import SwitchWhiten2d, plain
from .observing import in_evaluation, observed

logger = logging.getLogger(__name__)

# As the model takes them: images (N, 3, H, W), a list of Detectron2's inputs, or a dict of tensors
# whose first dimension is N, as a classifier's.
Batch = Tensor | Sequence[dict] | Mapping[str, Tensor]

# By name: a norm, which has `num_features` (C), and the G of its input's covariance.
Layers = dict[str, tuple[nn.Module, int]]


class Moments(NamedTuple):
    """Mean (C,) and covariance (g, G, G), float64."""

    mean: Tensor
    cov: Tensor


class PooledMoments:
    """Collects the moments of the inputs (N, C, H, W) of layers, for as long as it is entered.

    A layer that is called several times in a forward pass, such as one of a head shared by the
    levels of a feature pyramid, has the pixels of all calls pooled.
    """

    def __init__(self, layers: Layers):
        self._layers = layers
        self._pools = {name: _Pool(*layer) for name, layer in layers.items()}
        modules = {name: module for name, (module, _) in layers.items()}
        self._observed = observed(modules, lambda name, x, _: self._pools[name].add_images(x))

    def __enter__(self) -> "PooledMoments":
        self._observed.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._observed.__exit__(*error)

    def result(self) -> dict[str, Moments]:
        """The moments by name, without the layers that no pixel reached on any rank.

        Every rank has to call it, and gets the same bits. One collective.
        """
        pools = self._pools
        if comm.get_world_size() > 1:
            pools = _over_ranks(pools, self._layers)
        return {
            name: Moments(pool.mean.flatten(), pool.cov)
            for name, pool in pools.items()
            if pool.count
        }


class _Pool:
    """The moments of a growing set of pixels: count, mean (g, G) and covariance (g, G, G)."""

    def __init__(self, layer: nn.Module, num_pergroup: int):
        self._layer = layer
        num_groups = layer.num_features // num_pergroup
        self.count = 0
        self.mean = torch.zeros(
            num_groups, num_pergroup, dtype=torch.float64, device=_any_tensor(layer).device
        )
        self.cov = self.mean.new_zeros(num_groups, num_pergroup, num_pergroup)

    def add_images(self, x: Tensor) -> None:
        """Add the pixels of x (N, C, H, W) that the layer takes statistics of."""
        if not x.numel():
            return
        extent = self._layer.extent(x) if isinstance(self._layer, SwitchWhiten2d) else None
        size = self.mean.shape[1]
        for i, image in enumerate(x.detach().split(1)):  # one at a time, for float64 doubles them
            own = None if extent is None else extent.of_sample(i)
            count = image.shape[2] * image.shape[3] if own is None else sum(own.pixels)
            mean, cov = plain.moments(image.double(), size, diagonal=False, extent=own)
            self.add(count, mean[0], cov[0])

    def add(self, count: int, mean: Tensor, cov: Tensor) -> None:
        """Unite with another set, by Chan, Golub and LeVeque's update of centred moments."""
        if not count:
            return
        self.count += count
        share = count / self.count
        offset = mean - self.mean
        between = offset[..., :, None] * offset[..., None, :]
        self.mean = self.mean + share * offset
        self.cov = (1 - share) * self.cov + share * cov + share * (1 - share) * between

    def pack(self) -> Tensor:
        return torch.cat(
            [self.mean.new_tensor([self.count]), self.mean.flatten(), self.cov.flatten()]
        )

    def add_packed(self, packed: Tensor) -> None:
        count, mean, cov = packed.split([1, self.mean.numel(), self.cov.numel()])
        self.add(int(count.item()), mean.view_as(self.mean), cov.view_as(self.cov))


def _over_ranks(pools: dict[str, _Pool], layers: Layers) -> dict[str, _Pool]:
    # Gathered rather than summed, as in layers.sync; gloo has no all_gather_into_tensor.
    parts = [pool.pack() for pool in pools.values()]
    packed = torch.cat(parts)
    gathered = [torch.empty_like(packed) for _ in range(comm.get_world_size())]
    dist.all_gather(gathered, packed)
    united = {name: _Pool(*layer) for name, layer in layers.items()}
    for of_rank in gathered:
        for pool, part in zip(united.values(), of_rank.split([len(part) for part in parts])):
            pool.add_packed(part)
    return united


@torch.no_grad()
def input_moments(
    model: nn.Module,
    layers: Layers,
    batches: Iterable[Batch],
    num_images: int,
    progress: str = "",
) -> dict[str, Moments]:
    """Moments of the inputs of `layers`, pooled over the first images of all ranks.

    The model runs in the mode it is in. In evaluation mode the result does not depend on how the
    images are cut into batches, and ranks may have different numbers of images, or none. (In
    training mode synchronized layers want equally many batches on every rank.)

    Args:
        model: called as `model(batch)`; what it returns is ignored.
        layers: norms inside the model, each with the size G of its covariance's groups.
        batches: of any sizes; tensors are taken to the device and dtype of the model.
        num_images: how many images to use, of this rank; the last batch is cut.
        progress: the name of a progress bar that counts images; none if empty.

    Returns:
        By name, mean (C,) and covariance (g, G, G), equal on all ranks. A layer that no pixel
        reached is left out, with a warning.

    Raises:
        UserError: there is no image at all, or the model does not take tensors.
    """
    return _run(model, layers, _first_images(batches, num_images, progress))


def calibrate(model: nn.Module, batches: Iterable[Batch], num_images: int) -> None:
    """Set the running values of all SW layers with batch statistics ("bw", "bn"), in one run.

    The SW layers run as in training: every batch is whitened by its own statistics, over all ranks
    where the layer is synchronized, so that deep layers see what they see in training. All else is
    in evaluation mode. The running values become the moments of all images, whatever they were;
    a diagonal set gets the diagonal of `running_cov` alone, and a frozen layer keeps its values.
    Nothing else changes, the modes of the modules included.

    Args:
        model, batches, num_images: see `input_moments`. Ranks may have different numbers of
            batches, or none, if these are tensors.

    Raises:
        UserError: there is no image, or ranks have different numbers of batches of another kind.
    """
    layers = calibrated_layers(model)
    if not layers:
        logger.info("No layer to calibrate: none takes statistics of the batch, or all are frozen.")
        return
    with in_evaluation(model), _running_values_restored(layers):
        for layer, _ in layers.values():
            layer.train()
        moments = _run(model, layers, _in_step(_first_images(batches, num_images)))
    for name, (mean, cov) in moments.items():
        set_running_values(layers[name][0], mean, cov)


def calibrated_layers(model: nn.Module) -> Layers:
    """The SW layers that take statistics of the batch and are not frozen, by module name."""
    return {
        name: (module, module.num_pergroup)
        for name, module in model.named_modules()
        if isinstance(module, SwitchWhiten2d) and module.uses_batch and not module.frozen
    }


@torch.no_grad()
def set_running_values(layer: SwitchWhiten2d, mean: Tensor, cov: Tensor) -> None:
    """Overwrite the running values, of a diagonal set only the diagonal of `running_cov`.

    Args:
        mean: (C,).
        cov: (g, G, G).
    """
    layer.running_mean.copy_(mean.view_as(layer.running_mean))
    if layer.whitens:
        layer.running_cov.copy_(cov)
    else:
        layer.running_cov.diagonal(dim1=-2, dim2=-1).copy_(cov.diagonal(dim1=-2, dim2=-1))


@torch.no_grad()
def unfuse(
    model: nn.Module, layers: Layers, batches: Iterable[Batch], num_images: int
) -> dict[str, Moments]:
    """Let norms know the statistics of their inputs, without changing what the network computes.

    For BN whose statistics were folded into its scale and bias (running mean 0, variance 1), as in
    Detectron2's MSRA R-50.pkl. In one run in evaluation mode the mean μ and variance σ² of each
    layer's input are found; a layer that computes s x + b then gets

        weight = s √(σ² + ε),  bias = b + s μ,  running_mean = μ,  running_var = σ².

    Args:
        model, batches, num_images: see `input_moments`.
        layers: affine BatchNorm2d, FrozenBatchNorm2d or the like, changed in place, each with the
            size G of its covariance's groups.

    Returns:
        The moments, by name, for a norm that takes the layer's place and wants the covariance.

    Raises:
        UserError: there is no image.
    """
    with in_evaluation(model):
        moments = input_moments(model, layers, batches, num_images)
    for name, (mean, cov) in moments.items():
        layer = layers[name][0]
        scale = layer.weight.double() * (layer.running_var.double() + layer.eps).rsqrt()
        bias = layer.bias.double() - scale * layer.running_mean.double()
        variance = cov.diagonal(dim1=-2, dim2=-1).flatten()
        layer.weight.copy_(scale * (variance + layer.eps).sqrt())
        layer.bias.copy_(bias + scale * mean)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
    return moments


@torch.no_grad()
def _run(model: nn.Module, layers: Layers, batches: Iterable[Batch]) -> dict[str, Moments]:
    like = _any_tensor(model)
    with PooledMoments(layers) as pooled:
        for batch in batches:
            if isinstance(batch, Tensor):
                _check_takes_tensors(model)
                batch = batch.to(like)
            model(batch)
    moments = pooled.result()
    if layers and not moments:
        raise UserError("there is no image to take statistics of: give at least one")
    for name in layers.keys() - moments.keys():
        logger.warning(f"No pixel reached {name}: it has no statistics.")
    return moments


def _check_takes_tensors(model: nn.Module) -> None:
    architecture = getattr(model, "module", model)  # without DistributedDataParallel
    if any(type(architecture) is known for _, known in META_ARCH_REGISTRY):
        raise UserError(
            f"{type(architecture).__name__} takes what its data loader gives, not images as a "
            "tensor: give that, or calibrate its backbone, with normalized images"
        )


def _first_images(batches: Iterable[Batch], num_images: int, progress: str = "") -> Iterator[Batch]:
    used = 0
    hidden = not progress or not comm.is_main_process()
    with tqdm(total=num_images, desc=progress, unit="image", disable=hidden) as bar:
        for batch in batches:
            rest = slice(num_images - used)
            if isinstance(batch, Mapping):
                batch = {key: value[rest] for key, value in batch.items()}
                number = len(next(iter(batch.values())))
            else:
                batch = batch[rest]
                number = len(batch)
            yield batch
            used += number
            bar.update(number)
            if used >= num_images:
                return
    logger.warning(f"Statistics are of {used} images; {num_images} were asked for.")


def _in_step(batches: Iterable[Batch]) -> Iterator[Batch]:
    """As many batches on every rank: one that has run out goes on with batches of no image.

    A synchronized layer waits for all ranks at every batch.
    """
    if comm.get_world_size() == 1:
        yield from batches
        return
    batches = iter(batches)
    while True:
        batch = next(batches, None)
        shape = batch.shape[1:] if isinstance(batch, Tensor) else ()
        shapes = comm.all_gather(None if batch is None else tuple(shape))
        if all(shape is None for shape in shapes):
            return
        if None in shapes and () in shapes:
            raise UserError("ranks have different numbers of batches: give each equally many")
        if batch is None:
            batch = torch.empty(0, *next(shape for shape in shapes if shape is not None))
        yield batch


@contextmanager
def _running_values_restored(layers: Layers) -> Iterator[None]:
    buffers = [buffer for layer, _ in layers.values() for buffer in layer.buffers()]
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)


def _any_tensor(module: nn.Module) -> Tensor:
    """A parameter or buffer, for the device and dtype that the module works in."""
    return next(itertools.chain(module.parameters(), module.buffers()))
