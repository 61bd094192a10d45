"""The main function of `tools/lazyconfig_train_net.py`: training by a Python config."""

import argparse
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from detectron2.config import LazyConfig, instantiate
from detectron2.engine import default_setup
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ..checkpoint import Checkpointer
from ..config import default_output_dir, find_config, flatten
from ..errors import UserError, one_line
from ..modeling.padding import set_padding
from ..modeling.summary import sw_table
from ..task import all_tasks
from .data_check import check_lazy_data, lazy_dataset_names, logs_held_back, release_logs
from .loop import Loop, RunSettings, to_parallel
from .setup import check_amp, check_weights
from .step import MixedPrecisionStep, SupervisedStep
from .train import train_and_write_results, write_results_so_far
from .trainer import sync_batch_norms_for_cpu
from .values import LAZY_LOWEST, check_lowest, check_output_folder, named_by_key

logger = logging.getLogger(__name__)

PARTS = ("model", "dataloader", "optimizer", "lr_multiplier", "train")
_MISSING = object()


def load_lazy_config(config_file: str, overrides: list[str]) -> DictConfig:
    """Read a Python config and apply key=value overrides.

    As in Hydra, key=value changes a key that is there, and +key=value adds one.

    Raises:
        UserError: the file, a key or a value is wrong.
    """
    path = str(find_config(config_file))
    if not path.endswith(".py"):
        raise UserError(f"config {path!r} is no Python config; use tools/train_net.py for it")
    try:
        cfg = LazyConfig.load(path)
    except UserError:
        raise
    except Exception as error:  # a config is a program: anything can go wrong
        raise UserError(f"config {path!r}: {one_line(error)}") from None
    missing = [part for part in PARTS if part not in cfg]
    if missing:
        raise UserError(f"config {path!r} does not define {', '.join(missing)}")
    if "output_dir" not in cfg.train:  # or is "???", which OmegaConf takes for missing
        cfg.train.output_dir = default_output_dir(path)
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise UserError(f"overrides have the form key=value; got {override!r}")
        try:
            known = OmegaConf.select(cfg, key.lstrip("+"), default=_MISSING) is not _MISSING
            if not known and not key.startswith("+"):
                raise UserError(f"override {override}: no such key; +{override} adds it")
            LazyConfig.apply_overrides(cfg, [override])
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"override {override}: {one_line(error)}") from None
    if cfg.train.device.startswith("cuda") and not torch.cuda.is_available():
        cfg.train.device = "cpu"
    return cfg


def train_or_evaluate_lazy(args: argparse.Namespace) -> OrderedDict:
    """Train and evaluate, or with --eval-only just evaluate.

    The counterpart of `train_or_evaluate`, with the same checkpoints, records and resuming.

    Args:
        args: of `argument_parser`; `opts` are overrides of the form key=value.

    Returns:
        The results of the evaluation, on the main process.
    """
    cfg = _setup(args)
    name = Path(args.config_file).stem
    model = build_lazy_model(cfg)
    if args.eval_only:
        iterations = _load(cfg, model, args.resume)
        results = _evaluate(cfg, model)
        write_results_so_far(results, cfg.train.output_dir, name, iterations)
    else:
        with named_by_key(cfg):
            loop = _build_loop(cfg, model)
        loop.resume_or_load(args.resume)
        results, _ = train_and_write_results(loop, cfg.train.output_dir, name)
    return results


def build_lazy_model(cfg: DictConfig) -> nn.Module:
    """The model of a Python config, on its device."""
    with named_by_key(cfg):
        model = instantiate(cfg.model).to(cfg.train.device)
        set_padding(model, cfg.train.get("padding", "counted"))
    if cfg.train.device == "cpu" and comm.get_world_size() > 1:
        model = sync_batch_norms_for_cpu(model)
    logger.info(f"SW layers:\n{sw_table(model)}")
    return model


def _setup(args: argparse.Namespace) -> DictConfig:
    cfg = load_lazy_config(args.config_file, args.opts)
    with logs_held_back() as found_in_data:
        check_lazy_data(cfg, training=not args.eval_only)
    check_weights(
        "train.init_checkpoint", cfg.train.init_checkpoint, cfg.train.output_dir, args.resume
    )
    if not args.eval_only:
        check_amp("train.amp.enabled", cfg.train.amp.enabled, cfg.train.device)
        check_lowest(flatten(OmegaConf.to_container(cfg, resolve=False)), LAZY_LOWEST)
    check_output_folder("train.output_dir", cfg.train.output_dir)
    args.config_file = str(find_config(args.config_file))
    setup_logger(cfg.train.output_dir, distributed_rank=comm.get_rank(), name="sw_detectron")
    default_setup(cfg, args)
    release_logs(found_in_data)
    if cfg.train.device == "cpu":
        logger.info("Running on the CPU.")
    if not cfg.train.init_checkpoint and not args.eval_only:
        logger.info("train.init_checkpoint is empty: training from scratch.")
    return cfg


def _load(cfg: DictConfig, model: nn.Module, resume: bool) -> int | None:
    """Load the weights; for how many iterations they were trained, if known."""
    checkpointer = Checkpointer(model, save_dir=cfg.train.output_dir)
    if not cfg.train.init_checkpoint and not (resume and checkpointer.has_checkpoint()):
        raise UserError("--eval-only needs weights: give train.init_checkpoint=FILE, or --resume")
    checkpoint = checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    return checkpoint["iteration"] + 1 if "iteration" in checkpoint else None


def _build_loop(cfg: DictConfig, model: nn.Module) -> Loop:
    keys = OmegaConf.to_container(cfg, resolve=False)
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    data_loader = instantiate(cfg.dataloader.train)
    parallel = to_parallel(model, cfg.train.device, **cfg.train.ddp)
    step_class = MixedPrecisionStep if cfg.train.amp.enabled else SupervisedStep
    step = step_class(parallel, data_loader, optimizer, cfg.dataloader.train.total_batch_size)
    precise = cfg.train.get("precise_bn", {"enabled": False})
    return Loop(
        step,
        {"optimizer": instantiate(cfg.lr_multiplier)},
        RunSettings(
            output_dir=cfg.train.output_dir,
            weights=cfg.train.init_checkpoint,
            max_iter=cfg.train.max_iter,
            checkpoint_options=cfg.train.checkpointer,
            eval_period=cfg.train.eval_period,
            seed=cfg.train.seed,
            importance_stop_iter=cfg.train.get("importance_stop_iter", 0),
            precise_iters=precise["num_iter"] if precise["enabled"] else 0,
            config=_config_text(cfg),
            keys=keys,
        ),
        evaluate=lambda: _evaluate(cfg, model),
        precise_loader=lambda: _build_precise_loader(cfg),
        page_sections=lambda: _page_sections(cfg, keys),
    )


def _build_precise_loader(cfg: DictConfig) -> Iterable:
    loader = dict(cfg.dataloader.train)
    if "num_workers" in loader:
        loader["num_workers"] = 0  # they would wait, between evaluations, with their batches
    return instantiate(loader)


def _config_text(cfg: DictConfig) -> str:
    """As `default_setup` has written it, on the main process."""
    path = Path(cfg.train.output_dir, "config.yaml")
    return path.read_text() if path.is_file() else ""


def _page_sections(cfg: DictConfig, keys: Mapping) -> dict[str, str]:
    names, folder = lazy_dataset_names(cfg, "test"), Path(cfg.train.output_dir)
    sections = (task.page_sections(keys, names, folder) for task in all_tasks())
    return {headline: html for of_task in sections for headline, html in of_task.items()}


def _evaluate(cfg: DictConfig, model: nn.Module) -> OrderedDict:
    results = inference_on_dataset(
        model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator)
    )
    if comm.is_main_process():
        print_csv_format(results)
    return results
