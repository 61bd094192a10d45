"""Norm surgery on ResNets of any make: which layers, and what carries over."""

import copy

import pytest
import timm
import torch
import torchvision
from detectron2.config import get_cfg
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm, get_norm
from detectron2.modeling import build_model
from helpers.he_resnet import HeResNet, randomize_norms
from timm.layers import BatchNormAct2d, GroupNormAct
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError, replace_norms
from sw_detectron.modeling import find_resnet, numbered_convs
from sw_detectron.modeling.cifar_resnet import make_cifar_resnet
from sw_detectron.modeling.summary import sw_layers, sw_table


def on_meta(build, *args, **kwargs):
    """A network without storage, which is fast to build; enough where only names matter."""
    with torch.device("meta"):
        return build(*args, **kwargs)


def timm_net(name, **kwargs):
    return on_meta(timm.create_model, name, **kwargs)


def torchvision_net(name):
    return on_meta(getattr(torchvision.models, name), weights=None)


def only_bn(channels):
    return SwitchWhiten2d(channels, statistics=("bn",))


# Counted by hand: two convolutions in a basic block, three in a bottleneck.
BASIC_18 = {1: "conv1", 6: "layer2.0.conv1", 12: "layer3.1.conv1"}
BOTTLENECK_50 = {
    1: "conv1",
    6: "layer1.1.conv2",
    12: "layer2.0.conv2",
    18: "layer2.2.conv2",
    24: "layer3.0.conv2",
    30: "layer3.2.conv2",
    36: "layer3.4.conv2",
}
BOTTLENECK_101 = {
    **{number: BOTTLENECK_50[number] for number in (1, 6, 12, 18)},
    **{24 + 6 * i: f"layer3.{2 * i}.conv2" for i in range(12)},
}
RELEASED_50 = {
    1: "conv1",
    6: "layer1.1.conv2",
    15: "layer2.1.conv2",
    21: "layer2.3.conv2",
    27: "layer3.1.conv2",
    33: "layer3.3.conv2",
    39: "layer3.5.conv2",
}
HE_20 = {
    1: "conv1",
    4: "layer1.1.conv1",
    8: "layer2.0.conv1",
    12: "layer2.2.conv1",
    16: "layer3.1.conv1",
}
DEEP_STEM_50 = {
    1: "conv1.0",
    6: "layer1.0.conv3",
    12: "layer1.2.conv3",
    18: "layer2.1.conv3",
    24: "layer2.3.conv3",
    30: "layer3.1.conv3",
    36: "layer3.3.conv3",
    42: "layer3.5.conv3",
}


def norm_name(conv):
    """ "layer1.0.bn2" of "layer1.0.conv2"."""
    return {"conv1.0": "conv1.1"}.get(conv, conv.replace("conv", "bn"))


@pytest.mark.parametrize(
    "build, name, placement, expected",
    [
        (torchvision_net, "resnet18", "imagenet", BASIC_18),
        (torchvision_net, "resnet50", "imagenet", BOTTLENECK_50),
        (torchvision_net, "resnet50", "released", RELEASED_50),
        (torchvision_net, "resnext50_32x4d", "imagenet", BOTTLENECK_50),
        (torchvision_net, "resnet101", "imagenet", BOTTLENECK_101),
        (timm_net, "resnet50", "imagenet", BOTTLENECK_50),
        (timm_net, "resnext50_32x4d", "imagenet", BOTTLENECK_50),
        (timm_net, "seresnet50", "imagenet", BOTTLENECK_50),
        (timm_net, "resnetblur50", "imagenet", BOTTLENECK_50),
        (timm_net, "resnet50d", "imagenet", DEEP_STEM_50),
        (on_meta, HeResNet, "cifar", HE_20),
    ],
    ids=lambda value: getattr(value, "__name__", value) if not isinstance(value, dict) else "",
)
def test_names_by_placement(build, name, placement, expected):
    net = build(name, 20) if name is HeResNet else build(name)
    norms = {
        n
        for n, m in net.named_modules()
        if isinstance(m, nn.BatchNorm2d)  # the shortcuts' too
    }
    replaced = replace_norms(net, placement)
    assert list(replaced) == list(expected.values())
    assert all(isinstance(norm, nn.BatchNorm2d) for norm in replaced.values())
    assert {row.number: row.name for row in sw_layers(net)} == expected
    sw = {n for n, m in net.named_modules() if isinstance(m, SwitchWhiten2d)}
    assert sw == {norm_name(conv) for conv in expected.values()}
    assert {n for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)} == norms - sw
    assert sw_table(net).splitlines()[3].split()[:2] == [
        str(list(expected)[1]),
        list(expected.values())[1],
    ]


def test_every_convolution_of_a_deep_stem_counts():
    convs = numbered_convs(timm_net("resnet50d"))
    assert [(c.number, c.name, c.norm_name, c.stage, c.block, c.index) for c in convs[:4]] == [
        (1, "conv1.0", "conv1.1", "stem", 0, 1),
        (2, "conv1.3", "conv1.4", "stem", 0, 2),
        (3, "conv1.6", "bn1", "stem", 0, 3),
        (4, "layer1.0.conv1", "layer1.0.bn1", "res2", 0, 1),
    ]
    assert convs[-1].name == "layer4.2.conv3"
    assert len(convs) == 3 + 48
    pooled = numbered_convs(timm_net("resnet50d", replace_stem_pool=True))
    assert (pooled[3].name, pooled[3].norm_name) == ("maxpool.0", "maxpool.1")
    assert pooled[4].name == "layer1.0.conv1"


def test_the_last_stage_of_imagenet_nets_is_left_out_and_that_of_cifar_nets_is_not():
    assert len(replace_norms(torchvision_net("resnet50"), "all")) == 40  # 49 without layer4's 9
    assert list(replace_norms(on_meta(HeResNet, 20), "all"))[-1] == "layer3.2.conv2"
    assert list(replace_norms(on_meta(make_cifar_resnet, 20), "all"))[-1] == "res4.2.conv2"
    with pytest.raises(UserError, match="layer4, which never gets SW"):
        replace_norms(torchvision_net("resnet50"), [1, 41])


def test_inside_a_detector():
    detection = torchvision.models.detection
    model = on_meta(detection.fasterrcnn_resnet50_fpn, weights=None, weights_backbone=None)
    assert find_resnet(model)[0] == "backbone.body"
    assert list(replace_norms(model, "imagenet")) == list(BOTTLENECK_50.values())
    features = timm_net("resnet18", features_only=True)
    assert list(replace_norms(features, "imagenet")) == list(BASIC_18.values())
    assert [row.number for row in sw_layers(model)] == list(BOTTLENECK_50)
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "meta"
    model = on_meta(build_model, cfg)  # a Faster R-CNN whose head holds res5
    assert find_resnet(model)[0] == "backbone"
    assert list(replace_norms(model, "imagenet")) == [
        "stem.conv1",
        "res2.1.conv2",
        "res3.0.conv2",
        "res3.2.conv2",
        "res4.0.conv2",
        "res4.2.conv2",
        "res4.4.conv2",
    ]


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3)), ["no ResNet in Sequential", "layer1"]),
        (
            lambda: nn.ModuleDict({"left": HeResNet(8), "right": make_cifar_resnet(8)}),
            ["one ResNet", "found 2", "left", "right"],
        ),
        (lambda: timm_net("res2net50_26w_4s"), ["ResNet", "not understood", "layer1.0", "conv3"]),
        (lambda: timm_net("skresnet18"), ["not understood", "layer1.0", "conv1, conv2"]),
        (lambda: timm_net("resnet18", norm_layer=nn.Identity), ["not understood", "its stem"]),
    ],
    ids=["none", "several", "other convolutions", "other modules", "no norm"],
)
def test_what_is_not_one_understood_resnet_is_one_clear_line(model, words):
    with pytest.raises(UserError) as error:
        replace_norms(model(), "imagenet")
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_sw_layers_outside_of_any_numbering_have_their_own_names():
    net = nn.ModuleDict({"a": HeResNet(8), "b": HeResNet(8), "norm": SwitchWhiten2d(16)})
    assert [(row.number, row.name) for row in sw_layers(net)] == [(None, "norm")]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm, NaiveSyncBatchNorm])
def test_the_state_of_bn_carries_over(norm):
    torch.manual_seed(0)
    net = HeResNet(8)
    net.layer1[0].bn1 = norm(16)
    randomize_norms(net)
    net = net.double()
    old = net.layer1[0].bn1.eval()
    old.bias.requires_grad_(False)
    before = copy.deepcopy(old.state_dict())
    assert net.training
    first = net.bn1
    assert replace_norms(net, [1, 2]) == {"conv1": first, "layer1.0.conv1": old}
    new = net.layer1[0].bn1
    assert torch.equal(new.weight, before["weight"])
    assert torch.equal(new.bias, before["bias"])
    assert torch.equal(new.running_mean.flatten(), before["running_mean"])
    assert torch.equal(new.running_cov[0], torch.diag(before["running_var"]))
    assert {t.dtype for t in new.state_dict().values()} == {torch.float64}
    assert new.weight.requires_grad and not new.bias.requires_grad
    assert new.sw_mean_weight.requires_grad
    assert not new.training and net.bn1.training


def test_a_frozen_bn_leaves_freezing_to_its_convolution():
    net = FrozenBatchNorm2d.convert_frozen_batchnorm(HeResNet(8))
    net.conv1.requires_grad_(False)
    old = net.layer1[0].bn1
    old.running_var.uniform_(0.5, 2)
    net.bn1 = untouched = FrozenBatchNorm2d(16)
    replace_norms(net, [1, 2], only_bn)
    assert net.bn1.frozen and not any(p.requires_grad for p in net.bn1.parameters())
    new = net.layer1[0].bn1
    assert not new.frozen and all(p.requires_grad for p in new.parameters())
    # Frozen or not, BN adds its ε to the stored variance: the variance is carried as it is.
    assert torch.equal(new.running_cov[0], torch.diag(old.running_var))
    x = torch.randn(2, 16, 4, 4)
    torch.testing.assert_close(new.eval()(x), old(x))  # float32's default tolerance
    # As built, and as Caffe2's weights leave it: the variance with ε is 1.
    torch.testing.assert_close(net.bn1(x), untouched(x))
    torch.testing.assert_close(net.bn1(x), x)


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("gamma", [True, False])
def test_what_learned_goes_on_learning(conv, gamma):
    net = HeResNet(8)
    net.conv1.requires_grad_(conv)
    net.bn1.requires_grad_(gamma)
    replace_norms(net, [1])
    assert net.bn1.weight.requires_grad == net.bn1.bias.requires_grad == gamma
    assert net.bn1.frozen == (not conv and not gamma)


def test_gn_gives_its_scale_and_shift():
    net = HeResNet(8).half()
    net.bn1 = get_norm("GN", 32)
    net.conv1 = nn.Conv2d(3, 32, 3)
    net.bn1.weight.data.uniform_()
    net.bn1.bias.data.uniform_()
    old = net.bn1
    replace_norms(net, [1])
    assert torch.equal(net.bn1.weight, old.weight) and torch.equal(net.bn1.bias, old.bias)
    assert net.bn1.weight.dtype == torch.float32  # the old norm's, not the network's
    assert torch.equal(net.bn1.running_cov, torch.eye(16).expand(2, 16, 16))
    assert net.bn1.running_mean.count_nonzero() == 0


def test_only_bn_in_a_torchvision_net_computes_what_bn_does():
    torch.manual_seed(0)
    net = torchvision.models.resnet18(weights=None).eval()
    randomize_norms(net)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = net(x)
        assert len(replace_norms(net, "all", only_bn)) == 13
        after = net(x)
    # float32: rounding, relative to the largest output.
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * before.abs().max().item())


@pytest.mark.parametrize("act", [nn.ReLU, nn.PReLU])
def test_an_activation_inside_of_the_norm_stays(act):
    torch.manual_seed(0)
    net = timm.create_model(
        "resnet18", norm_layer=lambda c, **kwargs: BatchNormAct2d(c, act_layer=act, **kwargs)
    ).eval()
    randomize_norms(net)
    old = net.bn1
    names = set(old.state_dict()) - {"running_var", "num_batches_tracked"}
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = net(x)
        replace_norms(net, "imagenet", only_bn)
        after = net(x)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * before.abs().max().item())
    assert type(net.bn1) is SwitchWhiten2d
    assert set(net.bn1.state_dict()) == names | {"running_cov", "sw_mean_weight", "sw_var_weight"}
    z = torch.randn(2, 64, 4, 4)
    scale = old.weight / (old.running_var + old.eps).sqrt()
    expected = z * scale.view(-1, 1, 1) + (old.bias - old.running_mean * scale).view(-1, 1, 1)
    slope = 0.25 if act is nn.PReLU else 0.0
    expected = torch.where(expected > 0, expected, slope * expected)
    copied = copy.deepcopy(net.bn1)
    for norm in (net.bn1, copied):
        torch.testing.assert_close(norm(z), expected, rtol=1e-5, atol=1e-5)


def test_an_activation_behind_gn_stays():
    net = timm.create_model("resnet18", norm_layer=GroupNormAct).eval()
    replace_norms(net, "imagenet", only_bn)
    assert net.bn1(torch.randn(2, 64, 4, 4)).min() == 0
