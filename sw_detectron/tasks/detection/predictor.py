"""A detector on pictures, one at a time or several."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultPredictor


class DetectionPredictor(DefaultPredictor):
    """Detectron2's predictor, for several pictures too; see `Task.build_predictor`."""

    def __init__(self, cfg: CfgNode):
        super().__init__(cfg)
        # What others are beside it does not change an image's result.
        self._mixes_sizes = "SW" in cfg.MODEL and cfg.MODEL.SW.PADDING == "zeroed"

    def __call__(self, frame: np.ndarray) -> dict:
        (output,) = self.batch([frame])
        return output

    @torch.no_grad()
    def batch(self, frames: Sequence[np.ndarray]) -> list[dict]:
        """The outputs of pictures, which are those of each alone but for rounding: unless
        MODEL.SW.PADDING is "zeroed", the model is given pictures of one size at once.

        Args:
            frames: (H, W, 3) each, uint8, BGR.
        """
        inputs = [self._input(frame) for frame in frames]
        outputs: dict[int, dict] = {}

        def shape(i: int) -> tuple[int, ...]:
            return tuple(inputs[i]["image"].shape) if not self._mixes_sizes else ()

        for _, indices in groupby(sorted(range(len(inputs)), key=shape), key=shape):
            some = list(indices)
            outputs |= zip(some, self.model([inputs[i] for i in some]))
        return [outputs[i] for i in range(len(inputs))]

    def _input(self, frame: np.ndarray) -> dict:
        height, width = frame.shape[:2]
        if self.input_format == "RGB":
            frame = frame[:, :, ::-1]
        image = self.aug.get_transform(frame).apply_image(frame)
        image = torch.as_tensor(image.astype("float32").transpose(2, 0, 1))
        return {"image": image, "height": height, "width": width}
