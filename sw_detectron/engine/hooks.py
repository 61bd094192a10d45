"""What happens around each training iteration besides the step itself."""

from detectron2.engine import HookBase
from detectron2.utils.env import seed_all_rng
from torch import nn

from ..layers import SwitchWhiten2d
from ..modeling.summary import sw_layers
from .optimizer import importance_parameters


class SeedIterations(HookBase):
    """Seeds all random generators from (seed, iteration, rank) before every iteration.

    A resumed run then draws what an uninterrupted one would have drawn: augmentation, where it
    happens in the training process (DATALOADER.NUM_WORKERS 0), and the sampling of proposals.

    Args:
        seed: not negative.
        rank, world_size: of this process.
    """

    def __init__(self, seed: int, rank: int, world_size: int):
        self._seed = seed
        self._rank = rank
        self._world_size = world_size

    def before_step(self) -> None:
        seed_all_rng((self._seed + self.trainer.iter * self._world_size + self._rank) % 2**31)


class StopImportance(HookBase):
    """Ends the training of the importance weights early, as the paper does against overfitting.

    Their gradients are dropped between backward and step. The optimizer passes over a parameter
    without gradient: no decay, no momentum, and no share in a norm that gradients are clipped by.
    `DistributedDataParallel`, which waits for every parameter's gradient, gets them all.

    Register it with the trainer that runs backward, a `SimpleTrainer` or `AMPTrainer`: Detectron2's
    `DefaultTrainer` does not call `after_backward` of its own hooks.

    Args:
        model: the model in training.
        iteration: the first one, counted from 0, that leaves the importance weights as they are.
    """

    def __init__(self, model: nn.Module, iteration: int):
        self._parameters = importance_parameters(model)
        self._iteration = iteration

    def after_backward(self) -> None:
        if self.trainer.iter >= self._iteration:
            for parameter in self._parameters:
                parameter.grad = None


class ImportanceWriter(HookBase):
    """Writes the importance ratios of every SW layer to the event storage.

    They are named `sw/<layer>/<mean or cov>/<statistic>`, such as `sw/res3.0.conv2/cov/bw`.

    Args:
        model: the model in training.
        period: iterations between two records.
    """

    def __init__(self, model: nn.Module, period: int = 20):
        self._layers: dict[str, SwitchWhiten2d] = {row.name: row.layer for row in sw_layers(model)}
        self._period = period

    def after_step(self) -> None:
        next_iter = self.trainer.iter + 1
        if next_iter % self._period and next_iter != self.trainer.max_iter:
            return
        for name, layer in self._layers.items():
            for kind, ratios in layer.importance().items():
                scalars = {f"sw/{name}/{kind}/{k}": ratio for k, ratio in ratios.items()}
                self.trainer.storage.put_scalars(**scalars, smoothing_hint=False)
