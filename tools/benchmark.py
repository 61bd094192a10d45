#!/usr/bin/env python
"""Measure what Switchable Whitening costs, beside other normalization layers."""

import argparse
import os
import sys
from pathlib import Path

# PyTorch's profiler, which watches the memory on a CPU, would announce its every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from sw_detectron import benchmark
from sw_detectron.errors import UserError

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

  does the number of operations grow as the paper says?
    %(prog)s flops

Times are medians over interleaved rounds, ratios are taken round by round, and numbers in
parentheses are their quartiles.
"""


def layers(args: argparse.Namespace) -> list[benchmark.Result]:
    device = benchmark.find_device(args.device)
    batch = args.batch or (64 if device.type == "cuda" else 8)
    return benchmark.benchmark_layers(
        benchmark.parse_shapes(args.shapes, batch),
        device,
        benchmark.DTYPES[args.dtype],
        memory_formats(args),
        [benchmark.parse_statistics(text) for text in args.statistics or DEFAULT_STATISTICS],
        benchmark.WHITENING_METHODS if args.whitening == "both" else [args.whitening],
        args.num_pergroup,
        args.rounds,
        args.warmup,
    )


def models(args: argparse.Namespace) -> list[benchmark.Result]:
    return benchmark.benchmark_models(
        benchmark.MODELS if args.model == "all" else [args.model],
        benchmark.find_device(args.device),
        args.batch,
        benchmark.parse_size(args.size) if args.size else None,
        memory_formats(args),
        args.amp,
        args.rounds,
        args.warmup,
    )


def flops(args: argparse.Namespace) -> list[benchmark.Growth]:
    return benchmark.measure_growth()


DEFAULT_STATISTICS = ("bw,iw", "bw,iw,bn,in,ln")


def memory_formats(args: argparse.Namespace) -> list[str]:
    both = args.memory_format == "both"
    return list(benchmark.MEMORY_FORMATS) if both else [args.memory_format]


def main(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    output = Path(args.output)
    try:
        output.mkdir(parents=True, exist_ok=True)  # before hours of work, not after
    except OSError as error:
        raise UserError(f"--output {args.output}: {error.strerror}") from None
    results = args.run(args)
    growing = args.run is flops
    print(benchmark.growth_table(results) if growing else benchmark.results_table(results))
    machine = benchmark.describe_machine(benchmark.find_device(args.device))
    settings = {key: value for key, value in vars(args).items() if key != "run"}
    benchmark.write_results(output, args.benchmark, results, settings, machine)
    print(f"\n{output}/results.json: the numbers\n{output}/{args.benchmark}.png: their picture")
    if growing and not all(growth.agrees for growth in results):
        sys.exit(f"{sys.argv[0]}: the growth contradicts O(N C G max(HW, G))")


def positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return value


def parser() -> argparse.ArgumentParser:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    top = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, **style)
    commands = top.add_subparsers(dest="benchmark", required=True, metavar="layers|models|flops")

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
        "--statistics",
        action="append",
        metavar="SET",
        help="a set of SW, such as bw,iw; may be given several times "
        f"(default: {' and '.join(DEFAULT_STATISTICS)})",
    )
    one.add_argument(
        "--whitening",
        choices=[*benchmark.WHITENING_METHODS, "both"],
        default="both",
        help="how SW takes the inverse square root (default: %(default)s)",
    )
    one.add_argument(
        "--num-pergroup",
        type=positive,
        default=16,
        metavar="G",
        help="channels that SW whitens together (default: %(default)s)",
    )
    one.add_argument(
        "--dtype",
        choices=list(benchmark.DTYPES),
        default="float32",
        help="of the inputs; parameters are float32 (default: %(default)s)",
    )
    add_timing_flags(one)

    two = add_command(commands, models, "training steps of whole networks, with SW and without")
    two.add_argument(
        "--model",
        choices=[*benchmark.MODELS, "all"],
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
    add_timing_flags(two)

    add_command(commands, flops, "how the number of operations grows with N, C, G and HW")
    return top


def add_command(commands, run, summary: str) -> argparse.ArgumentParser:
    """A sub-command with the flags that all of them have."""
    command = commands.add_parser(run.__name__, help=summary, description=summary)
    command.set_defaults(run=run)
    command.add_argument(
        "--output",
        default=f"output/benchmark/{run.__name__}",
        metavar="DIR",
        help="folder of results.json and of the picture (default: %(default)s)",
    )
    command.add_argument("--threads", type=positive, help="CPU threads (default: PyTorch's)")
    command.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    return command


def add_timing_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--memory-format",
        choices=[*benchmark.MEMORY_FORMATS, "both"],
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
    try:
        main(parser().parse_args())
    except UserError as error:
        sys.exit(f"{sys.argv[0]}: error: {error}")
    except torch.cuda.OutOfMemoryError:
        sys.exit(f"{sys.argv[0]}: error: the GPU's memory does not suffice; try a smaller --batch")
