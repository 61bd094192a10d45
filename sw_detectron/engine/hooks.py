"""What happens around each training iteration besides the step itself."""

import itertools
import logging
import math
import os
from collections.abc import Iterable

import torch
from detectron2.engine import HookBase, hooks
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from ..checkpoint.reading import read_file
from ..layers import SwitchWhiten2d
from ..modeling.calibration import PooledMoments, calibrated_layers, set_running_values
from ..modeling.summary import sw_layers
from .optimizer import importance_parameters

logger = logging.getLogger(__name__)


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


class PreciseStats(HookBase):
    """Replaces the running values of SW and BN by the statistics of many batches at fixed weights.

    For SW they are the exact moments over all pixels of all batches and ranks; for BN, what
    Detectron2's PreciseBN finds, in the same run. The model is in training mode meanwhile, frozen
    layers keep their values, and the losses are thrown away.

    It runs when an evaluation is due, and after the last iteration. Every time it reads the data
    from the start, so that a resumed run finds the same as an uninterrupted one.

    Args:
        period: iterations between two evaluations; 0 for one at the end.
        model: the model in training.
        data_loader: training batches; not the loader that training reads, which would miss them.
        num_iter: how many batches to take.
    """

    def __init__(self, period: int, model: nn.Module, data_loader: Iterable, num_iter: int):
        self._period = period
        self._model = model
        self._data_loader = data_loader
        self._num_iter = num_iter

    def after_step(self) -> None:
        next_iter = self.trainer.iter + 1
        is_final = next_iter == self.trainer.max_iter
        if is_final or (self._period > 0 and next_iter % self._period == 0):
            self._update()

    @torch.no_grad()
    def _update(self) -> None:
        layers = calibrated_layers(self._model)
        logger.info(f"Precise statistics of {len(layers)} SW layers: {self._num_iter} batches ...")
        batches = itertools.islice(self._data_loader, self._num_iter)
        progress = "tqdm" if comm.is_main_process() else None
        with PooledMoments(layers) as pooled, EventStorage():  # whose events nobody reads
            if get_bn_modules(self._model):
                update_bn_stats(self._model, batches, self._num_iter, progress)
            else:
                for batch in tqdm(batches, total=self._num_iter, disable=progress is None):
                    self._model(batch)
        for name, (mean, cov) in pooled.result().items():
            set_running_values(layers[name][0], mean, cov)


class OtherSchedules(HookBase):
    """Steps the learning rates of a step's further optimizers, and records them as `lr_<name>`.

    Args:
        schedules: by the optimizer's name.
    """

    def __init__(self, schedules: dict[str, LRScheduler]):
        self._schedules = schedules

    def after_step(self) -> None:
        for name, schedule in self._schedules.items():
            lr = schedule.optimizer.param_groups[0]["lr"]
            self.trainer.storage.put_scalar(f"lr_{name}", lr, smoothing_hint=False)
            schedule.step()

    def state_dict(self) -> dict:
        return {name: schedule.state_dict() for name, schedule in self._schedules.items()}

    def load_state_dict(self, state: dict) -> None:
        for name, schedule in self._schedules.items():
            if name in state:
                schedule.load_state_dict(state[name])


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
    """Detectron2's, which knows the best value so far when a run is resumed.

    The file with the best weights has it beside them. The trainer's checkpoints have it too, but
    the last one of a run is written before its last evaluation.
    """

    def before_train(self) -> None:
        if self.trainer.start_iter == 0:
            return
        path = os.path.join(self._checkpointer.save_dir, f"{self._file_prefix}.pth")
        if not os.path.isfile(path):
            self.best_metric = self.best_iter = None
            return
        best = read_file(path).get("best", {})
        # What was found after the iteration that the run goes back to is void.
        if best.get("metric") == self._val_metric and best["iteration"] <= self.trainer.start_iter:
            self.best_metric, self.best_iter = best["value"], best["iteration"]

    def _best_checking(self) -> None:
        value, iteration = self.trainer.storage.latest().get(self._val_metric, (math.nan, None))
        said = f"{self._val_metric} {value:.5f}"
        if not math.isfinite(value):
            logger.warning(f"{said} is not finite, or was not measured: no best checkpoint of it")
        elif self.best_metric is not None and not self._compare(value, self.best_metric):
            logger.info(f"{said} is not better than the {self.best_metric:.5f} of before")
        else:
            self.best_metric, self.best_iter = value, iteration
            best = {"metric": self._val_metric, "value": value, "iteration": iteration}
            done = self.trainer.results_iterations
            self._checkpointer.save(self._file_prefix, iteration=done - 1, best=best)
            logger.info(f"{said} is the best so far: {self._file_prefix}.pth")

    def state_dict(self) -> dict:
        return {"best_metric": self.best_metric, "best_iter": self.best_iter}

    def load_state_dict(self, state: dict) -> None:
        self.best_metric, self.best_iter = state["best_metric"], state["best_iter"]
