"""Which layers the paper's placements take, and what the backbones put there."""

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling import build_backbone
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError, add_sw_config, replace_norms
from sw_detectron.modeling import numbered_convs, place, with_norms
from sw_detectron.modeling.summary import sw_layers, sw_table


def make_cfg(depth=50, name="build_sw_resnet_backbone", **sw):
    cfg = get_cfg()
    add_sw_config(cfg)
    cfg.MODEL.BACKBONE.NAME = name
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.DEPTH = depth
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    if depth in (18, 34):
        cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    for key, value in sw.items():
        cfg.MODEL.SW[key] = value
    return cfg


def build(cfg):
    return build_backbone(cfg, ShapeSpec(channels=3))


IMAGENET_50 = {
    1: "stem.conv1",
    6: "res2.1.conv2",
    12: "res3.0.conv2",
    18: "res3.2.conv2",
    24: "res4.0.conv2",
    30: "res4.2.conv2",
    36: "res4.4.conv2",
}
RELEASED_50 = {
    1: "stem.conv1",
    6: "res2.1.conv2",
    15: "res3.1.conv2",
    21: "res3.3.conv2",
    27: "res4.1.conv2",
    33: "res4.3.conv2",
    39: "res4.5.conv2",
}
SEGMENTATION_50 = {1: "stem.conv1"} | {
    3 * (b + 1): f"res{s}.{i}.conv2"
    for b, (s, i) in enumerate((s, i) for s, n in ((2, 3), (3, 4), (4, 6)) for i in range(n))
}


@pytest.mark.parametrize(
    "placement, expected",
    [("imagenet", IMAGENET_50), ("released", RELEASED_50), ("segmentation", SEGMENTATION_50)],
)
def test_resnet50(placement, expected):
    net = build(make_cfg(PLACEMENT=placement))
    assert {row.number: row.name for row in sw_layers(net)} == expected
    is_sw = {n for n, m in net.named_modules() if isinstance(m, SwitchWhiten2d)}
    assert is_sw == {f"{name}.norm" for name in expected.values()}
    others = [m for n, m in net.named_modules() if n.endswith(".norm") and n not in is_sw]
    assert all(isinstance(m, nn.BatchNorm2d) for m in others)
    assert len(others) == 53 - len(expected)


@pytest.mark.parametrize(
    "depth, placement, expected",
    [
        # numbers of the last convolution before res5: 13, 27, 40, 91, 142
        (18, "imagenet", [1, 6, 12]),
        (18, "segmentation", [1, 3, 6, 9, 12]),
        (18, "released", [1, 5, 9, 13]),
        (34, "imagenet", [1, 6, 12, 18, 24]),
        (34, "cifar", [1, 4, 8, 12, 16, 20, 24]),
        (50, "all", list(range(1, 41))),
        (50, "none", []),
        (101, "imagenet", [1, *range(6, 92, 6)]),
        (101, "released", [1, 6, 15, 21, *range(27, 91, 6)]),
        (152, "imagenet", [1, *range(6, 143, 6)]),
        (152, "segmentation", [1, *range(3, 143, 3)]),
    ],
)
def test_other_depths(depth, placement, expected):
    net = build(make_cfg(depth, PLACEMENT=placement))
    assert [row.number for row in sw_layers(net)] == expected
    assert not any("res5" in row.name for row in sw_layers(net))


def test_resnext_and_no_res5():
    cfg = make_cfg()
    cfg.MODEL.RESNETS.NUM_GROUPS, cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 32, 4
    net = build(cfg)
    assert {row.number: row.name for row in sw_layers(net)} == IMAGENET_50
    assert net.res2[1].conv2.norm.num_features == 128
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res4"]
    assert {row.number: row.name for row in sw_layers(build(cfg))} == IMAGENET_50


def test_explicit_layers_override_the_placement():
    net = build(make_cfg(LAYERS=[12, 2, 2]))
    assert [(row.number, row.name) for row in sw_layers(net)] == [
        (2, "res2.0.conv1"),
        (12, "res3.0.conv2"),
    ]


@pytest.mark.parametrize(
    "sw, words",
    [
        ({"LAYERS": [0, 5]}, ["[0]", "1 stem.conv1", "40 res4.5.conv3"]),
        ({"LAYERS": [1, 54]}, ["[54]", "12 res3.0.conv2"]),
        ({"LAYERS": [41]}, ["res5", "never"]),
        ({"PLACEMENT": "everywhere"}, ["everywhere", "imagenet"]),
        ({"NUM_PERGROUP": 48}, ["stem.conv1", "64", "48"]),
        ({"NORM": "SWc"}, ["SWc", "SWb"]),
        ({"NORM": ""}, ["MODEL.SW.NORM", "PLACEMENT", "none"]),
        ({"STATISTICS": ["bw", "xx"]}, ["xx", "bw"]),
        ({"NORM": "BN", "STATISTICS": ["bw"]}, ["STATISTICS", "BN"]),
        ({"WHITENING": "zca"}, ["zca", "newton"]),
        ({"EPS": 0.0}, ["eps", "0.0"]),
    ],
    ids=str,
)
def test_wrong_keys_are_one_clear_line(sw, words):
    with pytest.raises(UserError) as error:
        build(make_cfg(**sw))
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["build_sw_resnet_backbone", "build_sw_resnet_fpn_backbone"])
def test_an_unknown_norm_of_another_key_is_one_clear_line(name):
    cfg = make_cfg(18, name)
    key = cfg.MODEL.FPN if "fpn" in name else cfg.MODEL.RESNETS
    cfg.MODEL.FPN.IN_FEATURES = ["res2"]
    key.NORM = "SynchBN"
    with pytest.raises(UserError, match="unknown norm 'SynchBN': did you mean SyncBN"):
        build(cfg)


def test_a_norm_in_code_is_given_options_that_it_has():
    net = build(make_cfg(18, PLACEMENT="none"))
    with pytest.raises(UserError, match="layer 1 .*num_iteration"):
        with_norms(net, "imagenet", "SW", num_iteration=3)

    def mine(channels):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        with_norms(net, "imagenet", mine)
    assert not sw_layers(net)


def test_a_placement_that_hits_nothing_lists_the_layers():
    convs = [c for c in numbered_convs(build(make_cfg(18))) if c.number in (2, 3)]
    with pytest.raises(UserError, match="imagenet.*2 res2.0.conv1, 3 res2.0.conv2"):
        place(convs, "imagenet")


def test_every_key_reaches_the_layer():
    net = build(
        make_cfg(
            NORM="SWb",
            STATISTICS=["in", "bw"],
            NUM_PERGROUP=32,
            WHITENING="eigh",
            NUM_ITERATIONS=7,
            TIE_WEIGHT=True,
            EPS=1e-3,
            MOMENTUM=0.2,
            SYNC=False,
        )
    )
    layer = net.res3[0].conv2.norm
    assert layer.statistics == ("bw", "in")
    assert (layer.num_pergroup, layer.whitening, layer.num_iterations) == (32, "eigh", 7)
    assert (layer.eps, layer.momentum, layer.sync) == (1e-3, 0.2, False)
    assert layer.sw_var_weight is None


@pytest.mark.parametrize("norm, kind", [("GN", nn.GroupNorm), ("FrozenBN", FrozenBatchNorm2d)])
def test_other_norms_for_ablations(norm, kind):
    net = build(make_cfg(NORM=norm))
    assert isinstance(net.stem.conv1.norm, kind)
    assert isinstance(net.res2[0].conv2.norm, nn.BatchNorm2d)


@pytest.mark.parametrize(
    "name", ["build_sw_resnet_fpn_backbone", "build_sw_retinanet_resnet_fpn_backbone"]
)
def test_fpn_backbones(name):
    cfg = make_cfg(18, name)
    retina = "retina" in name
    cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"][retina:]
    cfg.MODEL.FPN.OUT_CHANNELS = 32
    net = build(cfg)
    outputs = net(torch.randn(1, 3, 64, 64))
    assert list(outputs) == (
        ["p3", "p4", "p5", "p6", "p7"] if retina else [f"p{i}" for i in range(2, 7)]
    )
    assert [row.name for row in sw_layers(net)] == ["stem.conv1", "res3.0.conv1", "res4.1.conv1"]


@pytest.mark.parametrize("base", ["BN", "FrozenBN"])
def test_frozen_stages_freeze_their_sw(base):
    cfg = make_cfg(PLACEMENT="segmentation")
    cfg.MODEL.RESNETS.NORM = base
    cfg.MODEL.BACKBONE.FREEZE_AT = 2
    net = build(cfg).train()
    for row in sw_layers(net):
        frozen = row.name.startswith(("stem", "res2"))
        assert row.layer.frozen == frozen, row.name
        assert all(p.requires_grad != frozen for p in row.layer.parameters()), row.name
    assert sw_table(net).count("frozen") == 4


def test_surgery_carries_the_state_over():
    net = build(make_cfg(18, PLACEMENT="none")).double().eval()
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_()
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    before = net(x)["res5"]
    old = net.stem.conv1.norm
    replaced = replace_norms(net, "imagenet", lambda c: SwitchWhiten2d(c, statistics=("bn",)))
    assert list(replaced) == ["stem.conv1", "res3.0.conv1", "res4.1.conv1"]
    assert replaced["stem.conv1"] is old
    new = net.stem.conv1.norm
    assert new.weight.dtype == torch.float64
    assert not new.training
    # {bn} in evaluation is BatchNorm2d, so the network computes what it did.
    torch.testing.assert_close(net(x)["res5"], before, rtol=1e-10, atol=1e-10)
    assert torch.equal(new.running_cov[1], torch.diag(old.running_var[16:32]))


def test_nothing_is_swapped_when_a_layer_does_not_fit():
    net = build(make_cfg(18, PLACEMENT="none"))
    with pytest.raises(ValueError, match=r"layer 1 \(stem.conv1\).*64.*48"):
        replace_norms(net, "imagenet", lambda c: SwitchWhiten2d(c, num_pergroup=48))
    assert not sw_layers(net)


def test_table():
    lines = sw_table(build(make_cfg())).splitlines()
    assert lines[0].split() == ["number", "module", "channels", "groups", "statistics"]
    assert lines[4].split() == ["12", "res3.0.conv2", "128", "8", "x", "16", "bw,", "iw"]
    assert len(lines) == 2 + 7
    assert sw_table(nn.Identity()) == "no SW layers"
