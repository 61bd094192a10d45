"""What weights need, as a model shows it that no config of keys describes: see `facts`."""

from detectron2.modeling.backbone.resnet import BottleneckBlock
from torch import Tensor, nn

from ..layers import SwitchWhiten2d
from ..modeling.placement import is_of_detectron2, norm_of, numbered_convs
from .source_config import placement_config


def facts_of_model(model: nn.Module) -> dict[str, object]:
    """The facts about a Detectron2 model's input, and about its ResNet or VGG, if it has one."""
    facts = {}
    if isinstance(getattr(model, "input_format", None), str):
        facts["INPUT.FORMAT"] = model.input_format
    for name in ("pixel_mean", "pixel_std"):
        if isinstance(getattr(model, name, None), Tensor):
            facts[f"MODEL.{name.upper()}"] = getattr(model, name).flatten().tolist()
    network = next((module for module in model.modules() if is_of_detectron2(module)), None)
    return facts if network is None else facts | _facts_of_network(network)


def _facts_of_network(network: nn.Module) -> dict[str, object]:
    facts = {}
    for block in network.modules():
        if isinstance(block, BottleneckBlock) and block.stride > 1:
            facts["MODEL.RESNETS.STRIDE_IN_1X1"] = block.conv1.stride[0] > 1
    norms = {conv.number: norm_of(network, conv) for conv in numbered_convs(network)}
    layers = {n: norm for n, norm in norms.items() if isinstance(norm, SwitchWhiten2d)}
    facts |= placement_config(network, list(layers)) | {"MODEL.SW.LAYERS": list(layers)}
    if not layers:
        return facts
    layer = next(iter(layers.values()))
    return facts | {
        "MODEL.SW.STATISTICS": list(layer.statistics),
        "MODEL.SW.NUM_PERGROUP": layer.num_pergroup,
        "MODEL.SW.WHITENING": layer.whitening,
        "MODEL.SW.TIE_WEIGHT": layer.tie_weight,
    }
