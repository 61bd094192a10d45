"""What weights need of a config: carried in a checkpoint as plain data, and checked when it loads.

Weights do not say by themselves which order of channels they were trained with, in which
convolution a block strides, or which statistics an importance weight stands for. A config that
contradicts them trains, to other numbers, without a word.
"""

import functools
import math
from collections.abc import Mapping

from detectron2.config import CfgNode
from detectron2.modeling import BACKBONE_REGISTRY
from torch import Tensor

from ..errors import UserError
from ..modeling.norms import SW_NORMS
from .source_config import IMAGENET_RGB, network_config
from .sources import find_backbone, recognize_architecture

# The entry of a checkpoint, beside "model", that holds {"config": facts}.
FACTS_KEY = "sw_detectron"

TORCHVISION = IMAGENET_RGB | {"MODEL.RESNETS.STRIDE_IN_1X1": False}

# The keys that facts can have, and the types of their values.
NETWORK_KEYS = {
    "INPUT.FORMAT": str,
    "MODEL.PIXEL_MEAN": list[float],
    "MODEL.PIXEL_STD": list[float],
    "MODEL.RESNETS.DEPTH": int,
    "MODEL.RESNETS.NUM_GROUPS": int,
    "MODEL.RESNETS.WIDTH_PER_GROUP": int,
    "MODEL.RESNETS.STEM_OUT_CHANNELS": int,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": int,
    "MODEL.RESNETS.STRIDE_IN_1X1": bool,
    "MODEL.VGG.CHANNELS": list[int],
    "MODEL.VGG.FC_CHANNELS": int,
    "MODEL.SW.PADDING": str,
}
LAYER_KEYS = {
    "MODEL.SW.NUM_PERGROUP": int,
    "MODEL.SW.WHITENING": str,
    "MODEL.SW.TIE_WEIGHT": bool,
}
PLACEMENT_KEYS = {"MODEL.SW.PLACEMENT": str, "MODEL.SW.LAYERS": list[int]}
SET_KEYS = {"MODEL.SW.NORM": str, "MODEL.SW.STATISTICS": list[str]}
KEYS = NETWORK_KEYS | PLACEMENT_KEYS | SET_KEYS | LAYER_KEYS


def facts_in(checkpoint: Mapping) -> dict[str, object]:
    """What the weights of a loaded checkpoint need, by key; only what is well formed.

    A checkpoint that Detectron2's own script made of torchvision's says so and no more.
    """
    carried = checkpoint.get(FACTS_KEY)
    config = carried.get("config") if isinstance(carried, Mapping) else None
    if isinstance(config, Mapping):
        return {key: value for key, value in config.items() if _well_formed(key, value)}
    return TORCHVISION if checkpoint.get("__author__") == "torchvision" else {}


def facts_of_source(tensors: dict[str, Tensor]) -> dict[str, object]:
    """What weights under the names of torchvision, Caffe2, … need; {} under Detectron2's or others,
    which do not tell."""
    try:
        backbone = find_backbone(tensors)
        architecture = recognize_architecture(backbone)
        config, _ = network_config(backbone, architecture, facts={}, folded=False)
    except UserError:
        return {}
    return {} if backbone.source == "detectron2" else config


def facts_of(cfg: CfgNode) -> dict[str, object]:
    """What the weights of a model that was trained with `cfg` need."""
    keys = KEYS if _has_sw_keys(cfg) else NETWORK_KEYS
    is_vgg = cfg.MODEL.BACKBONE.NAME == "build_sw_vgg_backbone"
    others = "MODEL.RESNETS." if is_vgg else "MODEL.VGG."  # keys that the backbone does not read
    return {key: KEYS[key](_value(cfg, key)) for key in keys if not key.startswith(others)}


def contradictions(facts: Mapping[str, object], used: Mapping[str, object]) -> list[str]:
    """A line for each key that is not what the weights need.

    Args:
        facts: from `facts_in`; keys that are not there are unknown, and fit.
        used: those of the model that takes the weights, from `facts_of` or `facts_of_model`.
    """
    keys = [*NETWORK_KEYS]
    if used.get("MODEL.RESNETS.DEPTH") in (18, 34):
        keys.remove("MODEL.RESNETS.STRIDE_IN_1X1")  # their blocks have no 1x1 convolution
    has_placement = "MODEL.SW.LAYERS" in used
    placed = _layers_differ(facts, used) if has_placement else ""
    lines = [placed] if placed else []
    if has_placement and not placed and facts.get("MODEL.SW.PLACEMENT") != "none":
        keys += LAYER_KEYS
        lines += _sets_differ(facts, used)
    shared = [key for key in keys if key in facts and key in used]
    differing = [key for key in shared if not _equal(used[key], facts[key])]
    return [_line(key, used[key], facts[key]) for key in differing] + lines


def _line(key: str, value: object, needed: object) -> str:
    return f"{key} is {value}, but the weights were made for {needed}"


def _layers_differ(facts: Mapping[str, object], used: Mapping[str, object]) -> str:
    """The line about the placement; "" if it fits, as far as is known."""
    name, numbers = facts.get("MODEL.SW.PLACEMENT"), facts.get("MODEL.SW.LAYERS")
    layers, placement = used["MODEL.SW.LAYERS"], used.get("MODEL.SW.PLACEMENT")
    needed = numbers if name is None else name
    if layers:
        known = numbers or name == "none"
        fits = not known or set(layers) == set(numbers or [])
        return "" if fits else _line("MODEL.SW.LAYERS", layers, needed)
    fits = needed is None or name == placement
    return "" if fits else _line("MODEL.SW.PLACEMENT", placement, needed)


def _sets_differ(facts: Mapping[str, object], used: Mapping[str, object]) -> list[str]:
    needed = _statistics(facts.get("MODEL.SW.NORM"), facts.get("MODEL.SW.STATISTICS"))
    if not needed:
        return []
    norm, chosen = used.get("MODEL.SW.NORM", ""), used["MODEL.SW.STATISTICS"]
    statistics = _statistics(norm, chosen)
    if set(statistics) == set(needed):
        return []
    if chosen:
        return [_line("MODEL.SW.STATISTICS", list(statistics), list(needed))]
    of_norm = f" ({', '.join(statistics)})" if statistics else ""
    return [_line("MODEL.SW.NORM", f"{norm}{of_norm}", ", ".join(needed))]


def _statistics(norm: object, chosen: object) -> tuple[str, ...]:
    if chosen:
        return tuple(chosen)
    return SW_NORMS[norm].keywords["statistics"] if norm in SW_NORMS else ()


def _has_sw_keys(cfg: CfgNode) -> bool:
    """Whether the backbone is one of this package's, which read MODEL.SW."""
    name = cfg.MODEL.BACKBONE.NAME
    package = __name__.partition(".")[0]
    builders = BACKBONE_REGISTRY
    return name in builders and builders.get(name).__module__.startswith(f"{package}.")


def _value(cfg: CfgNode, key: str) -> object:
    return functools.reduce(getattr, key.split("."), cfg)


def _well_formed(key: object, value: object) -> bool:
    kind = KEYS.get(key) if isinstance(key, str) else None
    if not isinstance(value, list):
        return type(value) is kind
    if kind == list[float]:
        return all(isinstance(item, (int, float)) and math.isfinite(item) for item in value)
    return kind in (list[int], list[str]) and all(isinstance(v, kind.__args__) for v in value)


def _equal(value: object, needed: object) -> bool:
    if not isinstance(needed, list):
        return value == needed
    return len(value) == len(needed) and all(
        math.isclose(a, b, rel_tol=1e-4) if isinstance(b, (int, float)) else a == b
        for a, b in zip(value, needed)
    )
