#!/usr/bin/env python
"""Plot which statistics the SW layers of trained networks chose, and when."""

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from sw_detectron.analysis import (
    Importance,
    average_ratios,
    average_ratios_figure,
    final_ratios_figure,
    importance_curves_figure,
    make_folder,
    read_importance,
    save_result,
)
from sw_detectron.errors import UserError
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

COLUMNS = ("moment", "statistic", "ratio")


def main(args: argparse.Namespace) -> None:
    runs = [read_importance(path, args.statistics) for path in args.runs]
    names = short_names([run.name for run in runs])
    output = make_folder(args.output)
    for name, run in zip(tqdm(names, unit="run", disable=None), runs):
        save_run(output, file_name(name), run)
    averages = {name: average_ratios(run.ratios) for name, run in zip(names, runs)}
    figure = average_ratios_figure(averages)
    save_result(output, "average", figure, ("run", *COLUMNS), flatten(averages))
    print(f"{output}/average.png: {len(runs)} network{'s' * (len(runs) > 1)}, mean over SW layers")
    for name, run in zip(names, runs):
        print(f"{output}/{file_name(name)}_layers.png: {len(run.ratios)} SW layers")


def save_run(output: Path, name: str, run: Importance) -> None:
    figure = final_ratios_figure(run.ratios)
    save_result(output, f"{name}_layers", figure, ("layer", *COLUMNS), flatten(run.ratios))
    if not run.curves:
        return
    rows = [
        (layer, moment, statistic, ratio, int(iteration))
        for layer, moment, statistic, series in flatten(run.curves)
        for iteration, ratio in zip(*series)
    ]
    figure = importance_curves_figure(run.curves)
    save_result(output, f"{name}_curves", figure, ("layer", *COLUMNS, "iteration"), rows)


def flatten(nested: dict[str, dict[str, dict]]) -> list[tuple]:
    """(layer or run, moment, statistic, value) of everything in it."""
    return [
        (name, moment, statistic, value)
        for name, moments in nested.items()
        for moment, by_statistic in moments.items()
        for statistic, value in by_statistic.items()
    ]


def short_names(paths: list[str]) -> list[str]:
    """The ends of paths, as long as is needed to tell them apart; numbered if nothing does."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    names = ["/".join(part[-length:]) for part in parts]
    counts, seen = Counter(map(file_name, names)), Counter()
    for index, name in enumerate(names):
        if counts[file_name(name)] > 1:
            seen[file_name(name)] += 1
            names[index] = f"{name} ({seen[file_name(name)]})"
    return names


def file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_")


def statistics(text: str) -> list[str]:
    names = text.split(",")
    if len(set(names)) < len(names) or not set(names) <= set(STATISTICS):
        raise argparse.ArgumentTypeError(f"{text!r} is no set out of {','.join(STATISTICS)}")
    return names


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_OR_CHECKPOINT", help="see below")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the figures")
    parser.add_argument(
        "--statistics",
        type=statistics,
        metavar="SET",
        help="what the weights of checkpoints stand for, such as bw,iw,ln",
    )
    return parser


if __name__ == "__main__":
    try:
        main(parser().parse_args())
    except UserError as error:
        sys.exit(f"{sys.argv[0]}: error: {error}")
