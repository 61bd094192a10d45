"""Heads that run on all levels of a pyramid: SW has statistics for each level, as BN has."""

import functools
import logging

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import CycleBatchNormList, FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling.meta_arch.fcos import FCOSHead
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import nn

from sw_detectron import SwitchWhiten2d
from sw_detectron.engine.optimizer import get_sw_optimizer_params
from sw_detectron.modeling.summary import sw_layers, warn_of_shared_layers

LEVELS = 3
exact_bw = functools.partial(SwitchWhiten2d, statistics=("bw",), whitening="eigh", momentum=1.0)


def make_head(norm, kind=RetinaNetHead, channels=32):
    shapes = [ShapeSpec(channels=channels) for _ in range(LEVELS)]
    options = {} if kind is FCOSHead else {"num_anchors": 2}
    torch.manual_seed(0)
    return kind(
        input_shape=shapes, num_classes=2, conv_dims=[channels] * 2, norm=norm, **options
    ).double()


def make_features(channels=32):
    """Levels whose means and deviations differ, as those of a pyramid do."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, channels, 12 // k, 12 // k, generator=generator, dtype=torch.float64) * k + k
        for k in range(1, LEVELS + 1)
    ]


@pytest.mark.parametrize("kind", [RetinaNetHead, FCOSHead])
def test_evaluation_computes_what_training_did(kind):
    """With a momentum of 1 the running values are those of the last batch."""
    head = make_head(exact_bw, kind)
    with torch.no_grad():
        trained = head.train()(make_features())
        evaluated = head.eval()(make_features())
    for ours, expected in zip(evaluated, trained):
        for level, other in zip(ours, expected):
            # float64; Σ^(-1/2) of a covariance of condition 1e4 or so
            torch.testing.assert_close(level, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("norm", ["SW", "BN"])
def test_a_run_that_was_broken_off_does_not_shift_the_levels(norm):
    head = make_head(norm)
    with torch.no_grad():
        head.train()(make_features())
        expected = head.eval()(make_features())
        first, second, _ = make_features()
        with pytest.raises(RuntimeError):
            head([first, second, torch.zeros(0)])
        after = head(make_features())
    for ours, others in zip(after, expected):
        assert all(torch.equal(level, other) for level, other in zip(ours, others))


def test_levels_share_scale_and_shift_alone():
    head = make_head("SW")
    norm = head.cls_subnet[1]
    assert type(norm) is CycleBatchNormList and len(norm) == LEVELS
    names = {"weight", "bias"} | {
        f"{level}.{name}"
        for level in range(LEVELS)
        for name in ("sw_mean_weight", "sw_var_weight", "running_mean", "running_cov")
    }
    assert set(norm.state_dict()) == names
    features = make_features()
    head.train()(features)
    # A level's running mean has moved a tenth of the way to the mean of its own first convolution.
    for layer, x in zip(norm, features):
        mean = head.cls_subnet[0](x).mean(dim=(0, 2, 3))
        torch.testing.assert_close(layer.running_mean.flatten(), 0.1 * mean, rtol=1e-9, atol=1e-12)
    assert [row.name for row in sw_layers(nn.ModuleDict({"head": head}))][:4] == [
        "head.cls_subnet.1.0",
        "head.cls_subnet.1.1",
        "head.cls_subnet.1.2",
        "head.cls_subnet.4.0",
    ]


@pytest.mark.parametrize(
    "norm, kind",
    [
        ("SWb", CycleBatchNormList),
        ("SN", CycleBatchNormList),
        ("BW", CycleBatchNormList),
        (lambda c: SwitchWhiten2d(c, 8), CycleBatchNormList),
        ("BN", CycleBatchNormList),
        ("IW", SwitchWhiten2d),  # no running values
        ("GN", nn.GroupNorm),
        ("FrozenBN", FrozenBatchNorm2d),
        (nn.InstanceNorm2d, nn.InstanceNorm2d),
        ("", nn.ReLU),
        (None, nn.ReLU),
    ],
)
def test_norms_with_statistics_of_the_batch_are_for_each_level(norm, kind):
    head = make_head(norm)
    assert type(head.cls_subnet[1]) is kind
    assert type(head.bbox_subnet[1]) is kind


def test_groups_wider_than_the_channels_that_detectron2_asks_for_first():
    head = make_head(functools.partial(SwitchWhiten2d, num_pergroup=64), channels=64)
    assert head.cls_subnet[1][2].num_pergroup == 64


def test_without_scale_and_shift():
    head = make_head(functools.partial(exact_bw, affine=False))
    assert not any(k.startswith("cls_subnet.1.weight") for k in head.state_dict())
    head(make_features())


def test_from_a_config():
    cfg = get_cfg()
    cfg.MODEL.RETINANET.NORM = "SWa"
    cfg.MODEL.RETINANET.NUM_CONVS = 1
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32]] * LEVELS
    shapes = [ShapeSpec(channels=16, stride=8 * 2**k) for k in range(LEVELS)]
    head = RetinaNetHead(cfg, shapes)
    assert [type(m) for m in head.cls_subnet] == [nn.Conv2d, CycleBatchNormList, nn.ReLU]
    assert len(head.cls_subnet[1]) == LEVELS


@pytest.mark.parametrize("norm", ["SW", "BN"])
def test_the_shared_scale_and_shift_decay_as_those_of_a_norm(norm):
    head = make_head(norm)
    groups = get_sw_optimizer_params(head, base_lr=0.1, weight_decay_norm=0.5)
    decays = {id(p): group.get("weight_decay") for group in groups for p in group["params"]}
    shared = head.cls_subnet[1]
    assert decays[id(shared.weight)] == decays[id(shared.bias)] == 0.5
    assert decays[id(head.cls_subnet[0].weight)] is None


class OwnHead(nn.Module):
    """Of a user's own, with one norm for all levels and one that each level has."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.each = nn.ModuleList(SwitchWhiten2d(32) for _ in range(LEVELS))

    def forward(self, features):
        return [each(self.norm(x)) for each, x in zip(self.each, features)]


def test_a_users_head_that_shares_a_norm_is_told_of_once(caplog):
    model = nn.ModuleDict({"head": OwnHead(SwitchWhiten2d(32))}).double()["head"]
    features = make_features()
    warn_of_shared_layers(model)
    with caplog.at_level(logging.WARNING):
        model.eval()(features)
        assert not caplog.records
        model.train()(features)
        model(features)
    (record,) = caplog.records
    assert "calls norm 3 times" in record.message and "\n" not in record.message
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_head("SW"),
        lambda: OwnHead(SwitchWhiten2d(32, statistics=("iw", "ln"))),
        lambda: OwnHead(SwitchWhiten2d(32).freeze()),
    ],
    ids=["levels", "samples", "frozen"],
)
def test_nothing_is_told_where_nothing_is_shared_that_differs_in_evaluation(make, caplog):
    model = make().double().train()
    warn_of_shared_layers(model)
    with caplog.at_level(logging.WARNING):
        model(make_features())
    assert not caplog.records
