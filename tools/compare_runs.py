#!/usr/bin/env python
"""Draw the curves of several runs into one picture, with what their SW layers chose on average."""

import argparse
from pathlib import Path

from sw_detectron.analysis import comparison_figure, read_metrics, save_figure
from sw_detectron.cli import make_parser, run
from sw_detectron.errors import UserError

EXAMPLES = """
examples:
  losses of a run with SW and one with SyncBN:
    %(prog)s output/sw output/syncbn --output losses.png

  losses and errors of classifiers:
    %(prog)s output/cifar10_resnet20_BN output/cifar10_resnet20_SW \\
        --metrics total_loss classification/top1_error --output cifar.png

A run is a folder with metrics.json or event files. Its curve has the folder's name.
"""


def main(args: argparse.Namespace) -> None:
    runs = {Path(folder).resolve().name: read_metrics(folder) for folder in args.runs}
    if len(runs) < len(args.runs):
        raise UserError("two runs have folders of the same name: rename one")
    output = Path(args.output)
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--output {args.output}: the name ends in none of .png, .svg, .pdf")
    save_figure(comparison_figure(runs, args.metrics), output)
    print(f"{output}: {', '.join(args.metrics)} of {len(runs)} runs")


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=["total_loss"],
        metavar="KEY",
        help="what to draw, by its key in metrics.json (default: total_loss)",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help=".png, .svg or .pdf")
    return parser


if __name__ == "__main__":
    run(main, parser().parse_args())
