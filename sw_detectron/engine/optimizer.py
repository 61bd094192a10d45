"""Parameter groups that know SW's parameters, the optimizer over them, and its schedule."""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import CycleBatchNormList
from detectron2.solver import LRMultiplier, WarmupParamScheduler
from detectron2.solver import build_lr_scheduler as build_detectron2_lr_scheduler
from detectron2.solver.build import (
    get_default_optimizer_params,
    maybe_add_gradient_clipping,
    reduce_param_groups,
)
from fvcore.common.param_scheduler import PolynomialDecayParamScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UserError
from ..layers import SwitchWhiten2d


def importance_parameters(model: nn.Module) -> list[nn.Parameter]:
    """`sw_mean_weight` and `sw_var_weight` of all SW layers of a model, frozen ones included."""
    layers = (module for module in model.modules() if isinstance(module, SwitchWhiten2d))
    pairs = ((layer.sw_mean_weight, layer.sw_var_weight) for layer in layers)
    return [parameter for pair in pairs for parameter in pair if parameter is not None]


def get_sw_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay_norm: float | None = None,
    bias_lr_factor: float = 1.0,
    weight_decay_bias: float | None = None,
    weight_decay_importance: float | None = None,
    importance_lr_factor: float = 1.0,
    head_lr_factor: float = 1.0,
) -> list[dict[str, Any]]:
    """Detectron2's `get_default_optimizer_params`, made for models with SW layers.

    γ and β of an SW layer are grouped as those of any other norm: `weight_decay_norm` holds for
    both, unless `weight_decay_bias` is given for β.

    Args:
        model: as the optimizer will see it; frozen parameters are left out.
        base_lr: the learning rate; None leaves it to the optimizer.
        weight_decay_norm: of γ and β of all norms; None as for all parameters.
        bias_lr_factor: multiplies the learning rate of parameters named "bias".
        weight_decay_bias: of parameters named "bias"; None as for all parameters.
        weight_decay_importance: of the importance weights; None as for all parameters.
        importance_lr_factor: multiplies the learning rate of the importance weights.
        head_lr_factor: multiplies the learning rate of all that lies outside of the model's
            `backbone`, but where one of the two factors above applies.

    Returns:
        Groups for a `torch.optim.Optimizer`, as few as possible.

    Raises:
        ValueError: a factor is not 1, but there is no `base_lr`.
    """
    groups = get_default_optimizer_params(
        model,
        base_lr=base_lr,
        weight_decay_norm=weight_decay_norm,
        bias_lr_factor=bias_lr_factor,
        weight_decay_bias=weight_decay_bias,
        lr_factor_func=None
        if head_lr_factor == 1
        else lambda name: 1.0 if name.startswith("backbone.") else head_lr_factor,
    )
    if weight_decay_norm is not None:
        # A list of norms for the levels of a pyramid has their γ and β.
        kinds = (SwitchWhiten2d, CycleBatchNormList)
        layers = [module for module in model.modules() if isinstance(module, kinds)]
        affine = [getattr(layer, "weight", None) for layer in layers]
        if weight_decay_bias is None:
            affine += [getattr(layer, "bias", None) for layer in layers]
        groups.append(_group(affine, weight_decay=weight_decay_norm))
    options = {}
    if importance_lr_factor != 1:
        if base_lr is None:
            raise ValueError("importance_lr_factor requires base_lr")
        options["lr"] = base_lr * importance_lr_factor
    if weight_decay_importance is not None:
        options["weight_decay"] = weight_decay_importance
    groups.append(_group(importance_parameters(model), **options))
    # Of a parameter in several groups, the options are merged, and the last one counts.
    return reduce_param_groups(groups)


def _group(parameters: list[nn.Parameter | None], **options: float) -> dict[str, Any]:
    return {"params": [p for p in parameters if p is not None and p.requires_grad], **options}


def configured_params(cfg: CfgNode, model: nn.Module) -> list[dict[str, Any]]:
    """`get_sw_optimizer_params` by the keys of SOLVER.

    Raises:
        UserError: SOLVER.WEIGHT_DECAY_IMPORTANCE is not a number.
    """
    solver = cfg.SOLVER
    if isinstance(solver.WEIGHT_DECAY_IMPORTANCE, str):  # a key that may be None takes anything
        raise UserError(
            f"SOLVER.WEIGHT_DECAY_IMPORTANCE {solver.WEIGHT_DECAY_IMPORTANCE!r} is not a number; "
            "in YAML, 1e-4 is written 1.0e-4"
        )
    return get_sw_optimizer_params(
        model,
        base_lr=solver.BASE_LR,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
        weight_decay_importance=solver.WEIGHT_DECAY_IMPORTANCE,
        importance_lr_factor=solver.IMPORTANCE_LR_FACTOR,
        head_lr_factor=solver.HEAD_LR_FACTOR,
    )


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """SGD as in Detectron2, with the keys of SOLVER, over `configured_params`."""
    solver = cfg.SOLVER
    optimizer = torch.optim.SGD(
        configured_params(cfg, model),
        lr=solver.BASE_LR,
        momentum=solver.MOMENTUM,
        nesterov=solver.NESTEROV,
        weight_decay=solver.WEIGHT_DECAY,
        foreach=True,
    )
    return maybe_add_gradient_clipping(cfg, optimizer)


def build_lr_scheduler(cfg: CfgNode, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Detectron2's schedules, and "WarmupPolyLR", (1 - iteration / N)^POLY_LR_POWER, where N is
    POLY_LR_MAX_ITER or, if that is 0, MAX_ITER.

    Raises:
        UserError: SOLVER.STEPS do not ascend, or the last of them is the end.
    """
    solver = cfg.SOLVER
    steps = list(solver.STEPS)
    if steps != sorted(set(steps)) or solver.MAX_ITER in steps:
        raise UserError(
            f"SOLVER.STEPS {solver.STEPS} must ascend to less than SOLVER.MAX_ITER, "
            f"{solver.MAX_ITER}"
        )
    if solver.LR_SCHEDULER_NAME != "WarmupPolyLR":
        return build_detectron2_lr_scheduler(cfg, optimizer)
    end = solver.POLY_LR_MAX_ITER or solver.MAX_ITER
    if end < solver.MAX_ITER:
        raise UserError(
            f"SOLVER.POLY_LR_MAX_ITER {end} is before the end, SOLVER.MAX_ITER {solver.MAX_ITER}"
        )
    factor = WarmupParamScheduler(
        PolynomialDecayParamScheduler(1.0, solver.POLY_LR_POWER),
        solver.WARMUP_FACTOR,
        min(solver.WARMUP_ITERS / end, 1.0),
        solver.WARMUP_METHOD,
    )
    return LRMultiplier(optimizer, factor, end)
