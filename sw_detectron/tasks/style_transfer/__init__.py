"""Style transfer: a network that paints images in the style of one (the paper's section 4.4)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import Metadata

from ...task import Task, find_task, register_task
from .config import add_style_config, follow_content, register_coco_images, register_content
from .data import SHORTEST_SIDE
from .evaluator import to_frame
from .model import OUTPUTS, StyleTransfer
from .page import style_sections
from .results import StylePredictor
from .trainer import StyleTransferTrainer

__all__ = ["StyleTransfer", "StyleTransferTrainer"]


class StyleTransferTask(Task):
    name = "style_transfer"
    output = "stylized"
    meta_architectures = ("StyleTransfer",)
    labelled = False
    trainer = StyleTransferTrainer
    lowest = {
        "INPUT.CONTENT_SIZE": SHORTEST_SIDE,
        "MODEL.STYLE.IMAGE_SIZE": SHORTEST_SIDE,
        "MODEL.STYLE.CHANNELS": 1,
        "MODEL.STYLE.NUM_BLOCKS": 0,
        "MODEL.STYLE.MAX_PIXELS": 1,
        "MODEL.STYLE.CONTENT_WEIGHT": 0,
        "MODEL.STYLE.STYLE_WEIGHT": 0,
        "MODEL.STYLE.TV_WEIGHT": 0,
    }
    choices = {"MODEL.STYLE.OUTPUT": OUTPUTS}

    def add_config(self, cfg: CfgNode) -> None:
        add_style_config(cfg)

    def register_datasets(self, cfg: CfgNode) -> None:
        register_content(cfg)

    def follow_data(self, cfg: CfgNode, given: Collection[str]) -> None:
        if find_task(cfg) is self:
            follow_content(cfg, given)

    def build_predictor(self, cfg: CfgNode, confidence: float) -> Callable[[np.ndarray], dict]:
        return StylePredictor(cfg)

    def results(
        self, outputs: dict, frame: np.ndarray, metadata: Metadata, confidence: float
    ) -> tuple[list[dict], np.ndarray]:
        return [], to_frame(outputs["stylized"])

    def page_sections(
        self, keys: Mapping, test_datasets: Sequence[str], folder: Path
    ) -> dict[str, str]:
        return style_sections(keys, test_datasets, folder)


register_task(StyleTransferTask())
register_coco_images()
