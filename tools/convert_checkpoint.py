#!/usr/bin/env python
"""Turn a pretrained BN ResNet, alone or in a detector, into one with Switchable Whitening."""

import argparse
import shlex
from pathlib import Path

from sw_detectron.checkpoint.convert import Images, convert_checkpoint
from sw_detectron.checkpoint.sources import SOURCES
from sw_detectron.checkpoint.writing import FORMATS, check_destination, write_checkpoint
from sw_detectron.cli import make_parser, positive, run, subset_of
from sw_detectron.layers import STATISTICS
from sw_detectron.layers.functional import WHITENING_METHODS
from sw_detectron.modeling import PLACEMENTS

EXAMPLES = """
examples:
  torchvision's or timm's ResNet-50 as the backbone of the paper's Mask R-CNN:
    %(prog)s resnet50-0676ba61.pth R-50-SW.pkl

  Detectron2's MSRA weights, whose BN statistics are folded away: find them on 1000 images
    %(prog)s R-50.pkl R-50-SW.pkl --calibrate datasets/coco/train2017 --num-images 1000

  a whole detector, whose heads stay as they are, with all five statistics, starting from the
  function that it computes now:
    %(prog)s model_final.pth detector-SW.pth --norm SWb --warm-start

  SW checkpoints that the paper's authors released:
    %(prog)s resnet50_sw.pth.tar R-50-SW.pkl

SRC is recognized by its content: a file of torch.save, of safetensors or a pickle of numpy arrays,
with the names of torchvision and timm, of Detectron2, Caffe2, He-style CIFAR networks or the
authors' release. No code in it is run.
"""


def main(args: argparse.Namespace) -> None:
    destination = Path(args.destination)
    output_format = check_destination(destination, args.output_format, args.force)
    conversion = convert_checkpoint(
        args.checkpoint,
        source=args.source,
        placement=args.placement,
        norm=args.norm,
        statistics=args.statistics,
        num_pergroup=args.num_pergroup,
        whitening=args.whitening,
        images=Images(args.calibrate, args.num_images) if args.calibrate else None,
        warm_start=args.warm_start,
        keep_classifier=args.keep_classifier,
    )
    # A bare backbone is to be found in a detector, where its names have a prefix.
    write_checkpoint(
        destination,
        conversion.model,
        output_format,
        matching_heuristics=not conversion.is_detector,
        carried=conversion.carried,
    )
    print(conversion.report())
    print(f"\nconfig for {destination}:")
    for key, value in ({"MODEL.WEIGHTS": str(destination)} | conversion.config).items():
        print(f"  {key} {shlex.quote(str(value))}")


def placement(text: str) -> str | list[int]:
    if text in PLACEMENTS:
        return text
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither one of {', '.join(PLACEMENTS)} nor a list such as 1,6,12"
        )
    return [int(part) for part in parts]


def parser() -> argparse.ArgumentParser:
    result = make_parser(__doc__, EXAMPLES)
    result.add_argument("checkpoint", metavar="SRC", help="the checkpoint to convert")
    result.add_argument("destination", metavar="DST", help="the file to write, .pkl or .pth")
    result.add_argument(
        "--source", choices=list(SOURCES), help="whose names SRC has (default: recognized)"
    )
    result.add_argument(
        "--placement",
        type=placement,
        help="which layers get SW: a name, or numbers such as 1,6,12 (default: imagenet; cifar for "
        "CIFAR networks; the layers that are SW already in the authors' checkpoints)",
    )
    result.add_argument(
        "--norm", help="norm of these layers, as MODEL.SW.NORM (default: SW, which is bw and iw)"
    )
    result.add_argument(
        "--statistics",
        type=subset_of(STATISTICS),
        default=(),
        metavar="SET",
        help="the set of statistics, such as bw,iw,bn (default: what --norm says)",
    )
    result.add_argument(
        "--num-pergroup",
        type=positive,
        metavar="G",
        help="channels that are whitened together (default: 16)",
    )
    result.add_argument(
        "--whitening",
        choices=WHITENING_METHODS,
        default="newton",
        help="how the inverse square root is taken (default: %(default)s)",
    )
    result.add_argument(
        "--calibrate",
        metavar="IMAGE_DIR",
        help="take the running statistics from the images below this folder",
    )
    result.add_argument(
        "--num-images",
        type=positive,
        default=1000,
        metavar="N",
        help="how many of them (default: %(default)s)",
    )
    result.add_argument(
        "--warm-start",
        action="store_true",
        help="start with nearly all weight on bn, so that the network computes what it did; for "
        "sets with bn",
    )
    result.add_argument(
        "--keep-classifier",
        action="store_true",
        help="keep the linear layer of a backbone, which no detector uses (CIFAR networks and "
        "the authors' release always keep it)",
    )
    result.add_argument(
        "--output-format", choices=FORMATS, help="of DST (default: what its ending says)"
    )
    result.add_argument("--force", action="store_true", help="replace DST if it exists")
    return result


if __name__ == "__main__":
    run(main, parser().parse_args())
