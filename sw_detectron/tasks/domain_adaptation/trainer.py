"""The trainer of domain adaptation."""

from collections.abc import Iterable, Iterator

import torch
from detectron2.config import CfgNode
from detectron2.data import get_detection_dataset_dicts
from detectron2.data import transforms as T
from detectron2.engine import TrainerBase
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from ...data.sampler import build_resumable_train_loader
from ...engine.loop import to_parallel
from ...engine.trainer import Trainer
from ...errors import UserError
from ..segmentation.mapper import SegmentationMapper
from .model import Discriminator
from .step import AdversarialStep


class InTurn:
    """Batches of several loaders in turn, without end."""

    def __init__(self, *loaders: Iterable):
        self._loaders = loaders

    def __iter__(self) -> Iterator[list[dict]]:
        for batches in zip(*self._loaders):
            yield from batches


class DomainAdaptationTrainer(Trainer):
    """The `Trainer` of an `AdaptedSegmentor`; on the source alone if the adversarial weight is
    0."""

    @classmethod
    def build_step(cls, cfg: CfgNode, model: nn.Module) -> TrainerBase:
        da = cfg.MODEL.DA
        if not da.ADVERSARIAL_WEIGHT:
            return super().build_step(cfg, model)
        discriminator = Discriminator(
            cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES, da.DISCRIMINATOR_CHANNELS
        ).to(cfg.MODEL.DEVICE)
        optimizers = (
            cls.build_optimizer(cfg, model),
            torch.optim.Adam(
                discriminator.parameters(),
                lr=cfg.SOLVER.DISCRIMINATOR_LR,
                betas=tuple(cfg.SOLVER.DISCRIMINATOR_BETAS),
            ),
        )
        networks = (
            to_parallel(network, cfg.MODEL.DEVICE, broadcast_buffers=False)
            for network in (model, discriminator)
        )
        return AdversarialStep(
            *networks,
            (cls.build_train_loader(cfg), cls.build_target_loader(cfg)),
            optimizers,
            images_per_step=cfg.SOLVER.IMS_PER_BATCH,
            adversarial_weight=da.ADVERSARIAL_WEIGHT,
            target_statistics=da.STATISTICS == "target",
            mixed_precision=cfg.SOLVER.AMP.ENABLED,
        )

    @classmethod
    def build_target_loader(cls, cfg: CfgNode) -> DataLoader:
        """Of training images of the target, without labels, as many a step as of the source."""
        mapper = SegmentationMapper(cfg, False, _augmentations(cfg, "TARGET", flip=True))
        dataset = get_detection_dataset_dicts(cfg.DATASETS.TARGET, filter_empty=False)
        # Another order than that of the source.
        seed = cfg.SEED + 1 if cfg.SEED >= 0 else cfg.SEED
        return build_resumable_train_loader(cfg, mapper=mapper, dataset=dataset, seed=seed)

    @classmethod
    def build_precise_loader(cls, cfg: CfgNode) -> Iterable:
        """Of the domains that MODEL.DA.STATISTICS says."""
        if not cfg.MODEL.DA.ADVERSARIAL_WEIGHT:
            return cls.build_train_loader(cfg)
        target = cls.build_target_loader(cfg)
        if cfg.MODEL.DA.STATISTICS == "target":
            return target
        return InTurn(cls.build_train_loader(cfg), target)

    @classmethod
    def build_mapper(cls, cfg: CfgNode, is_train: bool) -> SegmentationMapper:
        kind = "SOURCE" if is_train else "TARGET"
        return SegmentationMapper(cfg, is_train, _augmentations(cfg, kind, flip=is_train))


def _augmentations(cfg: CfgNode, domain: str, flip: bool) -> list[T.Augmentation]:
    """Resizing to INPUT.SOURCE_SIZE or TARGET_SIZE, and mirror images as INPUT.RANDOM_FLIP says.

    Raises:
        UserError: the size is not a height and a width that the discriminator can judge.
    """
    size = cfg.INPUT[f"{domain}_SIZE"]
    if size and (len(size) != 2 or min(size) < Discriminator.SMALLEST):
        raise UserError(
            f"INPUT.{domain}_SIZE {size}: it must be height and width, of at least "
            f"{Discriminator.SMALLEST} pixels each, or empty"
        )
    augmentations = [T.Resize(tuple(size), Image.BICUBIC)] if size else []
    if flip and cfg.INPUT.RANDOM_FLIP != "none":
        vertical = cfg.INPUT.RANDOM_FLIP == "vertical"
        augmentations.append(T.RandomFlip(horizontal=not vertical, vertical=vertical))
    return augmentations
