"""Time and memory of the training steps of whole networks, with SW and without."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.modeling import ResNet, build_model
from detectron2.modeling.backbone import BasicStem
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from ..engine import load_config
from ..errors import UserError
from ..layers import SwitchWhiten2d
from ..layers.padding import PADDINGS
from ..modeling import replace_norms
from .arguments import MEMORY_FORMATS, Shape, format_shape
from .results import BASELINE, Result
from .timing import Run, kept_bytes, peak_bytes, summarize, time_rounds

MODELS = {  # images, height and width by default: on a CPU and on a GPU
    "resnet50": ((8, 224, 224), (64, 224, 224)),
    "mask_rcnn": ((1, 320, 320), (2, 800, 1216)),
    "semantic": ((2, 233, 233), (2, 713, 713)),  # Cityscapes' crops
    "padded": ((2, 320, 320), (2, 800, 1216)),  # Mask R-CNN, whose last image is smaller
}
MASK_RCNN_CONFIG = "mask_rcnn_R50_FPN_SW_2x.yaml"
THIN_CONFIG = "shapes_mask_rcnn_R18_FPN_SW.yaml"
SEMANTIC_CONFIG = "cityscapes_semantic_R50_SW_7layers_newton.yaml"


def benchmark_models(
    models: Sequence[str],
    device: torch.device,
    batch: int | None = None,
    size: tuple[int, int] | None = None,
    memory_formats: Sequence[str] = ("contiguous",),
    amp: bool = False,
    rounds: int = 25,
    warmup: int = 3,
    compiler: str | None = None,
    thin: bool = False,
) -> list[Result]:
    """Training steps with BN everywhere, and with SW at the seven layers of the paper's ResNet-50;
    for segmentation at its fourteen too, and for padded images with each MODEL.SW.PADDING.

    A step is a forward pass, a backward pass and an update by SGD, on random images. In one
    process, as here, SyncBN is BN.

    Args:
        models: names out of `MODELS`.
        batch, size: images, and their height and width in pixels; by default those of `MODELS`.
        memory_formats: names out of `MEMORY_FORMATS`.
        amp: autocast to bfloat16.
        compiler: a backend of `torch.compile` for the networks; None leaves them as they are.
        thin: take small networks in the place of ResNet-50 and Mask R-CNN, to rehearse.

    Returns:
        Durations of a "training step", the memory that its forward pass keeps, and the peak of its
        memory beyond parameters and momentum, in gigabytes (10^9).

    Raises:
        UserError: the arguments do not fit each other.
    """
    makers = {
        "resnet50": partial(_classifier_loss, 1 if thin else 4),
        "mask_rcnn": partial(
            _detectron2_loss, THIN_CONFIG if thin else MASK_RCNN_CONFIG, _random_instances
        ),
        "semantic": partial(_detectron2_loss, SEMANTIC_CONFIG, _random_labels),
        "padded": partial(
            _detectron2_loss, THIN_CONFIG if thin else MASK_RCNN_CONFIG, _random_instances
        ),
    }
    results = []
    for model in models:
        images, *sides = MODELS[model][device.type == "cuda"]
        shape = (batch or images, 3, *(size or sides))
        case = f"{model}{' compiled' if compiler else ''} {format_shape(shape)}"
        contenders = [("none", ""), ("imagenet", "")]
        if model == "semantic":
            contenders.append(("segmentation", ""))
        if model == "padded":
            contenders = [("none", "counted"), *(("imagenet", padding) for padding in PADDINGS)]
        for name in memory_formats:
            networks, losses, steps = {}, {}, {}
            for placement, padding in contenders:
                torch.manual_seed(0)
                network, loss = makers[model](
                    placement, padding, shape, device, MEMORY_FORMATS[name]
                )
                if compiler:
                    network.compile(backend=compiler)
                count = sum(isinstance(module, SwitchWhiten2d) for module in network.modules())
                contender = f"{count} x SW {padding}".strip() if count else BASELINE
                networks[contender] = network
                losses[contender] = partial(_autocast, loss, device, amp)
                steps[contender] = _training_step(network, losses[contender])
            times = time_rounds(steps, device, rounds, warmup, title=f"{case} {name}")
            for contender, step in steps.items():
                timings = {"training step": summarize(times[contender], times[BASELINE])}
                kept = kept_bytes(losses[contender], device, networks[contender].parameters())
                memory = {"kept_gb": kept / 1e9, "peak_gb": peak_bytes(step, device) / 1e9}
                results.append(Result(case, name, contender, timings, memory))
    return results


def _classifier_loss(
    num_stages: int,
    placement: str,
    padding: str,
    shape: Shape,
    device: torch.device,
    memory_format: torch.memory_format,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The first stages of a ResNet-50, and its loss on random images (N, 3, H, W)."""
    stages = ResNet.make_default_stages(50, norm="BN", stride_in_1x1=False)[:num_stages]
    model = ResNet(BasicStem(norm="BN"), stages, num_classes=1000)
    replace_norms(model, placement)
    model.to(device, memory_format=memory_format).train()
    images = torch.randn(shape, device=device).contiguous(memory_format=memory_format)
    labels = torch.randint(1000, (shape[0],), device=device)
    return model, lambda: nn.functional.cross_entropy(model(images)["linear"], labels)


def _detectron2_loss(
    config: str,
    targets: Callable[[CfgNode, tuple[int, int]], dict],
    placement: str,
    padding: str,
    shape: Shape,
    device: torch.device,
    memory_format: torch.memory_format,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model of a config, and the sum of its losses on random images (N, 3, H, W).

    Args:
        targets: gives the entries of an image's input that are to be learned, for a size (H, W).
        padding: MODEL.SW.PADDING, of images of which the last has three quarters of the height and
            width; or empty, for images of one size.
    """
    overrides = ["MODEL.SW.PLACEMENT", placement, "MODEL.DEVICE", str(device)]
    overrides += ["MODEL.SW.PADDING", padding] * bool(padding)
    sizes = [shape[2:]] * shape[0]
    if padding:
        sizes[-1] = tuple(side * 3 // 4 for side in shape[2:])
    cfg = load_config(config, overrides)
    model = build_model(cfg).to(memory_format=memory_format).train()
    inputs = [
        {"image": torch.randint(256, (3, *size), dtype=torch.uint8), **targets(cfg, size)}
        for size in sizes
    ]

    def loss() -> Tensor:
        with EventStorage():  # Detectron2's models log into it
            return sum(model(inputs).values())

    return model, loss


def _random_instances(cfg: CfgNode, size: tuple[int, int], count: int = 8) -> dict[str, Instances]:
    """Diamonds of a tenth to two thirds of the image's height and width."""
    height, width = size
    extent = torch.tensor([width, height])
    side = (0.1 + 0.55 * torch.rand(count, 2)) * extent
    low = torch.rand(count, 2) * (extent - side)
    boxes = torch.cat([low, low + side], dim=1)
    polygons = [
        [np.array([(x0 + x1) / 2, y0, x1, (y0 + y1) / 2, (x0 + x1) / 2, y1, x0, (y0 + y1) / 2])]
        for x0, y0, x1, y1 in boxes.tolist()
    ]
    instances = Instances(
        size,
        gt_boxes=Boxes(boxes),
        gt_classes=torch.randint(cfg.MODEL.ROI_HEADS.NUM_CLASSES, (count,)),
        gt_masks=PolygonMasks(polygons),
    )
    return {"instances": instances}


def _random_labels(cfg: CfgNode, size: tuple[int, int]) -> dict[str, Tensor]:
    if any(side % 8 != 1 for side in size):
        raise UserError("for segmentation, the size must be a multiple of 8, plus 1")
    return {"sem_seg": torch.randint(cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES, size)}


def _autocast(loss: Callable[[], Tensor], device: torch.device, amp: bool) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        return loss()


def _training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Run:
    # So slow that the network stays about as it is: its predictions decide how much there is to
    # do for the heads of a detector.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
