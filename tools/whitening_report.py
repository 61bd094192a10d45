#!/usr/bin/env python
"""Report how white the output of each SW layer is: is T enough, is G right?"""

import argparse

from sw_detectron.analysis import save_whitening, whitening_report, whitening_table
from sw_detectron.cli import (
    add_config_argument,
    add_overrides_argument,
    make_parser,
    output_folder,
    run,
)
from sw_detectron.engine import add_image_arguments, batches_of, load_model

EXAMPLES = """
examples:
  the SW layers of a trained detector on 32 images:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --weights output/sw/model_final.pth \\
        --images datasets/coco/val2017 --output output/whitening

  would T = 9 do better?
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --weights output/sw/model_final.pth \\
        --images datasets/coco/val2017 --output output/whitening MODEL.SW.NUM_ITERATIONS 9

Prints a table, and writes whitening as PNG, SVG and CSV (a row for each layer and image; condition,
residual and deviation of the worst group) to DIR.
"""


def main(args: argparse.Namespace) -> None:
    output = output_folder(args.output)
    cfg, model = load_model(args.config_file, args.weights, args.opts)
    report = whitening_report(model, batches_of(args.images, args, cfg, model))
    print(whitening_table(report))
    save_whitening(output, report)
    print(f"\n{output}/whitening.png: the same as curves, for each layer")


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    add_config_argument(parser)
    add = parser.add_argument
    add("--weights", required=True, metavar="FILE", help="a trained checkpoint")
    add("--images", required=True, metavar="DIR", help="folder of images")
    add("--output", required=True, metavar="DIR", help="folder of the results")
    add_image_arguments(parser, num_images=32)
    add_overrides_argument(parser)
    return parser


if __name__ == "__main__":
    run(main, parser().parse_args())
