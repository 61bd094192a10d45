#!/usr/bin/env python
"""Train a small Mask R-CNN with SW on the generated data set, evaluate it, and draw the result."""

import argparse
from pathlib import Path

from sw_detectron.cli import make_parser
from sw_detectron.engine import launch, train_or_evaluate
from sw_detectron.report import plot_training_curves
from sw_detectron.tasks.detection.drawing import draw_predictions

EXAMPLES = """
examples:
    %(prog)s
    %(prog)s --output output/again
"""

CONFIG = "shapes_mask_rcnn_R18_FPN_SW.yaml"


def demo(args: argparse.Namespace) -> None:
    output = Path(args.output)
    (output / "metrics.json").unlink(missing_ok=True)  # the trainer appends to it
    results = train_or_evaluate(args)
    draw_predictions(
        "shapes_val", output / "inference/coco_instances_results.json", output / "predictions.png"
    )
    plot_training_curves(output / "metrics.json", output / "curves.png")
    print(
        f"\nbox AP {results['bbox']['AP']:.1f}, mask AP {results['segm']['AP']:.1f} on shapes_val"
    )
    print(f"{output}/predictions.png: ground truth beside predictions")
    print(f"{output}/curves.png: the loss, and what each SW layer chose")
    print(f"{output}/report.html: all of it on one page")


if __name__ == "__main__":
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--output", default="output/demo", help="folder (default: %(default)s)")
    args = parser.parse_args()
    args.config_file, args.opts = CONFIG, ["OUTPUT_DIR", args.output]
    args.eval_only = args.resume = False
    args.num_gpus, args.num_machines, args.machine_rank, args.dist_url = 1, 1, 0, None
    launch(demo, args)
