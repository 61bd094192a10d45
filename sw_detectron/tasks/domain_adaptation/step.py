"""One iteration of adversarial training: source with labels, target without, and a discriminator.

Tsai et al. (CVPR 2018), section 4, with one level. The segmentation network learns from the labels
of the source, and to make the discriminator take its predictions on the target for those of the
source; the discriminator learns to tell them apart.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from detectron2.engine import SimpleTrainer, TrainerBase
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

SOURCE, TARGET = 0.0, 1.0
"""What the discriminator says of the two domains."""


class AdversarialStep(TrainerBase):
    """See `engine.step`.

    Source and target pass the network one after the other, each with batch statistics of its own,
    and so does the discriminator see them.

    Args:
        model: an `AdaptedSegmentor`, perhaps in DistributedDataParallel.
        discriminator: perhaps in DistributedDataParallel.
        loaders: of batches of the source, with labels, and of the target; see `SupervisedStep`.
        optimizers: of both networks.
        images_per_step: of each domain, over all processes.
        adversarial_weight: the factor of the adversarial loss.
        target_statistics: whether running values are those of the target alone, not of both.
        mixed_precision: on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        discriminator: nn.Module,
        loaders: tuple[Iterable, Iterable],
        optimizers: tuple[Optimizer, Optimizer],
        *,
        images_per_step: int,
        adversarial_weight: float,
        target_statistics: bool = False,
        mixed_precision: bool = False,
    ):
        super().__init__()
        model.train()
        self.model = model
        self.discriminator = discriminator
        self.optimizers = dict(zip(("optimizer", "discriminator"), optimizers))
        self._loaders = loaders
        self._batches: list[Iterator] = []
        self._images_per_step = images_per_step
        self._weight = adversarial_weight
        self._target_statistics = target_statistics
        self._mixed_precision = mixed_precision
        self._scaler = torch.amp.GradScaler("cuda", enabled=mixed_precision)

    def continue_from(self, iteration: int) -> None:
        for loader in self._loaders:
            loader.resumable_sampler.start = iteration * self._images_per_step

    def run_step(self) -> None:
        if not self._batches:
            self._batches = [iter(loader) for loader in self._loaders]
        started = time.perf_counter()
        source, target = (next(batches) for batches in self._batches)
        data_time = time.perf_counter() - started
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, enabled=self._mixed_precision):
            losses, of_source, of_target = self._segmentation_losses(source, target)
            loss_d, accuracy = self._discriminator_loss(of_source, of_target)
        self.after_backward()
        for optimizer in self.optimizers.values():
            self._scaler.step(optimizer)
        self._scaler.update()
        SimpleTrainer.write_metrics(losses, data_time, self.iter)
        _record({"loss_d": loss_d, "discriminator_accuracy": accuracy}, self.iter)

    def _segmentation_losses(
        self, source: list[dict], target: list[dict]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Gradients of the segmentation network alone; and its logits, detached."""
        with running_values_kept(self.model) if self._target_statistics else nullcontext():
            losses, of_source = self.model(source, with_logits=True)
        self._scaler.scale(losses["loss_seg"]).backward()
        _, of_target = self.model(target, with_logits=True)
        # The network inside of DistributedDataParallel: it has no gradients to exchange here.
        critic = _inner(self.discriminator)
        critic.requires_grad_(False)
        loss_adv = self._weight * domain_loss(critic(of_target), SOURCE)
        self._scaler.scale(loss_adv).backward()
        critic.requires_grad_(True)
        losses = {"loss_seg": losses["loss_seg"], "loss_adv": loss_adv}
        return losses, of_source.detach(), of_target.detach()

    def _discriminator_loss(self, of_source: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the discriminator; its loss, and the share of patches it tells right."""
        total, right = 0, 0
        for logits, domain in ((of_source, SOURCE), (of_target, TARGET)):
            said = self.discriminator(logits)
            loss = domain_loss(said, domain) / 2
            self._scaler.scale(loss).backward()
            total = total + loss.detach()
            right = right + ((said > 0) == (domain == TARGET)).float().mean() / 2
        return total, right

    def state_dict(self) -> dict:
        optimizers = {name: o.state_dict() for name, o in self.optimizers.items()}
        return super().state_dict() | {
            "optimizers": optimizers,
            "discriminator": _inner(self.discriminator).state_dict(),
            "grad_scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        if "optimizers" not in state:  # a run on the source alone has come so far
            self.optimizers["optimizer"].load_state_dict(state["optimizer"])
            return
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        _inner(self.discriminator).load_state_dict(state["discriminator"])
        if state["grad_scaler"] and self._mixed_precision:
            self._scaler.load_state_dict(state["grad_scaler"])


def domain_loss(said: Tensor, domain: float) -> Tensor:
    """The mean binary cross-entropy of the discriminator's logits with one domain for all."""
    return F.binary_cross_entropy_with_logits(said, torch.full_like(said, domain))


@contextmanager
def running_values_kept(model: nn.Module) -> Iterator[None]:
    """Norms do not take a batch into their running values: its share is 0."""
    norms = [m for m in model.modules() if hasattr(m, "running_mean") and hasattr(m, "momentum")]
    shares = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, share in zip(norms, shares):
            norm.momentum = share


def _record(values: dict[str, Tensor], iteration: int) -> None:
    """Write means over the processes to the storage.

    Raises:
        FloatingPointError: on the main process, one is not finite.
    """
    means = {name: float(value) for name, value in comm.reduce_dict(values).items()}
    if not comm.is_main_process():
        return
    if not all(map(math.isfinite, means.values())):
        raise FloatingPointError(f"Loss became infinite or NaN at iteration={iteration}! {means}")
    get_event_storage().put_scalars(**means)


def _inner(network: nn.Module) -> nn.Module:
    return network.module if isinstance(network, DistributedDataParallel) else network
