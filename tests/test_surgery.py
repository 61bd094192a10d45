"""Norm surgery on ResNets of any make: which layers, and what carries over."""

import copy
import functools
import logging

import numpy as np
import pytest
import timm
import torch
import torchvision
from detectron2.config import get_cfg
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm, get_norm
from detectron2.modeling import build_model
from helpers.he_resnet import HeResNet, randomize_norms
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d, GroupNormAct
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError, replace_norms
from sw_detectron.modeling import find_network, numbered_convs
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
    assert find_network(model)[0] == "backbone.body"
    assert list(replace_norms(model, "imagenet")) == list(BOTTLENECK_50.values())
    features = timm_net("resnet18", features_only=True)
    assert list(replace_norms(features, "imagenet")) == list(BASIC_18.values())
    assert [row.number for row in sw_layers(model)] == list(BOTTLENECK_50)
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "meta"
    model = on_meta(build_model, cfg)  # a Faster R-CNN whose head holds res5
    assert find_network(model)[0] == "backbone"
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


@pytest.mark.parametrize("old, own", [("SyncBN", False), ("SW", False), ("SW", True)])
def test_the_ranks_of_the_norm_before_stay_unless_the_new_layer_has_its_own(old, own):
    net = HeResNet(8)
    before, given = object(), object() if own else None
    make = nn.SyncBatchNorm if old == "SyncBN" else SwitchWhiten2d
    net.bn1 = make(16, process_group=before)
    replace_norms(net, [1], lambda channels: SwitchWhiten2d(channels, process_group=given))
    assert net.bn1.process_group is (given if own else before)


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


class Block(nn.Module):
    """Two convolutions and norms of 16 channels, run in a given order."""

    ORDERS = {
        "post": "conv1 bn1 relu conv2 bn2",
        "pre": "bn1 relu conv1 bn2 relu conv2",
        "relu before": "conv1 relu bn1 conv2 bn2",
        "norms swapped": "conv1 bn2 relu conv2 bn1",
        "one norm for both": "conv1 bn1 conv2 bn1",
        "convolutions swapped": "conv2 bn2 conv1 bn1",
        "fails": "conv1 bn1 missing",
    }

    def __init__(self, order):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(16)
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.order = self.ORDERS[order].split()

    def forward(self, x):
        y = x.clone()
        for name in self.order:
            y = getattr(self, name)(y)
        return x + y


class Net(HeResNet):
    def __init__(self, order, last=False):
        super().__init__(8)
        self.layer1 = nn.Sequential(Block(order))
        if last:
            self.bn1 = nn.BatchNorm2d(64)
        self.last = last

    def forward(self, x):
        x = self.conv1(x)
        x = x if self.last else self.bn1(x).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        x = self.bn1(x).relu() if self.last else x
        return self.linear(x.mean(dim=(2, 3)))


def snapshot(net):
    modules = [(name, id(module), module.training) for name, module in net.named_modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    return (
        modules,
        hooks,
        {k: None if v.is_meta else v.clone() for k, v in net.state_dict().items()},
    )


def check_refused(net, *words, norm="SW", placement="all"):
    """One line, and nothing has changed: modules, modes, hooks, values."""
    modules, hooks, state = snapshot(net)
    with pytest.raises(UserError) as error:
        replace_norms(net, placement, norm)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)
    after = snapshot(net)
    assert after[:2] == (modules, hooks)
    same = (v is None or torch.equal(v, after[2][k]) for k, v in state.items())
    assert list(state) == list(after[2]) and all(same)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: Net("pre"), ["layer1.0.bn1", "layer1.0.conv1", "pre-activation"]),
        (lambda: Net("relu before"), ["layer1.0.bn1", "layer1.0.conv1"]),
        (lambda: Net("norms swapped"), ["layer1.0.bn1", "layer1.0.conv1"]),
        (lambda: Net("one norm for both"), ["layer1.0.bn1", "alone"]),
        (lambda: Net("convolutions swapped"), ["layer1.0.conv2 runs before layer1.0.conv1"]),
        (lambda: Net("fails"), ["layer1.0.bn2", "the run failed", "missing"]),
        (lambda: Net("post", last=True), ["bn1 has 64 channels", "conv1 gives 16"]),
        (lambda: timm_net("hrnet_w18_small"), ["HighResolutionNet", "lies outside"]),
        (lambda: timm_net("resnet26t"), ["layer 1", "conv1.0", "24", "16"]),
    ],
    ids=["pre", "relu", "swapped", "shared", "order", "fails", "last", "hrnet", "channels"],
)
@pytest.mark.parametrize("meta", [False, True], ids=["cpu", "meta"])
def test_what_does_not_run_as_its_names_say_is_refused(build, words, meta):
    net = build()
    net.layer1.train()
    net.bn1.eval()
    check_refused(net.to("meta") if meta else net, *words)


def test_one_norm_under_two_names_is_refused():
    net = HeResNet(8)
    net.layer1[0].bn2 = net.layer1[0].bn1
    check_refused(net, "layer1.0.bn1", "alone")


def test_types_of_values_that_only_autocast_fits_together():
    net = HeResNet(8).half()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    assert len(replace_norms(net, "all")) == 7
    assert net.bn1.weight.dtype == torch.float32


def test_a_network_that_runs_as_its_names_say_is_taken_whatever_the_order_of_its_attributes():
    assert len(replace_norms(Net("post"), "all")) == 7
    with torch.inference_mode():
        assert len(replace_norms(Net("post"), "all")) == 7


@pytest.mark.parametrize(
    "name", ["resnet18", "seresnet18", "ecaresnetlight", "resnetblur18", "resnext50_32x4d"]
)
def test_in_timms_families_a_norm_follows_its_convolution(name):
    """If a convolution gives zero, so does the input of its norm, and of no other."""
    net = timm.create_model(name).eval()
    convs = numbered_convs(net)[:6]
    norms = {conv.name: net.get_submodule(conv.norm_name) for conv in convs}
    assert list(replace_norms(net, [conv.number for conv in convs])) == list(norms)
    zero = []
    for module in net.modules():  # a norm of nothing gives its β, which must not be nothing again
        if isinstance(module, (SwitchWhiten2d, nn.BatchNorm2d)):
            nn.init.ones_(module.bias)
    for conv in convs:
        net.get_submodule(conv.norm_name).register_forward_hook(
            lambda _, x, y, name=conv.name: None if x[0].any() else zero.append(name)
        )
    x = torch.randn(1, 3, 64, 64)
    for conv in convs:
        weight = conv.module.weight.data
        conv.module.weight.data = torch.zeros_like(weight)
        zero.clear()
        with torch.no_grad():
            net(x)
        conv.module.weight.data = weight
        assert zero == [conv.name]


def failing_at(number, error):
    """A factory that fails when it is called for the n-th time."""
    calls = []

    def factory(channels):
        calls.append(channels)
        if len(calls) == number:
            raise error
        return SwitchWhiten2d(channels)

    return factory


class Uncopyable(SwitchWhiten2d):
    def requires_grad_(self, requires_grad=True):
        raise RuntimeError("no")


def test_nothing_changes_where_something_fails():
    shared = SwitchWhiten2d(16)
    check_refused(HeResNet(8), "one layer twice", norm=lambda c: shared, placement=[1, 2])
    check_refused(
        HeResNet(8),
        "layer 6",
        "layer3.0.conv1",
        "16",
        norm=lambda c: nn.BatchNorm2d(16),
        placement=[1, 2, 6],
    )
    check_refused(HeResNet(8), "layer 1", "no layer", norm="")
    check_refused(HeResNet(8), "layer 1", "no layer", norm=lambda c: None)
    check_refused(HeResNet(8), "layer 2", "bad", norm=failing_at(2, ValueError("bad")))
    check_refused(HeResNet(8), "unknown norm 'SWc'", "SWb", norm="SWc")
    check_refused(HeResNet(8), "weight has 2 values", norm=lambda c: nn.LayerNorm((2,)))


@pytest.mark.parametrize("error", [KeyError("mine"), RuntimeError("mine"), OSError("mine")])
def test_an_error_of_a_users_factory_stays_what_it_is(error):
    net = HeResNet(8)
    before = snapshot(net)[:2]
    with pytest.raises(type(error)) as raised:
        replace_norms(net, "all", failing_at(3, error))
    assert raised.value is error
    assert snapshot(net)[:2] == before


def test_a_failure_while_state_carries_over_changes_nothing():
    net = HeResNet(8)
    net.conv1.requires_grad_(False)
    net.bn1.requires_grad_(False)
    before = snapshot(net)[:2]

    def factory(channels):  # the first layer is frozen, which fails
        return (Uncopyable if channels == 16 else SwitchWhiten2d)(channels)

    with pytest.raises(RuntimeError, match="no"):
        replace_norms(net, [6, 1], factory)
    assert snapshot(net)[:2] == before


def one_norm_net(norm):
    """A network whose first norm, of 32 channels, is given; the others are BN."""
    net = HeResNet(8)
    net.conv1, net.bn1 = nn.Conv2d(3, 32, 3, padding=1), norm
    net.layer1 = nn.Sequential()
    net.layer2[0].conv1 = nn.Conv2d(32, 32, 3, stride=2, padding=1)
    net.layer2[0].forward = lambda x: x[:, :, ::2, ::2]
    return net


def learned(layer):
    """Random values for all that a layer has; a diagonal set keeps a stale rest of its own."""
    torch.manual_seed(1)
    layer = layer.double()
    for value in layer.parameters():
        nn.init.normal_(value)
    layer.running_mean.normal_()
    factor = torch.randn(*layer.running_cov.shape, dtype=torch.float64)
    layer.running_cov.copy_(factor @ factor.mT)
    return layer.eval()


def swap(old, new):
    net = one_norm_net(old)
    assert replace_norms(net, [1], lambda c: new) == {"conv1": old}
    assert net.bn1 is new
    return new


SETS = [("bw",), ("bw", "iw"), ("bn", "in", "ln"), ("bw", "iw", "bn", "in", "ln")]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 4, 8, 16, 32])] * 2),
    sets=st.tuples(*[st.sampled_from(SETS)] * 2),
    ties=st.tuples(st.booleans(), st.booleans()),
)
def test_sw_to_sw_keeps_all_that_the_new_layer_has_a_place_for(sizes, sets, ties):
    old = learned(SwitchWhiten2d(32, sizes[0], sets[0], tie_weight=ties[0]))
    new = swap(old, SwitchWhiten2d(32, sizes[1], sets[1], tie_weight=ties[1]))
    assert torch.equal(new.weight, old.weight) and torch.equal(new.bias, old.bias)
    assert torch.equal(new.running_mean.flatten(), old.running_mean.flatten())
    covariance = np.zeros((32, 32))
    diagonal = sets[0] == ("bn", "in", "ln")
    for i in range(32):
        for j in range(32):
            known = i == j or (i // sizes[0] == j // sizes[0] and not diagonal)
            if known and i // sizes[1] == j // sizes[1]:
                block = old.running_cov[i // sizes[0]]
                covariance[i, j] = block[i % sizes[0], j % sizes[0]]
    blocks = [covariance[k : k + sizes[1], k : k + sizes[1]] for k in range(0, 32, sizes[1])]
    assert np.array_equal(new.running_cov.numpy(), np.stack(blocks))
    if sets[0] == sets[1]:
        assert new.importance()["mean"] == old.importance()["mean"]
        if ties[0] or not ties[1]:
            assert new.importance() == old.importance()
    else:
        assert torch.equal(new.sw_mean_weight, torch.ones(len(sets[1])))


@pytest.mark.parametrize("statistics", SETS)
def test_sw_to_the_same_sw_computes_the_same(statistics):
    old = learned(SwitchWhiten2d(32, 16, statistics, whitening="eigh"))
    new = swap(old, SwitchWhiten2d(32, 16, statistics, whitening="eigh"))
    x = torch.randn(2, 32, 6, 6, dtype=torch.float64)
    assert torch.equal(new(x), old(x))


def test_sw_to_bn_gives_its_diagonal_and_back():
    old = learned(SwitchWhiten2d(32, 8, ("bn",)))
    bn = swap(old, nn.BatchNorm2d(32))
    assert torch.equal(bn.running_var, old.running_cov.diagonal(dim1=1, dim2=2).flatten())
    x = torch.randn(2, 32, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(bn(x), old(x))  # float64's default tolerance
    whole = learned(SwitchWhiten2d(32, 8))
    frozen = swap(whole, FrozenBatchNorm2d(32))
    assert torch.equal(frozen.running_var, whole.running_cov.diagonal(dim1=1, dim2=2).flatten())
    back = swap(bn, SwitchWhiten2d(32, 16, ("bn",)))
    torch.testing.assert_close(back(x), old(x))


def test_what_the_new_layer_has_no_place_for_is_told(caplog):
    new_set = functools.partial(swap, learned(SwitchWhiten2d(32, statistics=("bw", "iw"))))
    cases = [
        (SwitchWhiten2d(32, statistics=("bw",)), "importance weights of bw, iw became initial"),
        (SwitchWhiten2d(32, tie_weight=True), "tied"),
        (nn.InstanceNorm2d(32), "γ or β has no place in InstanceNorm2d"),
    ]
    for new, words in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            new_set(new)
        assert words in caplog.text and "conv1" in caplog.text
        assert len(caplog.records) == 1
    caplog.clear()
    swap(nn.BatchNorm2d(32), nn.InstanceNorm2d(32))  # γ = 1 and β = 0
    swap(learned(SwitchWhiten2d(32)), SwitchWhiten2d(32))
    assert not caplog.records


def test_what_is_frozen_or_does_not_learn_stays_so():
    old = learned(SwitchWhiten2d(32)).freeze()
    assert swap(old, SwitchWhiten2d(32)).frozen  # its convolution learns
    old = learned(SwitchWhiten2d(32))
    old.sw_mean_weight.requires_grad_(False)
    new = swap(old, SwitchWhiten2d(32))
    assert not new.sw_mean_weight.requires_grad and new.sw_var_weight.requires_grad


def test_an_activation_is_applied_once_on_the_way_back():
    net = timm.create_model(
        "resnet18", norm_layer=lambda c, **kwargs: BatchNormAct2d(c, act_layer=nn.GELU, **kwargs)
    ).eval()
    randomize_norms(net)
    z = torch.randn(2, 64, 4, 4)
    expected = net.bn1(z)
    replace_norms(net, [1], only_bn)
    replace_norms(net, [1], lambda c: BatchNormAct2d(c))
    torch.testing.assert_close(net.bn1(z), expected, rtol=1e-5, atol=1e-5)
