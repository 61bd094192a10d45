"""Whatever looks into a running model leaves every module as it was."""

import pytest
import torch
from detectron2.engine import hooks
from torch import nn

from sw_detectron import SwitchWhiten2d, replace_norms
from sw_detectron.analysis import layer_features, whitening_report
from sw_detectron.modeling import calibrate, input_moments
from sw_detectron.modeling.cifar_resnet import make_cifar_resnet
from sw_detectron.modeling.observing import in_evaluation, observed


def make_model():
    """Of each kind of layer some in training and some not."""
    torch.manual_seed(0)
    model = make_cifar_resnet(8, norm="BN").train()
    replace_norms(model, "cifar")
    for index, module in enumerate(model.modules()):
        module.training = index % 3 > 0
    return model


def failing(batches):
    yield from batches
    raise OSError("the disk is gone")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "look",
    [
        layer_features,
        whitening_report,
        lambda model, batches: calibrate(model, batches, 8),
        lambda model, batches: input_moments(model, {"x": (model.stem.conv1.norm, 4)}, batches, 8),
    ],
    ids=["features", "whitening", "calibrate", "moments"],
)
def test_modes_and_hooks_are_as_before(look, fails):
    model = make_model()
    modes = [module.training for module in model.modules()]
    batches = [torch.randn(2, 3, 32, 32) for _ in range(2)]
    if fails:
        with pytest.raises(OSError, match="disk"):
            look(model, failing(batches))
    else:
        look(model, batches)
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inside_all_is_in_evaluation_and_layers_are_seen_in_order():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Dropout(), nn.Conv2d(2, 1, 1))
    model[1].eval()
    seen = []
    x = torch.randn(1, 1, 2, 2)
    layers = {"b": model[2], "a": model[0]}
    with in_evaluation(model), observed(layers, lambda *args: seen.append(args)):
        assert not any(module.training for module in model.modules())
        output = model(x)
    assert [name for name, _, _ in seen] == ["a", "b"]
    assert seen[0][1] is x and seen[1][1] is seen[0][2] and seen[1][2] is output
    assert [module.training for module in model.modules()] == [True, True, False, True]
    model(x)
    assert len(seen) == 2


def test_the_precise_statistics_of_detectron2s_hook_are_sws_too():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), SwitchWhiten2d(16, 8), nn.Conv2d(16, 1, 1)
    ).double()
    batches = [torch.randn(2, 3, 9, 9, dtype=torch.float64) for _ in range(4)]
    hook = hooks.PreciseBN(0, model, batches, len(batches))
    hook.update_stats()
    with torch.no_grad():
        inputs = [model[1](model[0](x)) for x in batches]
    pixels = torch.cat(inputs).transpose(0, 1).flatten(1)
    for group, cov in zip(pixels.split(8), model[2].running_cov):
        torch.testing.assert_close(cov, group.cov(correction=0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model[2].running_mean.flatten(), pixels.mean(dim=1))
