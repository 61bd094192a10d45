"""A classifier's outputs: the best classes of a picture, and the picture with their names."""

from collections.abc import Sequence

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from PIL import Image, ImageDraw
from torch import Tensor

from ...checkpoint import Checkpointer
from ...errors import UserError
from .data import test_transform

NUM_BEST = 5
_MIN_SIDE = 320  # px, below which a picture has no room for text


class ClassPredictor:
    """A classifier for single pictures; see `Task.build_predictor`."""

    def __init__(self, cfg: CfgNode):
        self.model = build_model(cfg).eval()
        Checkpointer(self.model, cfg=cfg).load(cfg.MODEL.WEIGHTS)
        self._transform = test_transform(cfg)

    def __call__(self, frame: np.ndarray) -> dict[str, Tensor]:
        """The probabilities of the classes, `scores` (K,), of a picture (H, W, 3), uint8, BGR."""
        image = self._transform(Image.fromarray(np.ascontiguousarray(frame[..., ::-1])))
        with torch.no_grad():
            logits = self.model({"image": image[None]})
        return {"scores": logits[0].softmax(dim=0)}


def classification_results(
    scores: Tensor, frame: np.ndarray, classes: Sequence[str], dataset: str, confidence: float
) -> tuple[list[dict], np.ndarray]:
    """See `Task.results`: a result, without box, for each of the `NUM_BEST` classes.

    Args:
        scores: (K,), of the classes.
        classes: their names.
        dataset: the name of the data set that has them.
    """
    if len(scores) != len(classes):
        raise UserError(
            f"the model knows {len(scores)} classes, data set {dataset!r} has {len(classes)}: name "
            "the model's own in DATASETS.TEST"
        )
    best = scores.topk(min(NUM_BEST, len(scores)))
    results = [
        {"category_id": number, "category_name": classes[number], "score": score}
        for score, number in zip(best.values.tolist(), best.indices.tolist())
        if score >= confidence
    ]
    lines = [f"{result['category_name']} {result['score']:.1%}" for result in results]
    return results, overlay_lines(frame[..., ::-1], lines)[..., ::-1]


def overlay_lines(pixels: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Write lines of text on a picture, from its upper left corner on.

    Args:
        pixels: (H, W, 3), uint8, RGB.

    Returns:
        (H', W', 3); its size depends on that of the picture alone. Small ones are enlarged.
    """
    zoom = max(1, round(_MIN_SIDE / max(pixels.shape[:2])))
    picture = Image.fromarray(pixels.repeat(zoom, axis=0).repeat(zoom, axis=1))
    ImageDraw.Draw(picture).multiline_text(
        (6, 4),
        "\n".join(lines),
        fill="white",
        stroke_fill="black",
        stroke_width=2,
        font_size=max(14, picture.height // 24),
    )
    return np.asarray(picture)
