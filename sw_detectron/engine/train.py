"""The main function of `tools/train_net.py`."""

import argparse
from collections import OrderedDict
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.evaluation import verify_results
from detectron2.utils import comm
from torch import nn

from ..checkpoint import Checkpointer
from ..errors import UserError
from ..report import write_results
from ..task import find_task
from .loop import Loop
from .setup import setup
from .trainer import Trainer
from .values import named_by_key


def train_or_evaluate(args: argparse.Namespace) -> OrderedDict:
    """Train, with the evaluations that the config asks for, or with --eval-only just evaluate.

    The results of the last evaluation are written to OUTPUT_DIR/results.json and results.md, also
    if something fails after it.

    Args:
        args: of `argument_parser`.

    Returns:
        The results of the last evaluation; empty on all processes but the main one.
    """
    cfg = setup(args)
    trainer_class = find_task(cfg).trainer
    name = Path(args.config_file or cfg.OUTPUT_DIR).stem
    if args.eval_only:
        model, iterations = _load(trainer_class, cfg, args.resume)
        results = trainer_class.test(cfg, model)
        write_results_so_far(results, cfg.OUTPUT_DIR, name, iterations)
    else:
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=args.resume)
        results, iterations = train_and_write_results(trainer, cfg.OUTPUT_DIR, name)
        model = trainer.model
    if cfg.TEST.AUG.ENABLED:
        results.update(trainer_class.test_with_augmentation(cfg, model))
        write_results_so_far(results, cfg.OUTPUT_DIR, name, iterations)
    if comm.is_main_process() and results:
        verify_results(cfg, results)
    return results


def train_and_write_results(loop: Loop, folder: str, config: str) -> tuple[OrderedDict, int]:
    """Train, and write the results of the last evaluation that there was, whatever fails after it.

    Args:
        folder, config: see `write_results`.

    Returns:
        The results, and after how many iterations they were found.
    """
    try:
        loop.train()
    finally:
        write_results_so_far(loop.results, folder, config, loop.results_iterations)
    return loop.results, loop.results_iterations


def write_results_so_far(results: OrderedDict, folder: str, config: str, iterations: int | None):
    """`write_results` on the main process, if there are any."""
    if comm.is_main_process() and results:
        write_results(results, folder, config, iterations)


def _load(trainer_class: type[Trainer], cfg: CfgNode, resume: bool) -> tuple[nn.Module, int | None]:
    """The model with its weights, and for how many iterations it was trained, if known."""
    with named_by_key(cfg):
        model = trainer_class.build_model(cfg)
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, cfg=cfg)
    if not cfg.MODEL.WEIGHTS and not (resume and checkpointer.has_checkpoint()):
        raise UserError("--eval-only needs weights: give MODEL.WEIGHTS FILE, or --resume")
    iteration = checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume).get("iteration")
    return model, None if iteration is None else iteration + 1
