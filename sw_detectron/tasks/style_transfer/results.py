"""A stylized picture after training."""

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import Tensor

from ...errors import UserError


class StylePredictor:
    """Stylizes single pictures; see `Task.build_predictor`.

    A picture is stylized as a whole: in tiles, each would have instance statistics of its own, and
    the seams would show.
    """

    def __init__(self, cfg: CfgNode):
        self.model = build_model(cfg).eval()
        self._max_pixels = cfg.MODEL.STYLE.MAX_PIXELS

    def check(self, frame: np.ndarray) -> None:
        """There is the memory for a picture (H, W, 3).

        Raises:
            UserError: it has more pixels than MODEL.STYLE.MAX_PIXELS.
        """
        height, width = frame.shape[:2]
        if height * width > self._max_pixels:
            raise UserError(
                f"a picture of {width} x {height} pixels is larger than MODEL.STYLE.MAX_PIXELS "
                f"{self._max_pixels}: make it smaller or, if there is the memory, raise that"
            )

    def __call__(self, frame: np.ndarray) -> dict[str, Tensor]:
        """The stylized picture, `stylized` (3, H, W), RGB in 0..255, of one (H, W, 3), uint8, BGR.

        Raises:
            UserError: see `check`.
        """
        self.check(frame)
        image = torch.from_numpy(frame[..., ::-1].copy()).permute(2, 0, 1)
        with torch.no_grad():
            (output,) = self.model([{"image": image}])
        return output
