"""A small classifier on the generated data set."""

from sw_detectron.engine import argument_parser, train_or_evaluate

TOY = "classification_shapes_R18_SW.yaml"
# A few steps of four small images.
TINY = """
    SOLVER.IMS_PER_BATCH 4 SOLVER.EPOCHS 0 SOLVER.MAX_ITER 3 SOLVER.STEP_EPOCHS ()
    SOLVER.CHECKPOINT_EPOCHS 0 TEST.EVAL_EPOCHS 0 DATASETS.TEST ('shapes_cls_val[:10]',)
""".split()


def run_here(*arguments):
    return train_or_evaluate(argument_parser("", "").parse_args(arguments))
