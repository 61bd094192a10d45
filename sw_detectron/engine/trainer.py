"""Detectron2's default trainer, made for SW, for interruptions, and for machines without GPU."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.engine import DefaultTrainer, TrainerBase
from detectron2.evaluation import DatasetEvaluator
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.utils import comm
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..data.sampler import build_resumable_train_loader
from ..errors import UserError
from ..modeling.summary import sw_table
from ..task import find_task
from .evaluators import build_evaluator
from .loop import Loop, RunSettings, to_parallel
from .optimizer import build_lr_scheduler, build_optimizer
from .step import MixedPrecisionStep, SupervisedStep
from .values import check_batch, named_by_key

logger = logging.getLogger(__name__)


class Trainer(Loop, DefaultTrainer):
    """The `DefaultTrainer` of `tools/train_net.py`.

    Beyond Detectron2's: prints the SW layers, trains their parameters by the keys of SOLVER that
    are theirs, records their importance ratios, gives them precise statistics with
    TEST.PRECISE_BN, writes checkpoints whole or not at all, continues the sequence of training
    images on resuming, and ends with a page about the run. If SEED is not negative,
    DATALOADER.NUM_WORKERS is 0 and DATALOADER.ASPECT_RATIO_GROUPING is off, a resumed run is equal
    to an uninterrupted one; with workers, or with images grouped by shape, it sees other
    augmentations and another grouping of the same images.

    A task overrides what it has of its own: `build_step`, the loaders, `named_hooks`, ….
    """

    def __init__(self, cfg: CfgNode):
        cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        check_batch(cfg)
        self.cfg = cfg
        with named_by_key(cfg):
            model = self.build_model(cfg)
            step = self.build_step(cfg, model)
            schedules = self.build_schedules(cfg, step)
            precise = cfg.TEST.PRECISE_BN
            super().__init__(
                step,
                schedules,
                RunSettings(
                    output_dir=cfg.OUTPUT_DIR,
                    weights=cfg.MODEL.WEIGHTS,
                    max_iter=cfg.SOLVER.MAX_ITER,
                    checkpoint_options={"period": cfg.SOLVER.CHECKPOINT_PERIOD},
                    eval_period=cfg.TEST.EVAL_PERIOD,
                    seed=cfg.SEED,
                    importance_stop_iter=cfg.SOLVER.IMPORTANCE_STOP_ITER,
                    precise_iters=precise.NUM_ITER if precise.ENABLED else 0,
                    config=cfg.dump(),
                    keys=cfg,
                ),
                evaluate=lambda: self.test(cfg, self.model),
                precise_loader=self._build_precise_loader,
                page_sections=lambda: find_task(cfg).page_sections(
                    cfg, cfg.DATASETS.TEST, Path(cfg.OUTPUT_DIR)
                ),
            )

    @classmethod
    def build_step(cls, cfg: CfgNode, model: nn.Module) -> TrainerBase:
        """What an iteration does with the model, see `step`."""
        optimizer = cls.build_optimizer(cfg, model)
        data_loader = cls.build_train_loader(cfg)
        parallel = to_parallel(model, cfg.MODEL.DEVICE, broadcast_buffers=False)
        step_class = MixedPrecisionStep if cfg.SOLVER.AMP.ENABLED else SupervisedStep
        return step_class(parallel, data_loader, optimizer, cfg.SOLVER.IMS_PER_BATCH)

    @classmethod
    def build_schedules(cls, cfg: CfgNode, step: TrainerBase) -> dict[str, LRScheduler]:
        """Of each of the step's optimizers, by its name."""
        return {
            name: cls.build_lr_scheduler(cfg, optimizer)
            for name, optimizer in step.optimizers.items()
        }

    def _build_precise_loader(self) -> Iterable:
        cfg = self.cfg.clone()
        cfg.defrost()
        cfg.DATALOADER.NUM_WORKERS = 0  # they would wait, between evaluations, with their batches
        return self.build_precise_loader(cfg)

    @classmethod
    def build_precise_loader(cls, cfg: CfgNode) -> Iterable:
        """Of the batches that TEST.PRECISE_BN takes statistics of."""
        return cls.build_train_loader(cfg)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        model = super().build_model(cfg)
        if cfg.MODEL.DEVICE == "cpu" and comm.get_world_size() > 1:
            model = sync_batch_norms_for_cpu(model)
        logger.info(f"SW layers:\n{sw_table(model)}")
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return build_lr_scheduler(cfg, optimizer)

    @staticmethod
    def auto_scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
        """Detectron2's linear scaling by SOLVER.REFERENCE_WORLD_SIZE, of IMPORTANCE_STOP_ITER and
        POLY_LR_MAX_ITER too.

        What happens in some iteration still does: none is scaled to 0, which would be never.

        Raises:
            UserError: SOLVER.IMS_PER_BATCH is no multiple of SOLVER.REFERENCE_WORLD_SIZE.
        """
        solver = cfg.SOLVER
        if solver.REFERENCE_WORLD_SIZE and solver.IMS_PER_BATCH % solver.REFERENCE_WORLD_SIZE:
            raise UserError(
                f"SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH} is no multiple of "
                f"SOLVER.REFERENCE_WORLD_SIZE {solver.REFERENCE_WORLD_SIZE}"
            )
        scaled = DefaultTrainer.auto_scale_workers(cfg, num_workers)
        if scaled is cfg:
            return cfg
        was_frozen = scaled.is_frozen()
        scaled.defrost()
        for key in ("IMPORTANCE_STOP_ITER", "POLY_LR_MAX_ITER"):
            scaled.SOLVER[key] = round(solver[key] * solver.REFERENCE_WORLD_SIZE / num_workers)
        for section, key in (
            ("SOLVER", "IMPORTANCE_STOP_ITER"),
            ("SOLVER", "MAX_ITER"),
            ("SOLVER", "CHECKPOINT_PERIOD"),
            ("TEST", "EVAL_PERIOD"),
        ):
            if cfg[section][key] > 0:
                scaled[section][key] = max(1, scaled[section][key])
        if was_frozen:
            scaled.freeze()
        return scaled

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> DataLoader:
        mapper = cls.build_mapper(cfg, is_train=True)
        if cfg.DATALOADER.SAMPLER_TRAIN != "TrainingSampler":
            return build_detection_train_loader(cfg, mapper=mapper)
        keypoints = cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
        dataset = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN,
            filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            min_keypoints=keypoints if cfg.MODEL.KEYPOINT_ON else 0,
            proposal_files=cfg.DATASETS.PROPOSAL_FILES_TRAIN if cfg.MODEL.LOAD_PROPOSALS else None,
        )
        return build_resumable_train_loader(cfg, mapper=mapper, dataset=dataset, seed=cfg.SEED)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> DataLoader:
        mapper = cls.build_mapper(cfg, is_train=False)
        return build_detection_test_loader(cfg, dataset_name, mapper=mapper)

    @classmethod
    def build_mapper(cls, cfg: CfgNode, is_train: bool) -> Callable[[dict], dict]:
        """What turns the record of an image into an input of the model."""
        return DatasetMapper(cfg, is_train)

    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None
    ) -> DatasetEvaluator:
        folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
        return build_evaluator(dataset_name, folder)

    @classmethod
    def check_augmentation(cls, cfg: CfgNode) -> None:
        """There are tests with TEST.AUG's scales and flips for a config.

        Raises:
            UserError: there are not.
        """
        raise UserError(
            f"TEST.AUG.ENABLED: {cfg.MODEL.META_ARCHITECTURE} has no test-time augmentation; "
            "set it to False"
        )

    @classmethod
    def augmented(cls, cfg: CfgNode, model: nn.Module) -> tuple[CfgNode, nn.Module]:
        """The config and the model of tests with TEST.AUG's scales and flips."""
        raise NotImplementedError

    @classmethod
    def test_with_augmentation(cls, cfg: CfgNode, model: nn.Module) -> OrderedDict:
        """Evaluate as `augmented` says; the results' names end in `_TTA`."""
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(*cls.augmented(cfg, model), evaluators)
        return OrderedDict((f"{task}_TTA", values) for task, values in results.items())


def sync_batch_norms_for_cpu(module: nn.Module) -> nn.Module:
    """Put Detectron2's synchronized BN, which runs on CPUs, in the place of torch's, which doesn't.

    Names and shapes in the state dict stay. It is exact where all processes have feature maps of
    one height and width, and else weighs them by their number of images.
    """
    if isinstance(module, nn.SyncBatchNorm):
        twin = NaiveSyncBatchNorm(
            module.num_features, module.eps, module.momentum, stats_mode="N"
        ).train(module.training)
        twin.load_state_dict(module.state_dict())
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(getattr(module, name).requires_grad)
        return twin
    for name, child in module.named_children():
        twin = sync_batch_norms_for_cpu(child)
        if twin is not child:
            setattr(module, name, twin)
    return module
