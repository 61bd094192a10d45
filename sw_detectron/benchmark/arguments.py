"""What a benchmark can be told: shapes, sizes, dtypes, memory formats and devices."""

import re
from collections.abc import Sequence

import torch

from ..errors import UserError

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SHAPE_SETS = {
    # A mixture of classification and detection, small enough for a CPU.
    "table": (
        (8, 64, 56, 56),
        (8, 128, 28, 28),
        (8, 256, 14, 14),
        (2, 64, 200, 304),
        (2, 256, 50, 76),
    ),
    # The distinct outputs of the convolutions that have SW in ResNet-50 at 224 px: the stem,
    # res2.1.conv2, res3.{0,2}.conv2 and res4.{0,2,4}.conv2; the batch is a parameter.
    "imagenet": ((64, 112, 112), (64, 56, 56), (128, 28, 28), (256, 14, 14)),
    # The same for two images of 800 x 1216.
    "detection": ((2, 64, 400, 608), (2, 64, 200, 304), (2, 128, 100, 152), (2, 256, 50, 76)),
}

Shape = tuple[int, int, int, int]


def parse_shapes(text: str, batch: int) -> list[Shape]:
    """A set's name, or shapes such as "2x64x50x76,8x64x56x56".

    Args:
        batch: N of the sets that leave it open.

    Raises:
        UserError: it is neither.
    """
    if text in SHAPE_SETS:
        return [shape if len(shape) == 4 else (batch, *shape) for shape in SHAPE_SETS[text]]
    shapes = []
    for part in text.split(","):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", part):
            names = ", ".join(SHAPE_SETS)
            raise UserError(f"shape {part!r} is neither one of {names} nor like 8x64x56x56")
        shapes.append(tuple(map(int, part.split("x"))))
        if shapes[-1][2:] == (1, 1):
            raise UserError(f"shape {part!r} has one pixel, which InstanceNorm cannot take")
    return shapes


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from "800x1216", or from "224" for a square.

    Raises:
        UserError: it is not like that, or too small for the networks.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", text):
        raise UserError(f"size {text!r} is neither like 224 nor like 800x1216")
    height, *width = map(int, text.split("x"))
    size = height, *(width or [height])
    if min(size) < 64:
        raise UserError(f"size {text!r}: the networks want at least 64 pixels a side")
    return size


def find_device(name: str | None) -> torch.device:
    """The device of that name; by default a GPU if there is one.

    Raises:
        UserError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is none; use cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there: {torch.cuda.device_count()} GPUs found")
    return device


def format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
