#!/usr/bin/env python
"""Report how white the output of each SW layer is: is T enough, is G right?"""

import argparse
import sys

from sw_detectron.analysis import (
    make_folder,
    save_result,
    whitening_figure,
    whitening_report,
    whitening_table,
)
from sw_detectron.engine import add_image_arguments, batches_of, load_model
from sw_detectron.errors import UserError

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

HEADER = (
    "layer",
    "image",
    "condition",
    "residual",
    "deviation",
    "input_correlation",
    "correlation",
    "group_correlation",
)


def main(args: argparse.Namespace) -> None:
    output = make_folder(args.output)
    cfg, model = load_model(args.config, args.weights, args.opts)
    batches = batches_of(args.images, args, cfg, model)
    report = whitening_report(model, batches)
    print(whitening_table(report))
    rows = []
    for name, layer in report.items():
        worst = [t.amax(dim=1) for t in (layer.condition, layer.residual, layer.deviation)]
        columns = [*worst, layer.input_correlation, layer.correlation, layer.group_correlation]
        rows += [(name, i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns)))]
    save_result(output, "whitening", whitening_figure(report), HEADER, rows)
    print(f"\n{output}/whitening.png: the same as curves, for each layer")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="path or bare name")
    add("--weights", required=True, metavar="FILE", help="a trained checkpoint")
    add("--images", required=True, metavar="DIR", help="folder of images")
    add("--output", required=True, metavar="DIR", help="folder of the results")
    add_image_arguments(parser, num_images=32)
    add("opts", nargs="*", metavar="KEY VALUE", help="overrides of the config's keys")
    return parser


if __name__ == "__main__":
    try:
        main(parser().parse_args())
    except UserError as error:
        sys.exit(f"{sys.argv[0]}: error: {error}")
