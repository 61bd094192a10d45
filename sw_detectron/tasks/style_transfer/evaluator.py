"""What style transfer is measured by: its losses on the content of a data set."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import Tensor

from ...data.media import write_picture
from .loss import PerceptualLoss

NUM_SHOWN = 4
"""So many of the images are written, as they are and stylized."""


class StyleEvaluator(DatasetEvaluator):
    """The mean losses of a data set's images, and pictures of the first ones.

    The pictures are `folder/ITERATION/NUMBER.png`, by the iterations that the model was trained for
    (`evaluated` where that is not known), and `folder/content/NUMBER.png`.

    Args:
        criterion: the losses that the model is trained by.
        folder: of the pictures.
        max_iter: of the run.
    """

    def __init__(self, criterion: PerceptualLoss, folder: Path, max_iter: int):
        self._criterion = criterion
        self._folder = folder
        self._max_iter = max_iter
        self.reset()

    def reset(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0
        self._shown: list[tuple[np.ndarray, np.ndarray]] = []

    def process(self, inputs: list[dict], outputs: list[dict]) -> None:
        for one, output in zip(inputs, outputs):
            stylized = output["stylized"]
            content = one["image"].to(stylized)
            losses = self._criterion.to(stylized.device)(stylized[None], content[None])
            for name, loss in losses.items():
                self._sums[name] = self._sums.get(name, 0.0) + float(loss)
            if self._count < NUM_SHOWN:
                self._shown.append((to_frame(content), to_frame(stylized)))
            self._count += 1

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Means over the images of all processes, and their sum; on the main process."""
        parts = comm.gather((self._sums, self._count, self._shown))
        if not comm.is_main_process():
            return {}
        # The processes have the images one after the other.
        self._write([pair for _, _, shown in parts for pair in shown][:NUM_SHOWN])
        count = sum(number for _, number, _ in parts)
        names = dict.fromkeys(name for sums, _, _ in parts for name in sums)
        losses = {n: sum(sums.get(n, 0.0) for sums, _, _ in parts) / count for n in names}
        return {"style_transfer": losses | {"total_loss": sum(losses.values())}}

    def _stage(self) -> str:
        if not has_event_storage():
            return "evaluated"
        # After the last iteration the storage has its number plus one already.
        return f"{min(get_event_storage().iter + 1, self._max_iter):07d}"

    def _write(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        for number, pair in enumerate(pairs):
            for name, frame in zip(("content", self._stage()), pair):
                folder = self._folder / name
                folder.mkdir(parents=True, exist_ok=True)
                write_picture(frame, folder / f"{number}.png")


def to_frame(image: Tensor) -> np.ndarray:
    """(3, H, W), RGB in 0..255, to a picture (H, W, 3), uint8, BGR."""
    pixels = image.clamp(0, 255).round().to(torch.uint8)
    return np.ascontiguousarray(pixels.flip(0).permute(1, 2, 0).cpu().numpy())
