#!/usr/bin/env python
"""Measure how far apart the layers of a network see two sets of images."""

import argparse

from tabulate import tabulate

from sw_detectron.analysis import domain_gap, domain_gap_figure, layer_features, save_result
from sw_detectron.cli import (
    add_networks_arguments,
    add_overrides_argument,
    config_for_each,
    make_parser,
    names_of_networks,
    output_folder,
    run,
)
from sw_detectron.engine import add_image_arguments, batches_of, load_model
from sw_detectron.errors import UserError

EXAMPLES = """
examples:
  one detector on two folders of images:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --weights output/sw/model_final.pth \\
        --source gta5/images --target cityscapes/leftImg8bit/val --output output/gap

  the paper's Fig. 3, SW beside BN: a --config and a --weights for each network:
    %(prog)s --config sw.yaml --weights output/sw/model_final.pth \\
        --config bn.yaml --weights output/bn/model_final.pth \\
        --source gta5/images --target cityscapes/leftImg8bit/val --output output/gap

In DIR: domain_gap as PNG, SVG and CSV. The MMD is squared, its estimate unbiased; it is 0 for two
sets of one distribution, up to the noise of the finite number of images.
"""


def main(args: argparse.Namespace) -> None:
    configs = config_for_each(args.config_file, args.weights)
    output = output_folder(args.output)
    gaps = {}
    names = names_of_networks(configs, args.weights)
    for name, config, weights in zip(names, configs, args.weights):
        cfg, model = load_model(config, weights, args.opts)
        features = {}
        for folder in (args.source, args.target):
            batches = batches_of(folder, args, cfg, model)
            features[folder] = layer_features(model, batches)
            if len(next(iter(features[folder].values()))) < 2:
                raise UserError(f"{folder!r} holds one image; give at least two of each set")
        gaps[name] = domain_gap(features[args.source], features[args.target])
    rows = [(name, *row) for name, by_layer in gaps.items() for row in by_layer.items()]
    header = ("network", "layer", "squared_mmd")
    print(tabulate(rows, headers=header, floatfmt=".5f"))
    save_result(output, "domain_gap", domain_gap_figure(gaps), header, rows)
    print(f"{output}/domain_gap.png: MMD² of each layer")


def parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLES)
    add_networks_arguments(parser)
    add = parser.add_argument
    add("--source", required=True, metavar="DIR", help="folder of images, at least two")
    add("--target", required=True, metavar="DIR", help="folder of images, at least two")
    add_image_arguments(parser, num_images=200)
    add_overrides_argument(parser)
    return parser


if __name__ == "__main__":
    run(main, parser().parse_args())
