"""The trainer of style transfer."""

from collections.abc import Callable
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import get_detection_dataset_dicts
from detectron2.engine import TrainerBase
from detectron2.evaluation import DatasetEvaluator
from detectron2.solver.build import maybe_add_gradient_clipping
from torch import nn
from torch.utils.data import DataLoader

from ...data.sampler import build_resumable_train_loader
from ...engine.optimizer import configured_params
from ...engine.trainer import Trainer
from ...errors import UserError
from .data import ContentMapper, style_tensor
from .evaluator import StyleEvaluator
from .loss import PerceptualLoss, load_loss_network


class StyleTransferTrainer(Trainer):
    """The `Trainer` of `StyleTransfer`: Adam, and losses that are no part of the model."""

    @classmethod
    def build_step(cls, cfg: CfgNode, model: nn.Module) -> TrainerBase:
        model.set_criterion(build_criterion(cfg))
        return super().build_step(cfg, model)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        solver = cfg.SOLVER
        optimizer = torch.optim.Adam(
            configured_params(cfg, model),
            lr=solver.BASE_LR,
            weight_decay=solver.WEIGHT_DECAY,
            foreach=True,
        )
        return maybe_add_gradient_clipping(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> DataLoader:
        """Of images of any data sets, whose labels need not agree, or be there."""
        dataset = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN, filter_empty=False, check_consistency=False
        )
        mapper = cls.build_mapper(cfg, is_train=True)
        return build_resumable_train_loader(cfg, mapper=mapper, dataset=dataset, seed=cfg.SEED)

    @classmethod
    def build_mapper(cls, cfg: CfgNode, is_train: bool) -> Callable[[dict], dict]:
        return ContentMapper(cfg, is_train)

    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None
    ) -> DatasetEvaluator:
        folder = Path(output_folder or Path(cfg.OUTPUT_DIR, "inference"))
        if len(cfg.DATASETS.TEST) > 1:
            folder = folder / dataset_name
        return StyleEvaluator(build_criterion(cfg), folder, cfg.SOLVER.MAX_ITER)


def build_criterion(cfg: CfgNode) -> PerceptualLoss:
    """The losses of MODEL.STYLE.

    Raises:
        UserError: the loss network's weights or the style's image are not there, or do not fit; or
            there is nothing to compare.
    """
    keys = cfg.MODEL.STYLE
    for kind in ("CONTENT", "STYLE"):
        if not keys[f"{kind}_LAYERS"]:
            raise UserError(
                f"MODEL.STYLE.{kind}_LAYERS is empty: name a layer and, to train without that "
                f"loss, set MODEL.STYLE.{kind}_WEIGHT to 0.0"
            )
    layers = tuple(dict.fromkeys((*keys.CONTENT_LAYERS, *keys.STYLE_LAYERS)))
    return PerceptualLoss(
        load_loss_network(keys.LOSS_NETWORK, layers),
        style_tensor(cfg),
        keys.CONTENT_LAYERS,
        keys.STYLE_LAYERS,
        (keys.CONTENT_WEIGHT, keys.STYLE_WEIGHT, keys.TV_WEIGHT),
        cfg.MODEL.PIXEL_MEAN,
        cfg.MODEL.PIXEL_STD,
    )
