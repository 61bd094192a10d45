"""The optimizer, the schedules and what else a run needs, as in common.yaml and schedule_*.yaml."""

import torch
from detectron2.config import LazyCall as L
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import MultiStepParamScheduler

from sw_detectron.engine.optimizer import get_sw_optimizer_params

optimizer = L(torch.optim.SGD)(
    # params.model is filled in when the model is built.
    params=L(get_sw_optimizer_params)(base_lr="${..lr}", weight_decay_norm=0.0),
    lr=0.02,
    momentum=0.9,
    weight_decay=1e-4,
    foreach=True,
)


def _multi_step(first, second, max_iter):
    """Factors of the learning rate. They scale with train.max_iter, if that is set to another
    number of iterations."""
    return L(WarmupParamScheduler)(
        scheduler=L(MultiStepParamScheduler)(
            values=[1.0, 0.1, 0.01], milestones=[first, second], num_updates=max_iter
        ),
        warmup_factor=0.001,
        warmup_length=1000 / max_iter,
        warmup_method="linear",
    )


lr_multiplier_1x = _multi_step(60_000, 80_000, 90_000)
lr_multiplier_2x = _multi_step(120_000, 160_000, 180_000)
lr_multiplier_3x = _multi_step(210_000, 250_000, 270_000)

train = {
    "output_dir": "???",  # has to be set; sw_detectron does it by the config's name
    "init_checkpoint": "",  # a file with the weights to start from; empty: from scratch
    "max_iter": 90_000,
    "amp": {"enabled": False},
    "ddp": {"broadcast_buffers": False},  # arguments of DistributedDataParallel
    "checkpointer": {"period": 5000},  # arguments of PeriodicCheckpointer; iterations
    "eval_period": 0,  # iterations; 0: once, at the end
    "device": "cuda",
    # Replace running statistics by those of num_iter batches, before evaluations and at the end.
    "precise_bn": {"enabled": False, "num_iter": 200},
    "padding": "counted",  # of images to a common size: counted, ignored or zeroed
    "importance_stop_iter": 0,  # from this iteration on importance weights stay; 0: they learn
    "seed": -1,  # negative: a new one each time
}
