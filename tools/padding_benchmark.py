#!/usr/bin/env python
"""Measure what padding costs detectors: AP with each image on a larger canvas, as it is beside
larger neighbours in a batch."""

import argparse
from pathlib import Path

from sw_detectron.cli import (
    add_networks_arguments,
    add_overrides_argument,
    add_test_images_argument,
    make_parser,
    percentages,
    run,
    subset_of,
)
from sw_detectron.engine import padding_benchmark
from sw_detectron.layers.padding import PADDINGS

EXAMPLES = """
examples:
  a detector, its images as they are and on canvases larger by half and by one and a half:
    %(prog)s --weights output/sw/model_final.pth --output output/padding

  two of them, on 100 images, without the largest canvas:
    %(prog)s --weights output/sw/model_final.pth --weights output/bn/model_final.pth \\
        --images 100 --larger 0,50 --output output/padding

In DIR: results.json and results.md.
"""


def main(args: argparse.Namespace) -> None:
    padding_benchmark(args)
    print("\n" + (Path(args.output) / "results.md").read_text(), end="")


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    add_networks_arguments(parser)
    add = parser.add_argument
    add(
        "--larger",
        type=percentages,
        default=(0.0, 50.0, 150.0),
        metavar="PERCENT,…",
        help="by how much canvases are larger than images (default: 0,50,150)",
    )
    add(
        "--paddings",
        type=subset_of(PADDINGS),
        default=PADDINGS,
        metavar="NAME,…",
        help=f"some values of MODEL.SW.PADDING (default: {','.join(PADDINGS)})",
    )
    add_test_images_argument(parser)
    add_overrides_argument(parser)
    return parser


if __name__ == "__main__":
    run(main, parser().parse_args())
