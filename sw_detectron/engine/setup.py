"""From a command line to a checked config."""

import argparse
import logging
import os
from collections.abc import Sequence

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.engine import default_argument_parser, default_setup
from detectron2.modeling import build_model
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch import nn

from ..checkpoint import Checkpointer
from ..checkpoint.reading import fetched
from ..cli import add_config_argument, add_num_gpus_argument, make_parser
from ..config import add_sw_config, default_output_dir, find_config, flatten, keys_of_user
from ..data.image_folders import register_configured_images
from ..errors import UserError, one_line
from ..task import all_tasks, find_task
from .carried import adopt_config
from .data_check import check_data, check_datasets, logs_held_back, release_logs
from .schedule import epochs_to_iterations
from .values import check_output_folder, check_values, named_by_key

logger = logging.getLogger(__name__)


def argument_parser(description: str, examples: str) -> argparse.ArgumentParser:
    """Detectron2's standard flags, with `--config` beside `--config-file`."""
    parser = make_parser(
        description,
        examples,
        parents=[default_argument_parser()],
        add_help=False,
        conflict_handler="resolve",  # our --config-file replaces the parent's
    )
    add_num_gpus_argument(parser)
    add_config_argument(parser)
    return parser


def load_config(config_file: str, opts: list[str]) -> CfgNode:
    """Read a config, apply KEY VALUE overrides, and check what can be checked without building.

    Args:
        config_file: path, or bare name of one of the package's; "" for the one that the weights
            carry, which an override names.
        opts: keys and values in turn.

    Raises:
        UserError: a file, a key or a value is wrong.
    """
    if len(opts) % 2:
        raise UserError(f"overrides come in pairs KEY VALUE; got {' '.join(opts)!r}")
    cfg = get_cfg()
    add_sw_config(cfg)
    given = set(opts[::2])
    if config_file:
        given |= _merge_file(cfg, config_file)
    else:
        adopt_config(cfg, dict(zip(opts[::2], opts[1::2])).get("MODEL.WEIGHTS", ""))
        given |= set(flatten(cfg))
    for key, value in zip(opts[::2], opts[1::2]):
        try:
            cfg.merge_from_list([key, value])
        except Exception as error:
            raise UserError(f"override {key} {value}: {one_line(error)}") from None
    if cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
    for key in ("TRAIN", "TEST"):
        names = cfg.DATASETS[key]
        if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
            raise UserError(f"DATASETS.{key} {names!r} must be a list of names of data sets")
    register_configured_images(cfg)
    for task in all_tasks():
        task.register_datasets(cfg)
        task.follow_data(cfg, given)
    return cfg


def _merge_file(cfg: CfgNode, config_file: str) -> set[str]:
    """Read a file into `cfg`; the keys that the user's own files set."""
    path = find_config(config_file)
    if path.suffix == ".py":
        raise UserError(
            f"config {str(path)!r} is a Python config; use tools/lazyconfig_train_net.py for it"
        )
    cfg.OUTPUT_DIR = default_output_dir(path)  # unless the file or an override sets another
    try:
        cfg.merge_from_file(str(path))
    except UserError:
        raise
    except Exception as error:  # YAML has many kinds of errors, and yacs asserts
        raise UserError(f"config {str(path)!r}: {one_line(error)}") from None
    return keys_of_user(str(path))


def load_model(config_file: str, weights: str, opts: list[str]) -> tuple[CfgNode, nn.Module]:
    """A trained model in evaluation mode, and its config.

    Args:
        config_file, opts: see `load_config`.
        weights: path of a checkpoint.

    Raises:
        UserError: a file, a key or a value is wrong.
    """
    cfg = load_config(config_file, [*opts, "MODEL.WEIGHTS", weights])
    return cfg, trained_model(cfg)


def evaluation_config(config_file: str, weights: str, opts: Sequence[str]) -> CfgNode:
    """The config of a model that is to be evaluated on the first data set of DATASETS.TEST alone.

    Args:
        config_file, weights, opts: see `load_model`.

    Raises:
        UserError: the config asks for something that is not there.
    """
    cfg = load_config(config_file, [*opts, "MODEL.WEIGHTS", weights])
    if not cfg.DATASETS.TEST:
        raise UserError("DATASETS.TEST is empty: name a registered data set to evaluate on")
    cfg.DATASETS.TEST = cfg.DATASETS.TEST[:1]
    check_values(cfg, training=False)
    check_datasets(cfg, training=False)
    check_weights("MODEL.WEIGHTS", weights, cfg.OUTPUT_DIR, resume=False)
    return cfg


def trained_model(cfg: CfgNode) -> nn.Module:
    """The model of a config in evaluation mode, with MODEL.WEIGHTS.

    Raises:
        UserError: the file, or a value of the config, is wrong.
    """
    check_weights("MODEL.WEIGHTS", cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR, resume=False)
    with named_by_key(cfg):
        model = build_model(cfg)
    Checkpointer(model, cfg=cfg).load(cfg.MODEL.WEIGHTS)
    return model.eval()


def setup(args: argparse.Namespace) -> CfgNode:
    """The frozen config of a run; logging, seeds and OUTPUT_DIR are set up.

    Raises:
        UserError: the config asks for something that is not there.
    """
    if not args.config_file and not args.eval_only:
        raise UserError("--config is missing: name the config to train")
    with logs_held_back() as found_in_config:
        cfg = load_config(args.config_file, args.opts)
    check_values(cfg, training=not args.eval_only)
    if cfg.TEST.AUG.ENABLED:
        with named_by_key(cfg):
            find_task(cfg).trainer.check_augmentation(cfg)
    check_datasets(cfg, training=not args.eval_only)
    check_weights("MODEL.WEIGHTS", cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR, args.resume)
    if not args.eval_only:
        check_amp("SOLVER.AMP.ENABLED", cfg.SOLVER.AMP.ENABLED, cfg.MODEL.DEVICE)
    schedule = "" if args.eval_only else epochs_to_iterations(cfg, args.opts[::2])
    with logs_held_back() as found_in_data:
        check_data(cfg, training=not args.eval_only)
    check_output_folder("OUTPUT_DIR", cfg.OUTPUT_DIR)
    cfg.freeze()
    if args.config_file:
        args.config_file = str(find_config(args.config_file))
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="sw_detectron")
    default_setup(cfg, args)
    release_logs([*found_in_config, *found_in_data])
    if schedule:
        logger.info(schedule)
    if cfg.MODEL.DEVICE == "cpu":
        logger.info("Running on the CPU.")
    if not cfg.MODEL.WEIGHTS and not args.eval_only:
        logger.info("MODEL.WEIGHTS is empty: training from scratch.")
    return cfg


def check_amp(key: str, enabled: bool, device: str) -> None:
    """Detectron2's mixed precision wants a GPU, and says so only in the first iteration.

    Raises:
        UserError: there is none.
    """
    if enabled and not device.startswith("cuda"):
        raise UserError(
            f"{key}: mixed precision trains on GPUs only, and the device is {device!r}; set it to "
            "False"
        )


def check_weights(key: str, path: str, output_dir: str, resume: bool) -> None:
    """The weights to start from, if they are going to be read, are there; those behind a URL are
    fetched.

    Args:
        key: the config's name for them.

    Raises:
        UserError: they are not.
    """
    if resume and os.path.isfile(os.path.join(output_dir, "last_checkpoint")):
        return
    remedy = f"give another file, or an empty {key} to train from scratch"
    if "://" in path:
        try:
            path = fetched(path)
        except UserError as error:
            raise UserError(f"{key} {error}; {remedy}") from None
    if path and not os.path.isfile(path):
        raise UserError(f"{key} {path!r} does not exist; {remedy}")
