#!/usr/bin/env python
"""Detect objects in images and videos, segment or classify them, and draw the results."""

import argparse

from sw_detectron.cli import add_config_argument, fraction, make_parser, positive, run
from sw_detectron.engine.prediction import predict

EXAMPLES = """
examples:
  two images, with the weights that a training run has left, which carry its config and classes:
    %(prog)s --weights output/model_final.pth street.jpg kitchen.jpg --output output/pictures

  all images and videos of a folder, doubtful objects too, on the CPU, with weights of another kind:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --weights detector.pkl \\
        holiday/ --output output/pictures --confidence 0.3 MODEL.DEVICE cpu

predictions.json in the folder of the output holds the results in COCO's format. Files that cannot
be read are named and left out, and the exit status is then 1.
"""


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    add_config_argument(parser)
    parser.add_argument("--weights", metavar="FILE", help="(default: the config's MODEL.WEIGHTS)")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="image files, video files, and folders of them; KEY VALUE overrides of the config "
        "may follow",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of what is written")
    parser.add_argument(
        "--confidence",
        type=fraction,
        help="lowest score, 0 to 1, of what to show and to write (default: 0.5 for objects, 0 for "
        "the five best classes of a classifier)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=1,
        metavar="K",
        help="images or frames that the model is given at once; the results are the same, and a "
        "GPU is faster (default: 1)",
    )
    return parser


if __name__ == "__main__":
    run(predict, parser().parse_intermixed_args())
