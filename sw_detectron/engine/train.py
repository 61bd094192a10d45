"""The main function of `tools/train_net.py`."""

import argparse
from collections import OrderedDict

from detectron2.config import CfgNode
from detectron2.engine import hooks
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from ..checkpoint import Checkpointer
from ..errors import UserError
from .classification import ClassificationTrainer
from .setup import setup
from .trainer import Trainer

TRAINERS = {"ImageClassifier": ClassificationTrainer}
"""The trainer of each meta-architecture that is not `Trainer`'s."""


def train_or_evaluate(args: argparse.Namespace) -> OrderedDict | None:
    """Train, with the evaluations that the config asks for, or with --eval-only just evaluate.

    Args:
        args: of `argument_parser`.

    Returns:
        The results of the evaluation, on the main process.
    """
    cfg = setup(args)
    trainer_class = TRAINERS.get(cfg.MODEL.META_ARCHITECTURE, Trainer)
    if args.eval_only:
        return _evaluate(trainer_class, cfg, args.resume)
    trainer = trainer_class(cfg)
    trainer.resume_or_load(resume=args.resume)
    if cfg.TEST.AUG.ENABLED:
        trainer.register_hooks(
            [hooks.EvalHook(0, lambda: trainer.test_with_augmentation(cfg, trainer.model))]
        )
    return trainer.train()


def _evaluate(trainer_class: type[Trainer], cfg: CfgNode, resume: bool) -> OrderedDict:
    model = trainer_class.build_model(cfg)
    checkpointer = Checkpointer(model, save_dir=cfg.OUTPUT_DIR)
    if not cfg.MODEL.WEIGHTS and not (resume and checkpointer.has_checkpoint()):
        raise UserError("--eval-only needs weights: give MODEL.WEIGHTS FILE, or --resume")
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)
    results = trainer_class.test(cfg, model)
    if cfg.TEST.AUG.ENABLED:
        results.update(trainer_class.test_with_augmentation(cfg, model))
    if comm.is_main_process():
        verify_results(cfg, results)
    return results
