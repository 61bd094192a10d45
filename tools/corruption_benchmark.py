#!/usr/bin/env python
"""Measure what models keep of their performance when the test images are corrupted."""

import argparse
from pathlib import Path

from detectron2.utils import comm

from sw_detectron.cli import (
    add_networks_arguments,
    add_num_gpus_argument,
    add_overrides_argument,
    add_test_images_argument,
    make_parser,
)
from sw_detectron.data.corruptions import CORRUPTIONS
from sw_detectron.engine import corruption_benchmark, launch

EXAMPLES = f"""
examples:
  a detector, under all 15 corruptions in all 5 severities, on two GPUs:
    %(prog)s --weights output/sw/model_final.pth --output output/corruptions --num-gpus 2

  SW beside BN, on 500 images of the test data:
    %(prog)s --weights output/sw/model_final.pth --weights output/bn/model_final.pth \\
        --images 500 --output output/corruptions

  a glance, at two corruptions in three severities:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --weights model_final.pth \\
        --corruptions fog,brightness --severities 1,3,5 --output output/corruptions

In DIR: results.json, results.md and corruptions.png, and in measured/ every single measurement.
The same command continues where it was interrupted.

The corruptions are {", ".join(CORRUPTIONS[:8])},
{", ".join(CORRUPTIONS[8:])}.
"""


def main(args: argparse.Namespace) -> None:
    corruption_benchmark(args)
    if comm.is_main_process():
        print("\n" + (Path(args.output) / "results.md").read_text(), end="")
        print(f"\n{args.output}/corruptions.png: over the severity")


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    add_networks_arguments(parser)
    add = parser.add_argument
    add("--corruptions", metavar="NAME,…", help="some of them (default: all 15)")
    add("--severities", metavar="S,…", help="some of 1,2,3,4,5 (default: all)")
    add_test_images_argument(parser)
    add_num_gpus_argument(parser)
    add_overrides_argument(parser)
    parser.set_defaults(num_machines=1, machine_rank=0, dist_url="auto")
    return parser


if __name__ == "__main__":
    launch(main, parser().parse_args())
