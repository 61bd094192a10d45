#!/usr/bin/env python
"""Measure what Switchable Whitening costs, beside other normalization layers."""

import argparse
import os
import sys
from collections.abc import Iterable

# PyTorch's profiler, which watches the memory on a CPU, would announce its every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from sw_detectron.benchmark import arguments
from sw_detectron.benchmark.backends import WHITENING_METHODS
from sw_detectron.benchmark.drawing import growth_figure, ratio_figure
from sw_detectron.benchmark.host import benchmark_host
from sw_detectron.benchmark.layers import DEFAULT_SETS, benchmark_layers
from sw_detectron.benchmark.models import MODELS, benchmark_models
from sw_detectron.benchmark.operations import Growth, measure_growth
from sw_detectron.benchmark.results import Result, results_table, write_results
from sw_detectron.cli import make_parser, output_folder, positive, run, subset_of
from sw_detectron.layers import STATISTICS

EXAMPLES = """
examples:
  layers at shapes from classification and detection, on the GPU if there is one:
    %(prog)s layers

  the layers of a ResNet-50 at 224 px, 64 images, in both memory formats, as mixed precision
  feeds them:
    %(prog)s layers --shapes imagenet --batch 64 --dtype bfloat16 --memory-format both

  one shape of your own, one set of statistics:
    %(prog)s layers --shapes 2x96x100x152 --statistics bw,iw,ln --whitening newton

  training steps of ResNet-50 with and without SW, in bfloat16 and channels_last:
    %(prog)s models --model resnet50 --amp --channels-last

  a training step of the paper's Mask R-CNN on one small image:
    %(prog)s models --model mask_rcnn --batch 1 --size 320

  a training step of segmentation with seven SW layers and with fourteen:
    %(prog)s models --model semantic

  what a layer costs before there is anything to compute:
    %(prog)s host

  does the number of operations grow as the paper says?
    %(prog)s flops

Times are medians over interleaved rounds, ratios are taken round by round, and numbers in
parentheses are their quartiles.
"""


def layers(args: argparse.Namespace, device: torch.device) -> list[Result]:
    batch = args.batch or (64 if device.type == "cuda" else 8)
    return benchmark_layers(
        arguments.parse_shapes(args.shapes, batch),
        device,
        arguments.DTYPES[args.dtype],
        all_or_one(arguments.MEMORY_FORMATS, args.memory_format),
        args.statistics or DEFAULT_SETS,
        all_or_one(WHITENING_METHODS, args.whitening),
        args.num_pergroup,
        args.rounds,
        args.warmup,
    )


def models(args: argparse.Namespace, device: torch.device) -> list[Result]:
    return benchmark_models(
        all_or_one(MODELS, args.model),
        device,
        args.batch,
        arguments.parse_size(args.size) if args.size else None,
        all_or_one(arguments.MEMORY_FORMATS, args.memory_format),
        args.amp,
        args.rounds,
        args.warmup,
    )


def host(args: argparse.Namespace, device: torch.device) -> list[Result]:
    return benchmark_host(
        device,
        args.statistics or DEFAULT_SETS,
        all_or_one(WHITENING_METHODS, args.whitening),
        args.num_pergroup,
        args.rounds,
        args.warmup,
    )


def flops(args: argparse.Namespace, device: torch.device) -> list[Growth]:
    return measure_growth()


def all_or_one(names: Iterable[str], chosen: str) -> list[str]:
    return list(names) if chosen in ("both", "all") else [chosen]


def main(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    output = output_folder(args.output)  # before hours of work, not after
    device = arguments.find_device(args.device)
    results = args.run(args, device)
    print(results_table(results))
    figure = growth_figure(results) if args.run is flops else ratio_figure(results)
    settings = {key: value for key, value in vars(args).items() if key != "run"}
    write_results(output, args.benchmark, results, figure, settings, device)
    print(f"\n{output}/results.json: the numbers\n{output}/{args.benchmark}.png: their picture")
    if args.run is flops and not all(growth.agrees for growth in results):
        sys.exit(f"{sys.argv[0]}: the growth contradicts O(N C G max(HW, G))")


def parser() -> argparse.ArgumentParser:
    top = make_parser(__doc__, EXAMPLES)
    commands = top.add_subparsers(
        dest="benchmark", required=True, metavar="layers|models|host|flops"
    )

    one = add_command(commands, layers, "time and memory of normalization layers")
    one.add_argument(
        "--shapes",
        default="table",
        help="inputs: table, imagenet, detection, or NxCxHxW[,NxCxHxW...] (default: %(default)s)",
    )
    one.add_argument(
        "--batch",
        type=positive,
        help="images in the shapes of --shapes imagenet (default: 8, on a GPU 64)",
    )
    one.add_argument(
        "--dtype",
        choices=list(arguments.DTYPES),
        default="float32",
        help="of the inputs; parameters are float32 (default: %(default)s)",
    )
    add_sw_flags(one)
    add_format_flags(one)
    add_round_flags(one)

    two = add_command(commands, models, "training steps of whole networks, with SW and without")
    two.add_argument(
        "--model",
        choices=[*MODELS, "all"],
        default="all",
        help="the network (default: %(default)s)",
    )
    two.add_argument(
        "--batch",
        type=positive,
        help="images (default: 8 for resnet50, 1 for mask_rcnn and 2 for semantic, on a GPU 64, 2 "
        "and 2)",
    )
    two.add_argument(
        "--size",
        metavar="PIXELS",
        help="SIZE or HEIGHTxWIDTH (default: 224 for resnet50, 320 for mask_rcnn and 233 for "
        "semantic, on a GPU 224, 800x1216 and 713)",
    )
    two.add_argument("--amp", action="store_true", help="autocast to bfloat16")
    add_format_flags(two)
    add_round_flags(two)

    three = add_command(commands, host, "what a layer costs where there is nothing to compute")
    add_sw_flags(three)
    add_round_flags(three)

    add_command(commands, flops, "how the number of operations grows with N, C, G and HW")
    return top


def add_command(commands, function, summary: str) -> argparse.ArgumentParser:
    """A sub-command with the flags that all of them have."""
    command = commands.add_parser(function.__name__, help=summary, description=summary)
    command.set_defaults(run=function)
    command.add_argument(
        "--output",
        default=f"output/benchmark/{function.__name__}",
        metavar="DIR",
        help="folder of results.json and of the picture (default: %(default)s)",
    )
    command.add_argument("--threads", type=positive, help="CPU threads (default: PyTorch's)")
    command.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    return command


def add_sw_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--statistics",
        action="append",
        type=subset_of(STATISTICS),
        metavar="SET",
        help="a set of SW, such as bw,iw; may be given several times "
        f"(default: {' and '.join(map(','.join, DEFAULT_SETS))})",
    )
    command.add_argument(
        "--whitening",
        choices=[*WHITENING_METHODS, "both"],
        default="both",
        help="how SW takes the inverse square root (default: %(default)s)",
    )
    command.add_argument(
        "--num-pergroup",
        type=positive,
        default=16,
        metavar="G",
        help="channels that SW whitens together (default: %(default)s)",
    )


def add_format_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--memory-format",
        choices=[*arguments.MEMORY_FORMATS, "both"],
        default="contiguous",
        help="of feature maps (default: %(default)s)",
    )
    command.add_argument(
        "--channels-last",
        dest="memory_format",
        action="store_const",
        const="channels_last",
        help="short for --memory-format channels_last",
    )


def add_round_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rounds", type=positive, default=25, help="rounds that count (default: %(default)s)"
    )
    command.add_argument(
        "--warmup",
        type=positive,
        default=3,
        help="rounds before them that do not (default: %(default)s)",
    )


if __name__ == "__main__":
    run(main, parser().parse_args())
