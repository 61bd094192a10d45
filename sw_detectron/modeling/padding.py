"""Padding of images in a network: where the true sizes come from, and what convolutions see.

Detectron2's models put images of several sizes into one tensor, an `ImageList`, which has the
sizes, and hand on the tensor alone. So that layers find the sizes, they are noted on the tensor's
storage, and the modules of a network say them to their thread while they run: see
`layers.padding`. A note stays with a storage through views and `detach`, and so with the inputs
that activation checkpointing runs a module again with, in whatever thread.
"""

import functools
import math
import threading
import warnings
import weakref
from collections.abc import Iterator

import torch
from detectron2.layers import DeformConv, ModulatedDeformConv
from detectron2.modeling import ResNet
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator.rpn import StandardRPNHead
from detectron2.structures import ImageList
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..layers import SwitchWhiten2d
from ..layers.padding import PADDINGS, ImageSizes, current_sizes, set_current_sizes

_NOTE = "_sw_detectron_image_sizes"
_HANDLES = "_sw_detectron_padding_hooks"
_CONVOLUTIONS = (nn.Conv2d, DeformConv, ModulatedDeformConv)
_POOLINGS = (nn.MaxPool2d, nn.AvgPool2d)
_COUNTS = "a model counts padding as pixels, whatever MODEL.SW.PADDING says"

Maps = Tensor | dict[str, Tensor]


class _Thread(threading.local):
    """
    Attributes:
        lists: the lists of images that may be in use, the latest last.
        entered: what the sizes were before each of the modules that are running.
    """

    def __init__(self):
        self.lists: list[weakref.ref[ImageList]] = []
        self.entered: list[ImageSizes | None] = []


_thread = _Thread()


def note_image_sizes(images: ImageList) -> None:
    """Note the sizes of a list of images on its tensor."""
    sizes = images.image_sizes
    if _is_recorded() or images.tensor.dim() != 4:
        return  # what is recorded has to hold for other sizes; label maps have no channels
    if not all(isinstance(side, int) for size in sizes for side in size):
        return
    height, width = images.tensor.shape[2:]
    found = ImageSizes(tuple((h, w) for h, w in sizes), height, width)
    _note(images.tensor, found)
    setattr(images, _NOTE, found)
    _thread.lists = [ref for ref in _thread.lists if ref() is not None] + [weakref.ref(images)]


def _sizes_in_use(x: Tensor) -> ImageSizes | None:
    """Those of the images that a tensor is a copy of: a model may have cast them, or put them into
    another memory format."""
    for images in filter(None, (ref() for ref in reversed(_thread.lists))):
        sizes = getattr(images, _NOTE)
        if (len(x), *x.shape[2:]) == (len(sizes.sizes), sizes.height, sizes.width):
            return sizes
    return None


def set_padding(model: nn.Module, padding: str) -> None:
    """Say what a detector, or a backbone, does with the padding of its images.

    With "ignored" and "zeroed", SW layers take statistics over the pixels of the images. With
    "zeroed", besides, every convolution of more than one pixel sees zeros in the padding, as beyond
    the border of an image alone, and so does whoever takes the maps of the backbone; in inference,
    the heads of RPN, RetinaNet and FCOS find no object there; and ROI heads see the last row and
    column repeated, as beyond the border of a map. ROI heads' own maps have no padding.

    Args:
        model: it is changed in place, and can be changed again.
        padding: one of `layers.padding.PADDINGS`.

    Raises:
        ValueError: there is no such value.
    """
    if padding not in PADDINGS:
        raise ValueError(f"padding must be one of {', '.join(PADDINGS)}, got {padding!r}")
    of_rois = set(getattr(model, "roi_heads", nn.Identity()).modules())
    backbone = getattr(model, "backbone", model)
    # A stem pools by a function, which has no hooks: its convolutions hand on zeros.
    stems = [module.stem for module in model.modules() if isinstance(module, ResNet)]
    stem_convs = {m for stem in stems for m in stem.modules() if isinstance(m, nn.Conv2d)}
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
        module.__dict__.pop("__prepare_scriptable__", None)
        if isinstance(module, SwitchWhiten2d):
            module.padding = "counted" if module in of_rois else padding
        hooks = []
        if module not in of_rois and padding != "counted":
            gives_zeros = module is backbone or module in stem_convs
            hooks = list(_hooks(module, padding == "zeroed", gives_zeros))
        elif isinstance(module, ROIPooler) and padding == "zeroed":
            hooks = [module.register_forward_pre_hook(_repeat_border)]
        if hooks:
            module.__dict__[_HANDLES] = hooks
            module.__dict__["__prepare_scriptable__"] = functools.partial(_without_hooks, module)


def _hooks(module: nn.Module, zeroed: bool, gives_zeros: bool) -> Iterator[RemovableHandle]:
    """Those of one module, registered.

    Args:
        gives_zeros: with "zeroed", its output is zero in the padding.
    """
    if isinstance(module, _CONVOLUTIONS + _POOLINGS):
        sides = module.kernel_size
        if zeroed and (sides if isinstance(sides, int) else max(sides)) > 1:
            yield module.register_forward_pre_hook(_zero_input)
        if zeroed and gives_zeros:
            yield module.register_forward_hook(_zero_output)
    elif any(module.children()):
        yield module.register_forward_pre_hook(_enter, with_kwargs=True)
        if zeroed and gives_zeros:
            yield module.register_forward_hook(_zero_output)
        if zeroed and isinstance(module, (StandardRPNHead, RetinaNetHead)):
            yield module.register_forward_hook(_find_nothing)
        yield module.register_forward_hook(_leave, always_call=True)


def _without_hooks(module: nn.Module) -> nn.Module:
    """What torch.jit.script takes in the place of a module: sizes are not known there.

    The module itself stays without hooks, too.
    """
    left = "the model that was scripted does so too, until set_padding is called again"
    warnings.warn(f"scripted, {_COUNTS}; {left}", stacklevel=2)
    del module.__dict__["__prepare_scriptable__"]
    for handle in module.__dict__.pop(_HANDLES):
        handle.remove()
    prepare = getattr(module, "__prepare_scriptable__", None)  # of its class
    return module if prepare is None else prepare()


def _enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Say the sizes to the thread while a module runs."""
    if _is_recorded():
        if torch.jit.is_tracing():
            warnings.warn(f"traced, {_COUNTS}", stacklevel=2)
        return
    maps = list(_maps((args, kwargs)))
    sizes = next(filter(None, map(_noted, maps)), None) or current_sizes()
    if sizes is None and maps:
        sizes = _sizes_in_use(maps[0])
    for x in maps:
        if sizes is not None and len(x) == len(sizes.sizes):
            _note(x, sizes)
    _thread.entered.append(set_current_sizes(sizes))


def _leave(module: nn.Module, args: tuple, output: object) -> None:
    if _is_recorded():
        return
    sizes = current_sizes()
    for x in _maps(output):
        if sizes is not None and len(x) == len(sizes.sizes):
            _note(x, sizes)
    set_current_sizes(_thread.entered.pop())


def _zero_input(module: nn.Module, args: tuple) -> tuple:
    return _zero(args[0]), *args[1:]


def _zero_output(module: nn.Module, args: tuple, output: Maps) -> Maps:
    if isinstance(output, dict):
        return {name: _zero(x) for name, x in output.items()}
    return _zero(output)


def _zero(x: Tensor) -> Tensor:
    sizes = current_sizes()
    mask = None if sizes is None else sizes.mask(x)
    return x if mask is None else x.masked_fill(~mask, 0)


def _find_nothing(head: nn.Module, args: tuple, output: tuple) -> tuple | None:
    """In inference no object is found in the padding. The logits come first, by level."""
    sizes = current_sizes()
    if head.training or sizes is None:
        return None
    logits, *rest = output
    masks = [sizes.mask(x) for x in logits]
    found = [x if m is None else x.masked_fill(~m, -math.inf) for x, m in zip(logits, masks)]
    return found, *rest


def _repeat_border(pooler: nn.Module, args: tuple) -> tuple | None:
    """Repeat the last row and column of images once, which is as far as a box can look."""
    maps, *rest = args
    return [_with_border(x) for x in maps], *rest


def _with_border(x: Tensor) -> Tensor:
    sizes = _noted(x)
    extent = None if sizes is None else sizes.extent(x)
    if extent is None:
        return x
    x = x.clone()
    for image, (rows, columns) in enumerate(extent.sides):
        if 0 < rows < x.shape[2]:
            x[image, :, rows] = x[image, :, rows - 1]
        if 0 < columns < x.shape[3]:
            x[image, :, :, columns] = x[image, :, :, columns - 1]
    return x


def _maps(tree: object) -> Iterator[Tensor]:
    """The tensors of four dimensions in nested sequences and mappings."""
    if isinstance(tree, Tensor):
        if tree.dim() == 4:
            yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _maps(item)
    elif isinstance(tree, dict):
        yield from _maps(list(tree.values()))


def _is_recorded() -> bool:
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def _noted(x: Tensor) -> ImageSizes | None:
    return getattr(x.untyped_storage(), _NOTE, None)


def _note(x: Tensor, sizes: ImageSizes) -> None:
    setattr(x.untyped_storage(), _NOTE, sizes)
