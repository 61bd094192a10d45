"""What a config has to say for the weights of a source."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..errors import UserError
from ..layers.mixing import STATISTICS
from ..modeling.norms import SW_NORMS
from ..modeling.placement import PLACEMENTS, numbered_convs, place
from .sources import Architecture, Backbone

IMAGENET_RGB = {
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.280, 103.530],
    "MODEL.PIXEL_STD": [58.395, 57.120, 57.375],
}
CAFFE_BGR = {
    "INPUT.FORMAT": "BGR",
    "MODEL.PIXEL_MEAN": [103.530, 116.280, 123.675],
    "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
}
# What names and shapes of tensors do not tell.
NOT_IN_TENSORS = (*IMAGENET_RGB, "MODEL.RESNETS.STRIDE_IN_1X1")
CAFFE2_RESNEXT_BGR = CAFFE_BGR | {"MODEL.PIXEL_STD": [57.375, 57.120, 58.395]}


def network_config(
    backbone: Backbone, architecture: Architecture, facts: Mapping[str, object], folded: bool
) -> tuple[dict[str, object], list[str]]:
    """Config keys of the network and its input, and notes about them.

    Args:
        backbone, architecture: see `sources`.
        facts: what the checkpoint says itself, see `facts.facts_in`.
        folded: its BN is folded into a scale and a bias.

    Raises:
        UserError: the checkpoint's pixel_mean or pixel_std has not three values.
    """
    if architecture.family == "vgg":
        config = {"MODEL.BACKBONE.NAME": "build_sw_vgg_backbone"} | architecture.config
        return config | IMAGENET_RGB | _known(facts), []
    if architecture.family == "cifar":
        config = {
            "MODEL.BACKBONE.NAME": "build_cifar_resnet_backbone",
            "MODEL.RESNETS.DEPTH": architecture.depth,
        }
        return config | IMAGENET_RGB, []
    is_caffe2 = backbone.source == "caffe2" or folded
    is_resnext = architecture.config["MODEL.RESNETS.NUM_GROUPS"] > 1
    config = dict(architecture.config)
    config["MODEL.RESNETS.STRIDE_IN_1X1"] = is_caffe2 and not is_resnext
    if not is_caffe2:
        config |= IMAGENET_RGB
    else:
        config |= CAFFE2_RESNEXT_BGR if is_resnext else CAFFE_BGR
    for key in ("pixel_mean", "pixel_std"):
        if key in backbone.heads:
            values = backbone.heads[key].flatten().tolist()
            if len(values) != 3:
                raise UserError(f"{key} has {len(values)} values, where a colour image needs 3")
            config[f"MODEL.{key.upper()}"] = values
    mean = config["MODEL.PIXEL_MEAN"]
    config["INPUT.FORMAT"] = "BGR" if mean[0] < mean[-1] else "RGB"
    known = {key: value for key, value in _known(facts).items() if key in config}
    if backbone.source == "detectron2" and not known:
        kind = "Caffe2" if is_caffe2 else "torchvision"
        return config, [
            f"INPUT and STRIDE_IN_1X1 are not in the checkpoint and are taken to be {kind}'s; keep "
            "those of the source's own config where they differ"
        ]
    return config | known, []


def _known(facts: Mapping[str, object]) -> dict[str, object]:
    return {key: facts[key] for key in NOT_IN_TENSORS if key in facts}


def own_sw_layers(weights: dict[str, Tensor]) -> list[str]:
    """The convolutions of a source, by name, that have SW layers already."""
    ending = ".norm.running_cov"
    return [name.removesuffix(ending) for name in weights if name.endswith(ending)]


def sw_config(
    weights: dict[str, Tensor],
    norm: str | None,
    statistics: Sequence[str],
    num_pergroup: int | None,
    whitening: str,
) -> dict[str, object]:
    """The keys of MODEL.SW that describe the placed layers: those of the source, or new ones.

    Raises:
        UserError: the source has SW layers that differ among themselves or from the arguments.
    """
    chosen = {"MODEL.SW.WHITENING": whitening} if whitening != "newton" else {}
    layers = own_sw_layers(weights)
    if not layers:
        chosen |= {"MODEL.SW.STATISTICS": list(statistics)} if statistics else {}
        return {"MODEL.SW.NORM": norm or "SW", "MODEL.SW.NUM_PERGROUP": num_pergroup or 16} | chosen
    kinds = set()
    for name in layers:
        importance = weights.get(f"{name}.norm.sw_mean_weight")
        if importance is None:
            raise UserError(f"SW layer {name} of the source has no sw_mean_weight")
        tied = f"{name}.norm.sw_var_weight" not in weights
        kinds.add((importance.numel(), weights[f"{name}.norm.running_cov"].shape[-1:], tied))
    if len(kinds) > 1:
        raise UserError("the source's SW layers differ in statistics, groups or tied weights")
    ((count, size, tied),) = kinds
    own_num_pergroup = size[0] if size else 0
    if num_pergroup not in (None, own_num_pergroup):
        raise UserError(f"the source's SW layers have groups of {own_num_pergroup} channels")
    if not statistics:
        known = {2: ("bw", "iw"), len(STATISTICS): STATISTICS}
        of_norm = SW_NORMS[norm].keywords["statistics"] if norm in SW_NORMS else ()
        statistics = of_norm or known.get(count, ())
    if len(statistics) != count:
        raise UserError(
            f"the source's SW layers have {count} importance weights each; name their {count} "
            f"statistics out of {', '.join(STATISTICS)}, such as --statistics "
            f"{','.join(STATISTICS[-count:])}"
        )
    chosen |= {"MODEL.SW.NORM": "SW", "MODEL.SW.STATISTICS": list(statistics)}
    chosen |= {"MODEL.SW.TIE_WEIGHT": True} if tied else {}
    return chosen | {"MODEL.SW.NUM_PERGROUP": own_num_pergroup}


def placement_config(network: nn.Module, placement: str | Sequence[int]) -> dict[str, object]:
    """The placement by its name, also where its layers were given by number."""
    if isinstance(placement, str):
        return {"MODEL.SW.PLACEMENT": placement}
    convs = numbered_convs(network)
    numbers = sorted(set(placement))
    for name in PLACEMENTS:
        try:
            same = [conv.number for conv in place(convs, name)] == numbers
        except UserError:
            continue  # it takes no layer of this network
        if same:
            return {"MODEL.SW.PLACEMENT": name}
    return {"MODEL.SW.LAYERS": numbers}
