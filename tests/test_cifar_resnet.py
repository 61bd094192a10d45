"""He et al.'s ResNets for CIFAR."""

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling import ResNet, build_backbone
from helpers.he_resnet import (
    HeResNet,
    cifar_test_images,
    detectron2_name,
    pretrained_state,
    randomize_norms,
)
from torch import nn

from sw_detectron import UserError, add_sw_config
from sw_detectron.modeling.cifar_resnet import make_cifar_resnet
from sw_detectron.modeling.summary import sw_layers


@pytest.mark.parametrize(
    "depth, millions, digits",
    [(20, 0.27, 2), (32, 0.46, 2), (44, 0.66, 2), (56, 0.85, 2), (110, 1.7, 1)],
)
def test_parameter_counts_of_the_paper(depth, millions, digits):
    with torch.device("meta"):
        net = make_cifar_resnet(depth, num_classes=10)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, digits) == millions
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in net.modules()) == depth


def test_it_computes_what_an_independent_network_does():
    torch.manual_seed(0)
    other = HeResNet(20).double().eval()
    randomize_norms(other)
    net = make_cifar_resnet(20, num_classes=10).double().eval()
    net.load_state_dict({detectron2_name(k): v for k, v in other.state_dict().items()})
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    # float64, the same operations in another order: rounding is 1e-13 of the logits.
    torch.testing.assert_close(net(x)["linear"], other(x), rtol=1e-10, atol=1e-10)


def test_features_and_shapes():
    net = make_cifar_resnet(20, out_features=["res2", "res3", "res4"])
    assert type(net) is ResNet
    shapes = {name: (s.channels, s.stride) for name, s in net.output_shape().items()}
    assert shapes == {"res2": (16, 1), "res3": (32, 2), "res4": (64, 4)}
    features = net(torch.randn(2, 3, 32, 32))
    assert {name: tuple(f.shape) for name, f in features.items()} == {
        "res2": (2, 16, 32, 32),
        "res3": (2, 32, 16, 16),
        "res4": (2, 64, 8, 8),
    }
    assert list(make_cifar_resnet(8)(torch.randn(1, 3, 32, 32))) == ["res4"]


@pytest.mark.parametrize("depth", [18, 2, 21])
def test_a_depth_that_does_not_exist_is_one_clear_line(depth):
    with pytest.raises(UserError, match=f"depth {depth}: it is 6n \\+ 2, such as 20"):
        make_cifar_resnet(depth)


def test_from_a_config():
    cfg = get_cfg()
    add_sw_config(cfg)
    cfg.MODEL.BACKBONE.NAME = "build_cifar_resnet_backbone"
    cfg.MODEL.BACKBONE.FREEZE_AT = 1
    cfg.MODEL.RESNETS.DEPTH = 20
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res4"]
    cfg.MODEL.SW.PLACEMENT = "cifar"
    cfg.MODEL.SW.NORM = "SWb"
    net = build_backbone(cfg, ShapeSpec(channels=1))
    assert net.stem.conv1.in_channels == 1
    assert list(net.output_shape()) == ["res2", "res4"]
    assert {row.number: row.name for row in sw_layers(net)} == {
        1: "stem.conv1",
        4: "res2.1.conv1",
        8: "res3.0.conv1",
        12: "res3.2.conv1",
        16: "res4.1.conv1",
    }
    assert [row.name for row in sw_layers(net) if row.layer.frozen] == ["stem.conv1"]
    assert all(row.layer.statistics == ("bw", "iw", "bn", "in", "ln") for row in sw_layers(net))
    assert isinstance(net.res2[0].conv1.norm, nn.BatchNorm2d)
    cfg.MODEL.BACKBONE.FREEZE_AT = 2
    assert isinstance(
        build_backbone(cfg, ShapeSpec(channels=3)).res2[0].conv1.norm, FrozenBatchNorm2d
    )


@pytest.mark.slow
@pytest.mark.parametrize("depth, error", [(20, 18.97), (56, 16.80)])
def test_real_weights_give_their_known_error(shared_data, depth, error):
    images, labels = cifar_test_images(shared_data, 10000)
    net = make_cifar_resnet(depth, num_classes=10).eval().to(memory_format=torch.channels_last)
    net.load_state_dict(pretrained_state(shared_data, depth))
    with torch.inference_mode():
        predicted = torch.cat([net(x)["linear"].argmax(dim=1) for x in images.split(100)])
    # In percent of 10,000 images: float32 rounding may turn a few.
    assert 100 * (predicted != labels).double().mean().item() == pytest.approx(error, abs=0.1)
