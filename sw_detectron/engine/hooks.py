"""What happens around each training iteration besides the step itself."""

from detectron2.engine import HookBase, hooks
from detectron2.utils.env import seed_all_rng
from torch import nn

from ..layers import SwitchWhiten2d
from ..modeling.summary import sw_layers


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


class ImagesPerSecond(HookBase):
    """Writes the throughput to the log, where it stands beside the time left, and to the storage.

    Args:
        batch_size: images of a step, over all processes.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size

    def after_step(self) -> None:
        seconds, iteration = self.trainer.storage.latest().get("time", (None, None))
        if iteration == self.trainer.iter:  # the first few iterations are not timed
            # Detectron2's printer shows what is marked so.
            name = "[metric]images_per_second"
            self.trainer.storage.put_scalar(name, self._batch_size / seconds)


class BestCheckpointer(hooks.BestCheckpointer):
    """Detectron2's, which also remembers the best value so far in the trainer's checkpoints."""

    def state_dict(self) -> dict:
        return {"best_metric": self.best_metric, "best_iter": self.best_iter}

    def load_state_dict(self, state: dict) -> None:
        self.best_metric, self.best_iter = state["best_metric"], state["best_iter"]
