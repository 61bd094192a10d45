"""A ResNet for CIFAR with the module names that most published weights have.

Written from He et al.'s section 4.2, apart from the package's own, for comparison with it.
"""

import io
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn


class Block(nn.Module):
    def __init__(self, before, channels):
        super().__init__()
        self.stride = 1 if before == channels else 2
        self.conv1 = nn.Conv2d(before, channels, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride == 2:
            x = F.max_pool2d(x, kernel_size=1, stride=2)
            zeros = x.new_zeros(x.shape[0], x.shape[1] // 2, *x.shape[2:])
            x = torch.cat([zeros, x, zeros], dim=1)
        return F.relu(x + y)


class HeResNet(nn.Module):
    def __init__(self, depth):
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*[Block(16, 16) for _ in range(blocks)])
        self.layer2 = nn.Sequential(Block(16, 32), *[Block(32, 32) for _ in range(blocks - 1)])
        self.layer3 = nn.Sequential(Block(32, 64), *[Block(64, 64) for _ in range(blocks - 1)])
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean(dim=(2, 3)))


def detectron2_name(name: str) -> str:
    """ "layer1.0.bn2.weight" to "res2.0.conv2.norm.weight"."""
    for k in (1, 2, 3):
        name = name.replace(f"layer{k}.", f"res{k + 1}.")
    name = f"stem.{name}" if name.startswith(("conv1", "bn1")) else name
    return name.replace("bn1.", "conv1.norm.").replace("bn2.", "conv2.norm.")


def pretrained_state(shared: Path, depth: int) -> dict[str, torch.Tensor]:
    """Real weights, with the names of the package's network."""
    (path,) = (shared / "data/pretrained").glob(f"cifar10_resnet{depth}-*.th")
    state = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]
    return {detectron2_name(k.removeprefix("module.")): v for k, v in state.items()}


def cifar_test_images(shared: Path, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized images (number, 3, 32, 32), channels_last, and labels (number,)."""
    with np.load(shared / "data/cifar10_jpeg/test.npz") as file:
        data, offsets, labels = file["data"].tobytes(), file["offsets"], file["labels"]
    encoded = [data[offsets[i] : offsets[i + 1]] for i in range(number)]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(e)).convert("RGB")) for e in encoded])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = (torch.from_numpy(pixels) / 255 - mean) / std
    return images.permute(0, 3, 1, 2), torch.from_numpy(labels[:number].astype(np.int64))


def randomize_norms(net: nn.Module) -> None:
    """Random γ, β, running mean and running variance for all BN layers."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(std=0.5)
            module.running_mean.normal_(std=0.5)
            module.running_var.uniform_(0.5, 2)
