"""The losses of style transfer: content and style as a fixed network sees them, and smoothness.

Johnson et al. (ECCV 2016), equations 2 to 5, in the scales of the code that came with the paper:
means over a map's and over a Gram matrix's entries, of the features of a network whose input is in
pixel values.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import vgg

from ...checkpoint.reading import fetched, read_checkpoint
from ...errors import UserError

RANDOM = "random"
_SEED = 0  # of the random filters, which are the same in all runs


class LossNetwork(nn.Module):
    """The convolutions of VGG-16 up to the last of some ReLUs, with fixed weights.

    Args:
        layers: names of the ReLUs, such as relu3_3, the third of the third group.

    Raises:
        UserError: there is no ReLU of that name.
    """

    def __init__(self, layers: Sequence[str]):
        super().__init__()
        features = vgg.make_layers(vgg.cfgs["D"])
        names = _relu_names(features)
        unknown = [layer for layer in layers if layer not in names]
        if unknown:
            raise UserError(f"VGG-16 has no {unknown[0]}; there are {', '.join(names)}")
        self._names = {index: name for name, index in names.items() if name in layers}
        self.features = features[: max(self._names) + 1]
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Normalized images (N, 3, H, W) to maps (N, C, h, w) by name."""
        found = {}
        for index, layer in enumerate(self.features):
            x = layer(x)
            if index in self._names:
                found[self._names[index]] = x
        return found


def _relu_names(features: nn.Sequential) -> dict[str, int]:
    """Where VGG's ReLUs are, by names such as relu3_3."""
    names, group, number = {}, 1, 0
    for index, layer in enumerate(features):
        if isinstance(layer, nn.ReLU):
            number += 1
            names[f"relu{group}_{number}"] = index
        elif isinstance(layer, nn.MaxPool2d):
            group, number = group + 1, 0
    return names


@functools.lru_cache(maxsize=2)
def load_loss_network(weights: str, layers: tuple[str, ...]) -> LossNetwork:
    """A loss network with weights from torchvision's file of VGG-16, or with fixed random ones.

    Random filters are He et al.'s (2015), which keep the scale of what they see, and no biases.
    (He, Wang and Hopcroft, 2016, describe what they are good for.)

    Args:
        weights: path or URL of the file; or "random".

    Raises:
        UserError: there is no such file, or it has not VGG-16's convolutions.
    """
    network = LossNetwork(layers)
    if weights == RANDOM:
        generator = torch.Generator().manual_seed(_SEED)
        for layer in network.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
                nn.init.zeros_(layer.bias)
        return network
    remedy = (
        "give torchvision's weights of VGG-16 (vgg16-397923af.pth, VGG16_Weights.IMAGENET1K_V1 "
        f"there), or {RANDOM} for fixed random filters"
    )
    try:
        found = read_checkpoint(fetched(weights) if "://" in weights else weights)
    except UserError as error:
        raise UserError(f"MODEL.STYLE.LOSS_NETWORK: {error}; {remedy}") from None
    for name, own in network.state_dict().items():
        shape = tuple(found[name].shape) if name in found else None
        if shape != tuple(own.shape):
            said = f"{name} has the shape {shape}" if shape else f"there is no {name}"
            raise UserError(f"MODEL.STYLE.LOSS_NETWORK {weights!r}: {said}; {remedy}")
    network.load_state_dict(found, strict=False)
    return network


class PerceptualLoss(nn.Module):
    """What is left of content, and what is missing of style, in stylized images.

    Args:
        network: whose features are compared; the losses begin on its device.
        style: (3, h, w), the style's image, in 0..255.
        content_layers, style_layers: of the network.
        weights: factors of the losses of content and of style, and of total variation.
        pixel_mean, pixel_std: of each channel, in 0..255, as the network's input wants them.
    """

    def __init__(
        self,
        network: LossNetwork,
        style: Tensor,
        content_layers: Sequence[str],
        style_layers: Sequence[str],
        weights: tuple[float, float, float],
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ):
        super().__init__()
        self.network = network
        self._content_layers = content_layers
        self._style_layers = style_layers
        self._weights = weights
        device = next(network.parameters()).device  # the network may be in use already
        for name, values in (("_mean", pixel_mean), ("_std", pixel_std)):
            self.register_buffer(name, torch.tensor(values, device=device).view(-1, 1, 1))
        features = self.features(style[None].to(self._mean))
        self._grams = {layer: gram_matrix(features[layer]) for layer in style_layers}

    def features(self, images: Tensor) -> dict[str, Tensor]:
        """Of images (N, 3, H, W) in 0..255, in the scale of pixel values."""
        scale = self._std.mean()
        found = self.network((images - self._mean) / self._std)
        return {layer: scale * x for layer, x in found.items()}

    def forward(self, stylized: Tensor, content: Tensor) -> dict[str, Tensor]:
        """The weighted losses `loss_content`, `loss_style` and `loss_tv`.

        Args:
            stylized, content: (N, 3, H, W), in 0..255; the stylized images have gradients.
        """
        with torch.autocast(stylized.device.type, enabled=False):  # half is too short for Grams
            stylized = stylized.float()
            features = self.features(stylized)
            with torch.no_grad():
                wanted = self.features(content.float())
            of_content = sum(
                F.mse_loss(features[layer], wanted[layer]) for layer in self._content_layers
            )
            of_style = sum(
                (gram_matrix(features[layer]) - self._grams[layer].to(stylized)).square().mean()
                for layer in self._style_layers
            )
            losses = (of_content, of_style, total_variation(stylized))
        names = ("loss_content", "loss_style", "loss_tv")
        return {name: w * loss for name, w, loss in zip(names, self._weights, losses)}


def gram_matrix(x: Tensor) -> Tensor:
    """(N, C, H, W) to the products of channels (N, C, C), summed over pixels, divided by C H W."""
    flat = x.flatten(2)
    return flat @ flat.transpose(1, 2) / x[0].numel()


def total_variation(images: Tensor) -> Tensor:
    """The sum of squared differences of neighbours, the mean over images (N, C, H, W)."""
    vertical = (images[:, :, 1:] - images[:, :, :-1]).square().sum()
    horizontal = (images[:, :, :, 1:] - images[:, :, :, :-1]).square().sum()
    return (vertical + horizontal) / len(images)
