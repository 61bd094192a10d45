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
from .setup import setup
from .trainer import Trainer


def train_or_evaluate(args: argparse.Namespace) -> OrderedDict:
    """Train, with the evaluations that the config asks for, or with --eval-only just evaluate.

    The results of the last evaluation are written to OUTPUT_DIR/results.json and results.md.

    Args:
        args: of `argument_parser`.

    Returns:
        The results of the last evaluation; empty on all processes but the main one.
    """
    cfg = setup(args)
    trainer_class = find_task(cfg).trainer
    if args.eval_only:
        model, iterations = _load(trainer_class, cfg, args.resume)
        results = trainer_class.test(cfg, model)
    else:
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=args.resume)
        results = trainer.train()
        model, iterations = trainer.model, trainer.max_iter
    if cfg.TEST.AUG.ENABLED:
        results.update(trainer_class.test_with_augmentation(cfg, model))
    if comm.is_main_process() and results:
        write_results(results, cfg.OUTPUT_DIR, Path(args.config_file).stem, iterations)
        verify_results(cfg, results)
    return results


def _load(trainer_class: type[Trainer], cfg: CfgNode, resume: bool) -> tuple[nn.Module, int | None]:
    """The model with its weights, and for how many iterations it was trained, if known."""
    model = trainer_class.build_model(cfg)
    checkpointer = Checkpointer(model, save_dir=cfg.OUTPUT_DIR)
    if not cfg.MODEL.WEIGHTS and not (resume and checkpointer.has_checkpoint()):
        raise UserError("--eval-only needs weights: give MODEL.WEIGHTS FILE, or --resume")
    iteration = checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume).get("iteration")
    return model, None if iteration is None else iteration + 1
