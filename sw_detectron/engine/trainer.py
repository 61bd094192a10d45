"""Detectron2's default trainer, made for SW, for interruptions, and for machines without GPU."""

import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, TrainerBase
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import DatasetEvaluator
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..checkpoint import Checkpointer
from ..data.sampler import build_resumable_train_loader
from ..errors import UserError
from ..evaluation.evaluators import build_evaluator
from ..evaluation.report import write_report
from ..modeling.calibration import calibrated_layers
from ..modeling.summary import sw_table
from .hooks import ImportanceWriter, PreciseStats, SeedIterations, StopImportance
from .optimizer import build_lr_scheduler, build_optimizer

logger = logging.getLogger(__name__)


class Trainer(DefaultTrainer):
    """The `DefaultTrainer` of `tools/train_net.py`.

    Beyond Detectron2's: prints the SW layers, trains their parameters by the keys of SOLVER that
    are theirs, records their importance ratios, gives them precise statistics with
    TEST.PRECISE_BN, writes checkpoints whole or not at all, continues the sequence of training
    images on resuming, and ends with a page about the run. If SEED is not negative,
    DATALOADER.NUM_WORKERS is 0 and DATALOADER.ASPECT_RATIO_GROUPING is off, a resumed run is equal
    to an uninterrupted one; with workers, or with images grouped by shape, it sees other
    augmentations and another grouping of the same images.
    """

    def __init__(self, cfg: CfgNode):
        # DefaultTrainer's own steps, but for the checkpointer and for models on the CPU.
        TrainerBase.__init__(self)
        cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        data_loader = self.build_train_loader(cfg)
        self._sampler = getattr(data_loader, "resumable_sampler", None)
        device_ids = {} if cfg.MODEL.DEVICE != "cpu" else {"device_ids": None}
        model = create_ddp_model(model, broadcast_buffers=False, **device_ids)
        trainer_class = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
        self._trainer = trainer_class(model, data_loader, optimizer)
        if cfg.SOLVER.IMPORTANCE_STOP_ITER:
            self._trainer.register_hooks([StopImportance(model, cfg.SOLVER.IMPORTANCE_STOP_ITER)])
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks(self.build_hooks())

    def resume_or_load(self, resume: bool = True) -> None:
        """Resume from OUTPUT_DIR's last checkpoint if asked to and there is one, else load
        MODEL.WEIGHTS."""
        super().resume_or_load(resume)
        if self._sampler is not None:
            self._sampler.start = self.start_iter * self.cfg.SOLVER.IMS_PER_BATCH

    def train(self) -> OrderedDict:
        """Train, and write OUTPUT_DIR/report.html; returns the results of the last evaluation,
        empty but on the main process."""
        # Without DefaultTrainer's comparison with TEST.EXPECTED_RESULTS, which ends the program.
        TrainerBase.train(self, self.start_iter, self.max_iter)
        if comm.is_main_process():
            self._write_report(self._last_eval_results)
        return self._last_eval_results

    def _write_report(self, results: OrderedDict | None) -> None:
        try:
            path = write_report(self.cfg, self.model, results)
        except (OSError, ValueError) as error:  # the training is done, and must not fail now
            logger.warning(f"No report: {error}")
        else:
            logger.info(f"Report of the run: {path}")

    def build_hooks(self) -> list:
        # Without Detectron2's PreciseBN, which sees no SW and would read the data set for itself.
        cfg, self.cfg = self.cfg, self.cfg.clone()
        self.cfg.defrost()
        self.cfg.TEST.PRECISE_BN.ENABLED = False
        hooks = super().build_hooks()
        self.cfg = cfg
        if cfg.TEST.PRECISE_BN.ENABLED:
            # In its place: before the checkpointer and the evaluation.
            hooks[2] = self._precise_stats()
        # Before the writers, which come last and on the main process only.
        hooks.insert(2, ImportanceWriter(self.model))
        if self.cfg.SEED >= 0:
            hooks.append(SeedIterations(self.cfg.SEED, comm.get_rank(), comm.get_world_size()))
        return hooks

    def _precise_stats(self) -> PreciseStats | None:
        if not (get_bn_modules(self.model) or calibrated_layers(self.model)):
            logger.info("TEST.PRECISE_BN: no layer of the model takes statistics of the batch.")
            return None
        cfg = self.cfg.clone()
        cfg.defrost()
        cfg.DATALOADER.NUM_WORKERS = 0  # they would wait, between evaluations, with their batches
        loader = self.build_train_loader(cfg)
        num_iter = cfg.TEST.PRECISE_BN.NUM_ITER
        return PreciseStats(cfg.TEST.EVAL_PERIOD, self.model, loader, num_iter)

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
        """Detectron2's linear scaling by SOLVER.REFERENCE_WORLD_SIZE, of IMPORTANCE_STOP_ITER too.

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
        if scaled is cfg or not solver.IMPORTANCE_STOP_ITER:
            return scaled
        stop = solver.IMPORTANCE_STOP_ITER * solver.REFERENCE_WORLD_SIZE / num_workers
        was_frozen = scaled.is_frozen()
        scaled.defrost()
        scaled.SOLVER.IMPORTANCE_STOP_ITER = max(1, round(stop))  # 0 would mean never
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
        return build_evaluator(cfg, dataset_name, output_folder)

    @classmethod
    def test_with_augmentation(cls, cfg: CfgNode, model: nn.Module) -> OrderedDict:
        """Evaluate with TEST.AUG's scales and flips; the results' names end in `_TTA`."""
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
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
