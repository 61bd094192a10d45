#!/usr/bin/env python
"""Turn the nuclei of BBBC038 (Data Science Bowl 2018, stage 1) into a folder in COCO's format."""

import argparse
from pathlib import Path

from sw_detectron.cli import make_parser, run
from sw_detectron.config import config_folder
from sw_detectron.data.nuclei import prepare_nuclei

EXAMPLES = """
examples:
  the unpacked download, and a training on it:
    %(prog)s stage1_train datasets/nuclei
    python tools/train_net.py --config nuclei_mask_rcnn_R18_FPN_SW.yaml \\
        DATASETS.COCO_FOLDER datasets/nuclei

Writes 547 images to train/ and 117 to val/, and annotations/{train,val}.json with a mask for each
nucleus as RLE; train_fluorescence.json and the like are the parts of one kind of microscopy.
"""


def main(args: argparse.Namespace) -> None:
    val = (config_folder() / "nuclei/val_images.txt").read_text().split()
    for name, images in prepare_nuclei(args.download, args.output, val).items():
        print(f"{args.output}/annotations/{name}.json: {images} images")


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("download", type=Path, metavar="STAGE1_TRAIN", help="folder of the images")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    return parser


if __name__ == "__main__":
    run(main, parser().parse_args())
