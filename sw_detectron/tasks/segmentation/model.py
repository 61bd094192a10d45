"""Semantic segmentation of whole images by windows, at one scale or several."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode, configurable
from detectron2.data.transforms import ResizeShortestEdge, ResizeTransform
from detectron2.modeling import META_ARCH_REGISTRY, SemanticSegmentor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@META_ARCH_REGISTRY.register()
class SlidingWindowSegmentor(SemanticSegmentor):
    """A `SemanticSegmentor` that sees, when tested too, nothing but windows of the crops' size.

    Windows overlap by about a third, and probabilities are averaged where they do. Smaller images
    are padded on all sides with the mean colour. The outputs are probabilities, not logits.

    Args:
        window: height and width, both of the form stride * k + 1 (see `PSPHead`).
        kwargs: see `SemanticSegmentor`.
    """

    @configurable
    def __init__(self, *, window: Sequence[int], **kwargs):
        super().__init__(**kwargs)
        self.window = tuple(window)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict:
        return super().from_config(cfg) | {"window": cfg.INPUT.CROP.SIZE}

    def forward(self, batched_inputs: list[dict]) -> dict[str, Tensor] | list[dict]:
        """As of `SemanticSegmentor`; "sem_seg" of each output is (K, height, width)."""
        if self.training:
            return super().forward(batched_inputs)
        return [
            {"sem_seg": resize(self.probabilities(x["image"]), *output_size(x))}
            for x in batched_inputs
        ]

    def probabilities(self, image: Tensor) -> Tensor:
        """(3, H, W), values 0 to 255, to the probabilities of the classes, (K, H, W)."""
        image = (image.to(self.device) - self.pixel_mean) / self.pixel_std
        height, width = image.shape[1:]
        missing = [max(0, w - side) for w, side in zip(self.window, (height, width))]
        top, left = (amount // 2 for amount in missing)
        image = F.pad(image, (left, missing[1] - left, top, missing[0] - top))
        rows, columns = (window_slices(s, w) for s, w in zip(image.shape[1:], self.window))
        total, count = 0, image.new_zeros(image.shape[1:])
        for y in rows:
            for x in columns:
                logits, _ = self.sem_seg_head(self.backbone(image[None, :, y, x]))
                if not torch.is_tensor(total):
                    total = logits.new_zeros(logits.shape[1], *image.shape[1:])
                total[:, y, x] += logits[0].softmax(dim=0)
                count[y, x] += 1
        return (total / count)[:, top : top + height, left : left + width]


class MultiScaleSegmentor(nn.Module):
    """Averages the probabilities of a `SlidingWindowSegmentor` over scales and mirror images.

    Args:
        cfg: INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST say what scale 1 is; TEST.AUG.SCALES and FLIP.
        model: the segmentor.
    """

    def __init__(self, cfg: CfgNode, model: nn.Module):
        super().__init__()
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self._scales = cfg.TEST.AUG.SCALES
        self._flip = cfg.TEST.AUG.FLIP
        self._min_size = cfg.INPUT.MIN_SIZE_TEST
        self._max_size = cfg.INPUT.MAX_SIZE_TEST if self._min_size else math.inf

    def forward(self, batched_inputs: list[dict]) -> list[dict]:
        """As of the segmentor, from images "image" (3, H, W), uint8, as their files have them."""
        return [{"sem_seg": self._average(x)} for x in batched_inputs]

    def _average(self, inputs: dict) -> Tensor:
        pixels = inputs["image"].permute(1, 2, 0).cpu().numpy()
        total = 0
        for scale in self._scales:
            image = torch.from_numpy(self._scaled(pixels, scale).copy()).permute(2, 0, 1)
            found = self.model.probabilities(image)
            if self._flip:
                found = (found + self.model.probabilities(image.flip(-1)).flip(-1)) / 2
            total = total + resize(found, *output_size(inputs))
        return total / len(self._scales)

    def _scaled(self, pixels: np.ndarray, scale: float) -> np.ndarray:
        height, width = pixels.shape[:2]
        short = (self._min_size or min(height, width)) * scale
        size = ResizeShortestEdge.get_output_shape(height, width, short, self._max_size * scale)
        return ResizeTransform(height, width, *size).apply_image(pixels)


def window_slices(length: int, window: int) -> list[slice]:
    """The fewest windows over `length` >= `window` pixels whose steps are at most 2/3 of one."""
    step = math.ceil(window * 2 / 3)
    count = math.ceil((length - window) / step) + 1
    starts = [min(i * step, length - window) for i in range(count)]
    return [slice(start, start + window) for start in starts]


def output_size(inputs: dict) -> tuple[int, int]:
    """The height and width that a prediction is to have: by default, those of the input."""
    height, width = inputs["image"].shape[1:]
    return inputs.get("height", height), inputs.get("width", width)


def resize(probabilities: Tensor, height: int, width: int) -> Tensor:
    """(K, H, W) to (K, height, width)."""
    if probabilities.shape[1:] == (height, width):
        return probabilities
    size = (height, width)
    return F.interpolate(probabilities[None], size, mode="bilinear", align_corners=False)[0]
