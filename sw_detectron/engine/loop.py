"""The iterations of a run, with their hooks, checkpoints and page, for every kind of config."""

import inspect
import logging
import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.engine import HookBase, TrainerBase, default_writers, hooks
from detectron2.engine.defaults import create_ddp_model
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from fvcore.common.param_scheduler import ParamScheduler
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ..analysis.metrics import START_ITERATION, START_TIME
from ..checkpoint import Checkpointer
from ..errors import UserError, one_line
from ..modeling.calibration import calibrated_layers
from ..modeling.summary import sw_layers, warn_of_shared_layers
from ..report import write_page
from .continuation import continuing, differences, parameter_names, run_facts
from .hooks import ImportanceWriter, OtherSchedules, PreciseStats, SeedIterations, StopImportance

logger = logging.getLogger(__name__)


def _is_no_mistake(record: logging.LogRecord) -> bool:
    """Whether a record is no traceback of what ends in one line on standard error anyway."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, (UserError, FloatingPointError))


logging.getLogger(TrainerBase.__module__).addFilter(_is_no_mistake)


@dataclass(frozen=True)
class RunSettings:
    """What a run is told beside its model, data and optimizer.

    Attributes:
        output_dir: for all that the run writes.
        weights: a file to start from; empty for none.
        max_iter: iterations.
        checkpoint_options: arguments of `PeriodicCheckpointer`; `period` is in iterations.
        eval_period: iterations; 0 for one evaluation at the end.
        seed: of every iteration; negative for none.
        importance_stop_iter: the first iteration that leaves the importance weights as they are; 0
            if they always learn.
        precise_iters: batches for precise statistics; 0 for none.
        config: all keys, as text for the page.
        keys: the config, whose differences are warned of when the run is resumed.
    """

    output_dir: str
    weights: str
    max_iter: int
    checkpoint_options: Mapping
    eval_period: int = 0
    seed: int = -1
    importance_stop_iter: int = 0
    precise_iters: int = 0
    config: str = ""
    keys: Mapping = field(default_factory=dict)


class Loop(TrainerBase):
    """Trains by a step, see `step`; evaluates, saves, and ends with a page about the run.

    Args:
        step: what an iteration does.
        schedules: of the learning rates of its optimizers, by their names; the first may be one of
            fvcore's, which multiplies them.
        settings: of the run.
        evaluate: returns the results of an evaluation; empty but on the main process.
        precise_loader: makes the loader of the batches for precise statistics.
        page_sections: makes what the page shows beside what it shows of every run.
    """

    def __init__(
        self,
        step: TrainerBase,
        schedules: dict[str, LRScheduler | ParamScheduler],
        settings: RunSettings,
        evaluate: Callable[[], OrderedDict],
        precise_loader: Callable[[], Iterable],
        page_sections: Callable[[], dict[str, str]],
    ):
        TrainerBase.__init__(self)  # not DefaultTrainer's, which a subclass has too
        self._trainer = step
        self.schedules = schedules
        self.settings = settings
        self.checkpointer = Checkpointer(
            step.model,
            settings.output_dir,
            cfg=settings.keys if isinstance(settings.keys, CfgNode) else None,
            trainer=weakref.proxy(self),
        )
        self.start_iter = 0
        self.max_iter = settings.max_iter
        self._evaluate = evaluate
        self._precise_loader = precise_loader
        self._page_sections = page_sections
        self._facts = run_facts(settings.keys)
        self._start_time = time.time()
        self.results = OrderedDict()  # of the last evaluation; empty but on the main process
        self.results_iterations = 0  # for how many iterations the model was trained by then
        if settings.importance_stop_iter:
            # Of the step, which alone calls `after_backward`.
            step.register_hooks([StopImportance(step.model, settings.importance_stop_iter)])
        self.register_hooks(self.build_hooks())
        for row in sw_layers(self.model):
            row.layer.name = row.name
        warn_of_shared_layers(self.model)

    @property
    def model(self) -> nn.Module:
        return self._trainer.model

    def build_hooks(self) -> list[HookBase | None]:
        return list(self.named_hooks().values())

    def named_hooks(self) -> dict[str, HookBase | None]:
        """What happens around the steps, in this order; None where this process has no part in it.

        Precise statistics come before the checkpoint, which is to have them, and the checkpoint
        before the evaluation, so that it is there if that fails. The writers come last of those
        that record anything. What all processes do together is in the same order in all of them.
        """
        settings, model = self.settings, self.model
        main = comm.is_main_process()
        (name, schedule), *others = self.schedules.items()
        return {
            "timer": hooks.IterationTimer(),
            "schedule": hooks.LRScheduler(self._trainer.optimizers[name], schedule),
            "other_schedules": OtherSchedules(dict(others)) if others else None,
            "importance": ImportanceWriter(model),
            "precise_stats": self._precise_stats(),
            "checkpoint": hooks.PeriodicCheckpointer(
                self.checkpointer, **settings.checkpoint_options
            )
            if main
            else None,
            "evaluation": hooks.EvalHook(settings.eval_period, self._evaluate_and_keep),
            "writers": hooks.PeriodicWriter(self.build_writers(), period=20) if main else None,
            "seed": SeedIterations(settings.seed, comm.get_rank(), comm.get_world_size())
            if settings.seed >= 0
            else None,
        }

    def build_writers(self) -> list:
        return default_writers(self.settings.output_dir, self.max_iter)

    def _precise_stats(self) -> PreciseStats | None:
        settings = self.settings
        if not settings.precise_iters:
            return None
        if not (get_bn_modules(self.model) or calibrated_layers(self.model)):
            logger.info("Precise statistics: no layer of the model takes any of the batch.")
            return None
        loader = self._precise_loader()
        return PreciseStats(settings.eval_period, self.model, loader, settings.precise_iters)

    def _evaluate_and_keep(self) -> OrderedDict:
        self.results = self._evaluate()
        self.results_iterations = min(self.iter + 1, self.max_iter)  # it ends at or above that
        return self.results

    def resume_or_load(self, resume: bool = True) -> None:
        """Resume from the last checkpoint if asked to and there is one, else load the weights."""
        self.checkpointer.resume_or_load(self.settings.weights, resume=resume)
        if resume and self.checkpointer.has_checkpoint():
            self.start_iter = self.iter + 1  # the checkpoint has the iteration that was done
        if self.start_iter > self.max_iter:
            logger.warning(
                f"The checkpoint has done {self.start_iter} iterations, more than the "
                f"{self.max_iter} of this run: nothing is left to train"
            )
            self.max_iter = self.start_iter
        self._trainer.continue_from(self.start_iter)

    def train(self) -> OrderedDict:
        """Train, evaluate, and write OUTPUT_DIR/report.html.

        Returns:
            `results`.

        Raises:
            UserError: a loss is not finite. There is a page then too.
        """
        try:
            TrainerBase.train(self, self.start_iter, self.max_iter)
        except FloatingPointError as error:
            self._write_page()
            raise UserError(self._divergence(error)) from None
        self._write_page()
        return self.results

    def _divergence(self, error: FloatingPointError) -> str:
        told = re.sub(r"np\.float\d+\((\S+?)\)", r"\1", one_line(error)).rstrip(".")
        loss, last = self.storage.latest().get("total_loss", (float("nan"), "none"))
        return (
            f"iteration {self._trainer.iter}: {told}; the last finite total_loss was {loss:.5g}, "
            f"in iteration {last}; lower the learning rate, lengthen its warm-up, clip gradients "
            "or train without mixed precision; the checkpoints so far are in "
            f"{self.settings.output_dir!r}"
        )

    def after_train(self) -> None:
        if self.iter < self.max_iter:  # an error ended it
            # Detectron2's hooks take one in the last iteration for the end, and would evaluate.
            self.iter = min(self.iter, self.max_iter - 2)
        TrainerBase.after_train(self)

    def _write_page(self) -> None:
        if not comm.is_main_process():
            return
        # The folder may have predictions of an earlier run.
        has_sections = self.results or self.iter >= self.max_iter
        try:
            path = write_page(
                Path(self.settings.output_dir),
                self.model,
                self.results,
                self.settings.config,
                self._page_sections() if has_sections else {},
            )
        except Exception as error:  # the training is done, and must not fail now
            logger.warning(f"No page of the run: {type(error).__name__}: {error}")
        else:
            logger.info(f"Page of the run: {path}")

    def run_step(self) -> None:
        self.storage.put_scalar(START_ITERATION, self.start_iter, smoothing_hint=False)
        self.storage.put_scalar(START_TIME, self._start_time, smoothing_hint=False)
        self._trainer.iter = self.iter
        self._trainer.run_step()

    def state_dict(self) -> dict:
        parameters = parameter_names(self.model, self._trainer.optimizers)
        return TrainerBase.state_dict(self) | {
            "_trainer": self._trainer.state_dict(),
            "run": {"facts": self._facts, "parameters": parameters},
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a checkpoint, with the optimizers' options and the schedules of this run; from
        one that carries no "run", with those that it has."""
        if "run" not in state:
            TrainerBase.load_state_dict(self, state)
            self._trainer.load_state_dict(state["_trainer"])
            return
        first = state["iteration"] + 1
        for line in differences(state["run"]["facts"], self._facts, first):
            logger.warning(line)
        rates = {name: getattr(s, "base_lrs", None) for name, s in self.schedules.items()}
        TrainerBase.load_state_dict(self, state)
        with continuing(self.model, self._trainer.optimizers, state["run"]["parameters"]):
            self._trainer.load_state_dict(state["_trainer"])
        for name, schedule in self.schedules.items():
            if rates[name] is not None:
                schedule.base_lrs = rates[name]
            if isinstance(schedule, LRMultiplier) and schedule.last_epoch <= self.max_iter:
                for group, rate in zip(schedule.optimizer.param_groups, schedule.get_lr()):
                    group["lr"] = rate


def to_parallel(model: nn.Module, device: str, **options) -> nn.Module:
    """The model in DistributedDataParallel, if there are several processes.

    Args:
        device: the config's; Detectron2 would give a CPU's model the device of a GPU.
        options: arguments of DistributedDataParallel.
    """
    if device == "cpu":
        options["device_ids"] = None
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    if renamed and "broadcast_buffers" in options:
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")
    return create_ddp_model(model, **options)
