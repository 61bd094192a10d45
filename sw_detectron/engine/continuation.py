"""What differs between a run and its continuation: it holds, and the log says so.

A checkpoint carries, as plain data, the config of its run, the machine, and which parameter each
entry of an optimizer's state belongs to. So a resumed run can have another learning rate, other
groups of parameters, or another network in part.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from detectron2.utils import comm
from torch import nn
from torch.optim import Optimizer

from ..config import flatten

# Where the run writes, which changes when its folder is moved.
_PLACES = ("OUTPUT_DIR", "train.output_dir")
# A file that a resumed run does not read.
_UNREAD = ("MODEL.WEIGHTS", "train.init_checkpoint")


def run_facts(config: Mapping) -> dict[str, object]:
    """What a run's numbers depend on: the keys of its config, and the machine."""
    keys = {key: value for key, value in flatten(config).items() if key not in _PLACES}
    return keys | {
        "number of processes": comm.get_world_size(),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
    }


def differences(before: Mapping, now: Mapping, iteration: int) -> list[str]:
    """A line for each key that has another value.

    Args:
        before, now: `run_facts` of the checkpoint and of this run.
        iteration: the first one of this run.
    """
    lines = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) == now.get(key):
            continue
        values = f"{before.get(key)!r} before this resume, and is {now.get(key)!r}"
        if key in _UNREAD:
            lines.append(f"{key} was {values} now: a resumed run does not read it")
        else:
            lines.append(f"{key} was {values} from iteration {iteration} on")
    return lines


def parameter_names(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, dict]:
    """By an optimizer's name: its `class`, and name and shape of the `parameters` in the order in
    which its state counts them. Parameters that are not the model's have a number for a name."""
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    return {
        name: {
            "class": _class_name(optimizer),
            "parameters": [
                [names.get(id(p), number), list(p.shape)]
                for number, p in enumerate(_parameters(optimizer))
            ],
        }
        for name, optimizer in optimizers.items()
    }


@contextmanager
def continuing(
    model: nn.Module, optimizers: Mapping[str, Optimizer], before: Mapping[str, dict]
) -> Iterator[None]:
    """Inside, the optimizers take from a state that they load what each parameter accumulated, and
    keep the groups and options that they were made with.

    Of a parameter that was not there, or had another shape, nothing is taken, nor from an optimizer
    of another class. A rate that a schedule has changed is changed by the same factor.

    Args:
        before: `parameter_names` of the run that saved the state.
    """
    now = parameter_names(model, optimizers)
    with ExitStack() as hooks:
        for name, optimizer in optimizers.items():
            if name in before:

                def hook(optimizer, state, name=name):
                    return _fitted(optimizer, state, before[name], now[name])

                handle = optimizer.register_load_state_dict_pre_hook(hook)
                hooks.callback(handle.remove)
        yield


def _fitted(optimizer: Optimizer, state: dict, before: dict, now: dict) -> dict:
    """A state dict as `optimizer` would have made it."""
    same_class = before["class"] == now["class"]
    indices = {(name, tuple(shape)): i for i, (name, shape) in enumerate(before["parameters"])}
    old_index = [indices.get((name, tuple(shape))) for name, shape in now["parameters"]]
    groups_of = {i: group for group in state["param_groups"] for i in group["params"]}
    groups, first = [], 0
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        options.setdefault("initial_lr", options["lr"])  # as schedules do, of which one may follow
        own = range(first, first + len(group["params"]))
        first = own.stop
        old = next((groups_of[old_index[i]] for i in own if old_index[i] is not None), {})
        if old.get("initial_lr"):
            options["lr"] = old["lr"] * (options["initial_lr"] / old["initial_lr"])
        groups.append(options | {"params": list(own)})
    kept = {
        i: state["state"][old]
        for i, old in enumerate(old_index)
        if same_class and old is not None and old in state["state"]
    }
    return state | {"state": kept, "param_groups": groups}


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _class_name(optimizer: Optimizer) -> str:
    # Detectron2 derives a class when it clips gradients, torch when it is told names.
    plain = (
        c
        for c in type(optimizer).__mro__
        if c.__module__.startswith("torch.optim.") and c is not Optimizer
    )
    return next(plain, type(optimizer)).__qualname__
