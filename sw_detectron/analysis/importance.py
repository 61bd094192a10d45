"""The importance ratios ω (mean) and ω' (covariance) that SW layers learned, from wherever they
are: a model, a run's records, or a checkpoint."""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoint.reading import read_checkpoint
from ..errors import UserError
from ..layers import STATISTICS
from ..modeling.summary import sw_layers
from .drawing import network_order
from .metrics import Series, read_metrics

MOMENTS = ("mean", "cov")

Ratios = dict[str, dict[str, dict[str, float]]]
"""layer -> "mean" or "cov" -> statistic -> ratio; the ratios of a layer's moment sum to 1."""

Curves = dict[str, dict[str, dict[str, Series]]]
"""layer -> "mean" or "cov" -> statistic -> iterations and ratios."""

_RECORD = re.compile(r"sw/(?P<layer>.+)/(?P<moment>mean|cov)/(?P<statistic>\w+)")
_WEIGHT = re.compile(r"(?P<layer>.+)\.sw_(?P<moment>mean|var)_weight")
# A layer of the backbone in the state dict of a detector or of a backbone alone.
_IN_BACKBONE = re.compile(r"(backbone\.(bottom_up\.)?)?(?P<layer>(stem|res\d|layer\d).*)")


@dataclass(frozen=True)
class Importance:
    """What the SW layers of one network learned.

    Attributes:
        name: of the run or the checkpoint.
        ratios: at the end, layers in the order of the network.
        curves: during training; empty if they come from a checkpoint.
    """

    name: str
    ratios: Ratios
    curves: Curves = field(default_factory=dict)


def importance_ratios(model: nn.Module) -> Ratios:
    """The importance ratios of a model's SW layers, in the order of the network."""
    return {row.name: row.layer.importance() for row in sw_layers(model)}


def average_ratios(ratios: Ratios) -> dict[str, dict[str, float]]:
    """The mean over layers (Figs. 1b and 8): "mean" or "cov" -> statistic -> ratio.

    A statistic that a layer has not counts as 0 there, so that the averages sum to 1.
    """
    averages = {}
    for moment in MOMENTS:
        layers = [layer[moment] for layer in ratios.values() if moment in layer]
        used = [name for name in STATISTICS if any(name in layer for layer in layers)]
        averages[moment] = {
            name: sum(layer.get(name, 0.0) for layer in layers) / len(layers) for name in used
        }
    return averages


def importance_curves(metrics: dict[str, Series]) -> Curves:
    """The learning curves among a run's records (keys `sw/<layer>/<mean or cov>/<statistic>`).

    Layers are in the order of the network, statistics in that of `STATISTICS`.
    """
    found: Curves = defaultdict(lambda: defaultdict(dict))
    matches = {key: _RECORD.fullmatch(key) for key in metrics}
    by_statistic = {name: [] for name in STATISTICS}
    for key, match in matches.items():
        if match and match["statistic"] in by_statistic:
            by_statistic[match["statistic"]].append(key)
    for name, keys in by_statistic.items():
        for key in keys:
            match = matches[key]
            found[match["layer"]][match["moment"]][name] = metrics[key]
    return {name: dict(found[name]) for name in sorted(found, key=network_order)}


def final_ratios(curves: Curves) -> Ratios:
    """The last point of each learning curve."""
    return {
        layer: {
            moment: {name: float(values[-1]) for name, (_, values) in by_name.items()}
            for moment, by_name in moments.items()
        }
        for layer, moments in curves.items()
    }


def read_importance(path: str | os.PathLike, statistics: Sequence[str] | None = None) -> Importance:
    """Read the importance ratios of a run or of a checkpoint.

    Args:
        path: the folder of a run, its `metrics.json`, or an event file, which know the names of
            the statistics; or a checkpoint, ours or the paper authors', which does not.
        statistics: the set of a checkpoint's layers; None to take it from `guess_statistics`.

    Raises:
        UserError: the file cannot be read or has no SW layer, or the set does not fit.
    """
    path = Path(path)
    if not (path.is_dir() or path.suffix == ".json" or "tfevents" in path.name):
        return Importance(
            str(path.with_suffix("")), checkpoint_ratios(read_checkpoint(path), path, statistics)
        )
    curves = importance_curves(read_metrics(path))
    if not curves:
        raise UserError(f"{path} has no records of SW layers (keys sw/…)")
    return Importance(str(path if path.is_dir() else path.parent), final_ratios(curves), curves)


def checkpoint_ratios(
    state: dict[str, Tensor], path: str | os.PathLike, statistics: Sequence[str] | None = None
) -> Ratios:
    """The importance ratios in a state dict; see `read_importance`."""
    weights: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in state.items():
        if match := _WEIGHT.fullmatch(key):
            weights[match["layer"]][match["moment"]] = value
    if not weights:
        raise UserError(f"{path} has no SW layer (keys ….sw_mean_weight)")
    ratios = {}
    for layer, by_moment in weights.items():
        weight = by_moment["mean"] if "mean" in by_moment else by_moment["var"]
        running_cov = state.get(f"{layer}.running_cov")
        names = statistics or guess_statistics(weight.numel(), running_cov)
        if names is None or len(names) != weight.numel():
            given = f", not the {len(names)} of {','.join(names)}" if names else ""
            raise UserError(
                f"{path}: layer {layer} has {weight.numel()} importance weights{given}; name its "
                "statistics with --statistics"
            )
        names = [name for name in STATISTICS if name in names]  # the order of the weights
        weight_of = {"mean": weight, "cov": by_moment.get("var", weight)}  # tied if there is one
        ratios[_layer_name(layer)] = {
            moment: dict(zip(names, weight_of[moment].flatten().double().softmax(0).tolist()))
            for moment in MOMENTS
        }
    return {name: ratios[name] for name in sorted(ratios, key=network_order)}


def _layer_name(module_name: str) -> str:
    """The name that the records of a run use, that is, `modeling.summary.sw_layers`."""
    name = module_name.removeprefix("module.")
    match = _IN_BACKBONE.fullmatch(name)
    return match["layer"].removesuffix(".norm") if match else name


def guess_statistics(count: int, running_cov: Tensor | None) -> tuple[str, ...] | None:
    """The set that a layer's K importance weights stand for, where its names are not stored.

    K = 5 is all, K = 2 is bw, iw. K = 3 is bn, in, ln (SN) if the running covariance (g, G, G) is
    diagonal, and else bw, iw, ln (the authors' third type). K = 1 is bw if the running covariance
    is not diagonal, iw if it is as initialized, and else bn. Other sets have to be named: None.
    """
    if count == 5:
        return STATISTICS
    if count == 2:
        return ("bw", "iw")
    if running_cov is None or count not in (1, 3):
        return None
    diagonal = torch.equal(running_cov, running_cov * torch.eye(running_cov.shape[-1]))
    if count == 3:
        return ("bn", "in", "ln") if diagonal else ("bw", "iw", "ln")
    if not diagonal:
        return ("bw",)
    initial = torch.equal(running_cov, torch.eye(running_cov.shape[-1]).expand_as(running_cov))
    return ("iw",) if initial else ("bn",)
