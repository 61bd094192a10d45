"""Domain adaptation of semantic segmentation by adversarial training (the paper's section 4.3)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from detectron2.config import CfgNode

from ...errors import UserError
from ...task import register_task
from ..segmentation import Segmentation
from .config import add_adaptation_config
from .data import register_adaptation_datasets
from .page import adaptation_sections
from .shapes import register_shapes_adaptation
from .trainer import DomainAdaptationTrainer

__all__ = ["DomainAdaptationTrainer", "register_adaptation_datasets", "register_shapes_adaptation"]


class DomainAdaptation(Segmentation):
    name = "domain_adaptation"
    meta_architectures = ("AdaptedSegmentor",)
    trainer = DomainAdaptationTrainer
    lowest = {
        "SOLVER.DISCRIMINATOR_LR": 0,
        "SOLVER.DISCRIMINATOR_BETAS": 0,
        "MODEL.DA.ADVERSARIAL_WEIGHT": 0,
        "MODEL.DA.DISCRIMINATOR_CHANNELS": 1,
    }
    choices = {"MODEL.DA.STATISTICS": ("mixed", "target")}

    def add_config(self, cfg: CfgNode) -> None:
        add_adaptation_config(cfg)

    def page_sections(
        self, keys: Mapping, test_datasets: Sequence[str], folder: Path
    ) -> dict[str, str]:
        return adaptation_sections(keys, test_datasets, folder)

    def unlabelled(self, cfg: CfgNode) -> Sequence[str]:
        if not cfg.MODEL.DA.ADVERSARIAL_WEIGHT:
            return ()
        if not cfg.DATASETS.TARGET:
            raise UserError(
                "DATASETS.TARGET is empty: name the data sets of the target, or set "
                "MODEL.DA.ADVERSARIAL_WEIGHT to 0.0 to train on the source alone"
            )
        return cfg.DATASETS.TARGET


register_task(DomainAdaptation())
register_adaptation_datasets()
register_shapes_adaptation()
