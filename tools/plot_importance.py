#!/usr/bin/env python
"""Plot which statistics the SW layers of trained networks chose, and when."""

import argparse

from sw_detectron.analysis import read_importance, save_importance
from sw_detectron.cli import make_parser, output_folder, run, subset_of
from sw_detectron.layers import STATISTICS

EXAMPLES = """
examples:
  learning curves and final ratios of a run, and their average over the layers:
    %(prog)s output/demo --output output/importance

  several runs and checkpoints side by side:
    %(prog)s output/run_1 output/run_2 model_final.pth --output output/importance

A run is a folder with metrics.json or event files, or such a file. A checkpoint does not name its
statistics: two weights a layer are taken for bw,iw, five for all, three for bn,in,ln if the running
covariance is diagonal and else for bw,iw,ln, and one for bw, bn or iw by its running covariance.
--statistics says otherwise.

For each run NAME, in DIR: NAME_curves (Figs. 6 and 7 of the paper) and NAME_layers, the final
ratios; for all of them: average (Figs. 1b and 8). Each as PNG, SVG and, with the numbers, CSV.
"""


def main(args: argparse.Namespace) -> None:
    networks = [read_importance(path, args.statistics) for path in args.runs]
    output = output_folder(args.output)
    names = save_importance(output, networks)
    plural = "s" * (len(names) > 1)
    print(f"{output}/average.png: {len(names)} network{plural}, mean over SW layers")
    for name, network in zip(names, networks):
        print(f"{output}/{name}_layers.png: {len(network.ratios)} SW layers")


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN_OR_CHECKPOINT", help="see below")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the figures")
    parser.add_argument(
        "--statistics",
        type=subset_of(STATISTICS),
        metavar="SET",
        help="what the weights of checkpoints stand for, such as bw,iw,ln",
    )
    return parser


if __name__ == "__main__":
    run(main, parser().parse_args())
