"""The images of style transfer: the style's, and content as the network is given it."""

from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional, v2

from ...data.images import read_image
from ...errors import UserError
from .painting import painting

SHORTEST_SIDE = 16
"""Pixels, of which four poolings of the loss network leave one."""


class ContentMapper:
    """From the record of an image to an input of the model, a square of INPUT.CONTENT_SIZE.

    The shorter side is resized to it; training cuts out a random square, evaluation the middle.
    """

    def __init__(self, cfg: CfgNode, is_train: bool):
        size = cfg.INPUT.CONTENT_SIZE
        crop = v2.RandomCrop(size) if is_train else v2.CenterCrop(size)
        self._transform = v2.Compose([v2.Resize(size), crop, v2.PILToTensor()])

    def __call__(self, record: dict) -> dict:
        """A record with `file_name` to "file_name" and "image" (3, S, S), uint8, RGB."""
        image = Image.fromarray(read_image(record["file_name"], "RGB"))
        return {"file_name": record["file_name"], "image": self._transform(image)}


def style_image(cfg: CfgNode) -> np.ndarray:
    """MODEL.STYLE.IMAGE as it is, or the package's painting; (H, W, 3), uint8, RGB.

    Raises:
        UserError: the file is not there, or is no image.
    """
    path = cfg.MODEL.STYLE.IMAGE
    if not path:
        return painting(cfg.MODEL.STYLE.IMAGE_SIZE)
    if not Path(path).is_file():
        raise UserError(
            f"MODEL.STYLE.IMAGE {path!r} does not exist; give an image, or an empty name for the "
            "package's own"
        )
    return read_image(path, "RGB")


def style_tensor(cfg: CfgNode) -> Tensor:
    """The style's image with MODEL.STYLE.IMAGE_SIZE as its longer side, (3, h, w), in 0..255.

    Raises:
        UserError: its shorter side is too short for the loss network.
    """
    image = Image.fromarray(style_image(cfg))
    longer = cfg.MODEL.STYLE.IMAGE_SIZE
    size = [round(longer * side / max(image.size)) for side in (image.height, image.width)]
    if min(size) < SHORTEST_SIDE:
        raise UserError(
            f"MODEL.STYLE.IMAGE {cfg.MODEL.STYLE.IMAGE!r}: of {longer} x {min(size)} pixels, it is "
            f"too narrow; cut out a part of it, or raise MODEL.STYLE.IMAGE_SIZE until the shorter "
            f"side has {SHORTEST_SIDE}"
        )
    return functional.pil_to_tensor(functional.resize(image, size)).to(torch.float32)
