"""The VGG-16 backbone: DeepLab's network, SW in it, and torchvision's weights for it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from detectron2.config import get_cfg
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling import build_backbone
from PIL import Image
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError, add_sw_config, replace_norms
from sw_detectron.analysis import layer_features
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.checkpoint.convert import Images, convert_checkpoint
from sw_detectron.checkpoint.facts import contradictions, facts_of
from sw_detectron.checkpoint.source_config import IMAGENET_RGB
from sw_detectron.modeling import numbered_convs
from sw_detectron.modeling.summary import sw_layers
from sw_detectron.modeling.vgg import VGG

FIRST_OF_GROUPS = {
    1: "group1.conv1",
    3: "group2.conv1",
    5: "group3.conv1",
    8: "group4.conv1",
    11: "group5.conv1",
}


def make_cfg(**sw):
    cfg = get_cfg()
    add_sw_config(cfg)
    cfg.MODEL.BACKBONE.NAME = "build_sw_vgg_backbone"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.SW.PLACEMENT = "vgg"
    for key, value in sw.items():
        cfg.MODEL.SW[key] = value
    return cfg


def build(cfg):
    return build_backbone(cfg, ShapeSpec(channels=3))


def thin(**kwargs):
    return VGG(channels=(16, 32, 32, 48, 64), fc_channels=64, **kwargs)


@pytest.fixture(scope="module")
def torchvision_vgg():
    torch.manual_seed(0)
    net = torchvision.models.vgg16()
    for parameter in net.parameters():
        if parameter.dim() == 1:  # biases are zero to begin with
            nn.init.uniform_(parameter, -0.1, 0.1)
    return net


@pytest.fixture(scope="module")
def source(torchvision_vgg, tmp_path_factory):
    path = tmp_path_factory.mktemp("vgg") / "vgg16.pth"
    torch.save(torchvision_vgg.state_dict(), path)
    return path


def deeplab(net):
    """torchvision's network as DeepLab takes it, up to fc7, written down from the paper."""
    layers = [
        layer
        for number, layer in enumerate(net.features)
        if number not in (23, 30)  # the last two poolings
    ]

    def forward(x):
        for number, layer in enumerate(layers):
            if isinstance(layer, nn.Conv2d) and number > 22:
                x = F.conv2d(x, layer.weight, layer.bias, padding=2, dilation=2)
            elif isinstance(layer, nn.ReLU):
                x = F.relu(x)
            else:
                x = layer(x)
        fc6, fc7 = net.classifier[0], net.classifier[3]
        weight = torch.stack(
            [fc6.weight[4 * k].view(512, 7, 7)[:, [0, 3, 6]][:, :, [0, 3, 6]] for k in range(1024)]
        )
        x = F.relu(F.conv2d(x, weight, fc6.bias[0::4], padding=4, dilation=4))
        one_pixel = fc7.weight[0::4][:, 0::4, None, None]
        return F.relu(F.conv2d(x, one_pixel, fc7.bias[0::4]))

    return forward


def test_converted_weights_compute_what_torchvisions_do(torchvision_vgg, source):
    result = convert_checkpoint(source, placement="none")
    net = VGG()
    net.load_state_dict(result.model)
    x = torch.randn(2, 3, 41, 56)
    with torch.no_grad():
        found = net(x)["fc7"]
        expected = deeplab(torchvision_vgg)(x)
    assert found.shape == (2, 1024, 5, 7)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.01
    assert result.unused == ["classifier.6.weight", "classifier.6.bias"]
    assert result.config["MODEL.BACKBONE.NAME"] == "build_sw_vgg_backbone"
    assert result.config["INPUT.FORMAT"] == "RGB"


def test_number_of_parameters():
    groups = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 256)]
    groups += [(256, 512)] + [(512, 512)] * 5
    last = [(512, 1024), (1024, 1024)]
    expected = sum(9 * before * after + after for before, after in groups + last)
    assert sum(p.numel() for p in VGG().parameters()) == expected
    # As torchvision counts its own.
    convolutions = sum(9 * before * after + after for before, after in groups)
    with torch.device("meta"):
        features = torchvision.models.vgg16().features
    assert sum(p.numel() for p in features.parameters()) == convolutions


def test_features_have_the_shapes_that_are_said():
    names = [*(f"group{k}" for k in range(1, 6)), "fc7"]
    net = thin(out_features=names)
    features = net(torch.zeros(1, 3, 32, 48))
    shapes = net.output_shape()
    assert list(features) == list(shapes) == names
    assert [shapes[name].stride for name in names] == [1, 2, 4, 8, 8, 8]
    for name, feature in features.items():
        stride = shapes[name].stride
        assert feature.shape == (1, shapes[name].channels, 32 // stride, 48 // stride)


@pytest.mark.parametrize("norm", ["SW", "SWb", "SN", "BN"])
def test_the_first_convolution_of_each_group_gets_the_norm(norm):
    net = build(make_cfg(NORM=norm))
    placed = {c.name: c.module.norm for c in numbered_convs(net) if c.module.norm is not None}
    assert list(placed) == list(FIRST_OF_GROUPS.values())
    kind = nn.BatchNorm2d if norm == "BN" else SwitchWhiten2d
    assert all(isinstance(layer, kind) for layer in placed.values())
    if norm != "BN":
        assert {row.number: row.name for row in sw_layers(net)} == FIRST_OF_GROUPS


def test_placements_of_a_vgg():
    assert sw_layers(build(make_cfg(PLACEMENT="none"))) == []
    assert [row.number for row in sw_layers(build(make_cfg(LAYERS=[2, 13])))] == [2, 13]
    assert len(sw_layers(build(make_cfg(PLACEMENT="all")))) == 13
    with pytest.raises(UserError, match=r"cannot place SW at layers \[14\]"):
        build(make_cfg(LAYERS=[1, 14]))


def test_a_resnet_has_no_groups():
    with pytest.raises(UserError, match="placement 'vgg' hits no layer"):
        replace_norms(torchvision.models.resnet18(), "vgg")


def test_the_norm_stands_between_convolution_and_relu():
    net = thin()
    replace_norms(net, [3], lambda channels: nn.GroupNorm(4, channels))
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 16)
    group = net.group2
    seen = []
    group.conv2.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    net(x)
    before = net.pool(net.group1(x))
    conv = F.conv2d(before, group.conv1.weight, group.conv1.bias, padding=1)
    torch.testing.assert_close(seen[0], F.relu(F.group_norm(conv, 4)))


def test_freezing_groups():
    cfg = make_cfg(NORM="SW")
    cfg.MODEL.BACKBONE.FREEZE_AT = 2
    net = build(cfg)
    learns = {name.split(".")[0] for name, p in net.named_parameters() if p.requires_grad}
    assert learns == {"group3", "group4", "group5", "fc6", "fc7"}
    assert [row.layer.frozen for row in sw_layers(net)] == [True, True, False, False, False]
    replace_norms(net, [1], "BN")
    assert isinstance(net.freeze(1).group1.conv1.norm, FrozenBatchNorm2d)


def test_channels_and_outputs_that_are_none():
    with pytest.raises(UserError, match="5 groups, got channels of 2"):
        VGG(channels=(16, 32))
    with pytest.raises(UserError, match="no output res5; there are group1, "):
        VGG(out_features=["res5"])


def test_conversion_with_sw(source, tmp_path):
    result = convert_checkpoint(source, norm="SWb")
    assert {row.number: row.name for row in result.placed} == FIRST_OF_GROUPS
    assert {row.before for row in result.placed} == {"none"}
    assert any("those of the placed layers are new" in note for note in result.notes)
    # What it makes is a source too, alone and in a model, and says itself what it needs.
    for prefix in ("", "backbone."):
        path = tmp_path / "converted.pth"
        model = {prefix + name: tensor for name, tensor in result.model.items()}
        if prefix:
            model |= {"sem_seg_head.weight": torch.zeros(3)}
        torch.save({"model": model, "sw_detectron": result.carried}, path)
        again = convert_checkpoint(path)
        assert again.source == "detectron2"
        assert again.is_detector == bool(prefix)
        assert again.config["MODEL.SW.PLACEMENT"] == "vgg"
        assert again.config["MODEL.SW.STATISTICS"] == ["bw", "iw", "bn", "in", "ln"]
        assert again.config["INPUT.FORMAT"] == "RGB"
        assert all(torch.equal(again.model[name], tensor) for name, tensor in model.items())


def test_calibration(torchvision_vgg, source, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    found = convert_checkpoint(source, images=Images(str(tmp_path), 1)).model
    mean, std = IMAGENET_RGB["MODEL.PIXEL_MEAN"], IMAGENET_RGB["MODEL.PIXEL_STD"]
    x = torch.from_numpy((pixels - np.array(mean)) / std).permute(2, 0, 1)[None].float()
    first = torchvision_vgg.features[0](x).detach()
    running = found["group1.conv1.norm.running_mean"].flatten()
    torch.testing.assert_close(running, first.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: torchvision.models.vgg16_bn(), "not torchvision's vgg16 without BN"),
        (lambda: torchvision.models.vgg11(), "not torchvision's vgg16 without BN"),
        (lambda: torchvision.models.alexnet(), "no checkpoint of a ResNet"),
    ],
    ids=["vgg16_bn", "vgg11", "alexnet"],
)
def test_other_networks_are_refused(make, message, tmp_path):
    with torch.device("meta"):
        state = make().state_dict()
    state = dict.fromkeys(state, torch.zeros(1))  # the names say enough
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(UserError, match=message):
        convert_checkpoint(tmp_path / "other.pth")


def test_layers_of_another_shape_are_refused(torchvision_vgg, tmp_path):
    state = torchvision_vgg.state_dict()
    state["classifier.0.weight"] = torch.zeros(4096, 512)
    torch.save(state, tmp_path / "small.pth")
    with pytest.raises(UserError, match=r"fc6.weight has the shape \(4096, 512\)"):
        convert_checkpoint(tmp_path / "small.pth")


def test_no_warm_start(source):
    with pytest.raises(UserError, match="no norms that SW layers could start as"):
        convert_checkpoint(source, norm="SWb", warm_start=True)


def test_facts(source):
    carried = convert_checkpoint(source).carried["config"]
    cfg = make_cfg()
    cfg.merge_from_list(["INPUT.FORMAT", "RGB"])
    for key in ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"):
        cfg.merge_from_list([key, carried[key]])
    assert not any(key.startswith("MODEL.RESNETS.") for key in facts_of(cfg))
    assert contradictions(carried, facts_of(cfg)) == []
    cfg.MODEL.VGG.FC_CHANNELS = 512
    cfg.MODEL.SW.NORM = "SN"
    lines = contradictions(carried, facts_of(cfg))
    assert [line.split(" ")[0] for line in lines] == ["MODEL.VGG.FC_CHANNELS", "MODEL.SW.NORM"]


def test_features_of_all_thirteen_convolutions():
    net = thin()
    replace_norms(net, "vgg", lambda channels: SwitchWhiten2d(channels, num_pergroup=16))
    features = layer_features(net, [torch.randn(2, 3, 32, 32)])
    assert len(features) == 13
    assert features["group1.conv1"].shape == (2, 16 * 16)


def test_torchvisions_file_loads_as_it_is(source, tmp_path):
    net = nn.ModuleDict({"backbone": build(make_cfg(NORM="SW"))})
    Checkpointer(net).load(str(source))
    state = net.backbone.state_dict()
    for name, tensor in convert_checkpoint(source, placement="none").model.items():
        assert torch.equal(state[name], tensor), name
