"""The flags of tools that show a folder of images to a network."""

import argparse
from collections.abc import Iterator

from detectron2.config import CfgNode
from torch import Tensor, nn

from ..cli import positive
from ..data.images import image_batches
from ..errors import UserError


def add_image_arguments(parser: argparse.ArgumentParser, num_images: int) -> None:
    """Add --num-images, with its default, --size and --batch-size."""
    for flag, default, text in (
        ("--num-images", num_images, "at most so many of a folder"),
        ("--size", 224, "height and width of the images, in pixels"),
        ("--batch-size", 8, "images that the network sees at once"),
    ):
        parser.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{text} (default: {default})"
        )


def batches_of(
    directory: str, args: argparse.Namespace, cfg: CfgNode, model: nn.Module
) -> Iterator[Tensor]:
    """The images of a folder as `model` takes them, (N, 3, size, size); see `image_batches`.

    Raises:
        UserError: the backbone cannot take this size, or there are no images.
    """
    divisor = max(1, model.backbone.size_divisibility)
    if args.size % divisor:
        raise UserError(f"--size {args.size}: the backbone takes multiples of {divisor}")
    return image_batches(
        directory,
        args.num_images,
        args.size,
        args.batch_size,
        cfg.MODEL.PIXEL_MEAN,
        cfg.MODEL.PIXEL_STD,
        cfg.INPUT.FORMAT,
    )
