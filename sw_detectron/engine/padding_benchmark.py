"""Evaluates detectors on images that are padded as if they were batched with larger ones."""

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.structures import ImageList
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from ..analysis.corruption import main_metrics
from ..cli import config_for_each, names_of_networks, output_folder
from ..data.slices import register_spread
from ..errors import UserError
from ..modeling.padding import set_padding
from ..report.tables import finite, write_text
from .corruption import evaluate
from .data_check import check_data, check_datasets
from .setup import evaluation_config, trained_model


def padding_benchmark(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure models for each treatment of padding and each size of canvas; write `results.json`
    and `results.md`.

    The canvas of an image is larger than the image, which is a batch of its own, by so many percent
    of its height and of its width.

    Args:
        args: `config_file`, a list or None; `weights`, a list; `output`, a folder; `paddings`, see
            `set_padding`; `larger`, numbers in percent; `images`, how many, spread evenly over the
            test data, or None for all; `opts`, the overrides.

    Returns:
        A row for each: `model`, `padding`, `larger`, and the metrics, see `main_metrics`.

    Raises:
        UserError: something that was given is wrong or missing.
    """
    configs = config_for_each(args.config_file, args.weights)
    models = [*zip(names_of_networks(configs, args.weights), configs, args.weights)]
    for _, *model in models:  # all of them before the first is measured
        _prepare(*model, args)
    folder = output_folder(args.output)
    rows = []
    cases = list(itertools.product(args.paddings, args.larger))
    with tqdm(total=len(models) * len(cases), unit="evaluation") as progress:
        for name, config_file, weights in models:
            # Again, since data sets such as own_val are registered for the config read last.
            cfg = _prepare(config_file, weights, args)
            model = trained_model(cfg)
            for padding, larger in cases:
                set_padding(model, padding)
                with enlarged(model, larger):
                    metrics = main_metrics(evaluate(cfg, model, None))
                rows.append({"model": name, "padding": padding, "larger": larger} | metrics)
                progress.update()
    write_text(folder / "results.json", json.dumps([*map(_finite, rows)], indent=2) + "\n")
    write_text(folder / "results.md", _table(rows) + "\n")
    return rows


def _prepare(config_file: str, weights: str, args: argparse.Namespace) -> CfgNode:
    """A model's config, whose DATASETS.TEST is what it is evaluated on."""
    cfg = evaluation_config(config_file, weights, args.opts)
    if args.images is not None:
        cfg.DATASETS.TEST = (register_spread(cfg.DATASETS.TEST[0], args.images),)
        check_datasets(cfg, training=False)
    check_data(cfg, training=False)
    return cfg


@contextmanager
def enlarged(model: nn.Module, larger: float) -> Iterator[None]:
    """Inside, a detector puts its images on a canvas that is larger than they need.

    Args:
        model: of a meta-architecture with `preprocess_image`.
        larger: by how many percent of their height and of their width.

    Raises:
        UserError: the model has no such method.
    """
    if not hasattr(model, "preprocess_image"):
        raise UserError(f"{type(model).__name__} is no detector whose images can be padded further")
    preprocess, divisor = model.preprocess_image, max(1, model.backbone.size_divisibility)

    def preprocess_and_enlarge(inputs: list[dict]) -> ImageList:
        images = preprocess(inputs)
        # As many as a larger neighbour would have, which a backbone can divide.
        below, beside = (
            round(side * larger / 100 / divisor) * divisor for side in images.tensor.shape[-2:]
        )
        return ImageList(F.pad(images.tensor, (0, beside, 0, below)), images.image_sizes)

    model.preprocess_image = preprocess_and_enlarge
    try:
        yield
    finally:
        del model.preprocess_image


def _finite(row: Mapping[str, object]) -> dict[str, object]:
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    return texts | finite({key: value for key, value in row.items() if key not in texts})


def _table(rows: list[dict[str, object]]) -> str:
    """A row for each model and treatment, a column for each metric and canvas."""
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        key = row["model"], row["padding"]
        line = lines.setdefault(key, {"model": key[0].replace("|", r"\|"), "padding": key[1]})
        for metric, value in row.items():
            if metric not in ("model", "padding", "larger"):
                line[f"{metric}, +{row['larger']:g} %"] = f"{value:.1f}"
    return tabulate([*lines.values()], headers="keys", tablefmt="github", disable_numparse=True)
