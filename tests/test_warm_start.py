"""Starting SW from the function that the BN network computes."""

import functools
import math

import pytest
import torch
import torchvision
from helpers.he_resnet import cifar_test_images, pretrained_state, randomize_norms

from sw_detectron import SwitchWhiten2d, UserError, replace_norms
from sw_detectron.modeling.cifar_resnet import make_cifar_resnet
from sw_detectron.modeling.warm_start import LOGIT_GAP, warm_start

ALL = ("bw", "iw", "bn", "in", "ln")


def swb(whitening, num_iterations=5):
    return functools.partial(
        SwitchWhiten2d, statistics=ALL, whitening=whitening, num_iterations=num_iterations
    )


def newton_ratios(norm, num_iterations=5):
    """Per channel, Newton's inverse square root of a diagonal relative to the true one.

    On a diagonal the iteration is one of numbers: p ← (3 p - p³ v) / 2 with v = variance / trace.
    """
    ratios = []
    for group in (norm.running_var.double() + norm.eps).split(16):
        trace = sum(group.tolist())
        for variance in group.tolist():
            p = 1.0
            for _ in range(num_iterations):
                p = (3 * p - p**3 * variance / trace) / 2
            ratios.append(p / math.sqrt(trace) * math.sqrt(variance))
    return torch.tensor(ratios, dtype=torch.float64)


def small_net():
    torch.manual_seed(0)
    net = make_cifar_resnet(8, num_classes=10).double().eval()
    randomize_norms(net)
    return net, torch.randn(4, 3, 32, 32, dtype=torch.float64)


@pytest.mark.parametrize(
    "norm",
    [
        swb("eigh"),
        functools.partial(SwitchWhiten2d, statistics=("bn", "in", "ln")),
        functools.partial(SwitchWhiten2d, statistics=ALL, whitening="eigh", tie_weight=True),
    ],
    ids=["SWb", "SN", "tied"],
)
def test_exact_whitening_computes_what_bn_does(norm):
    net, x = small_net()
    before = net(x)["linear"]
    replaced = replace_norms(net, "all", norm)
    assert (net(x)["linear"] - before).abs().max() > 0.1 * before.abs().max()
    started = warm_start(net)
    assert [row.name for row in started] == list(replaced)
    # float64; an eigendecomposition of a diagonal matrix is exact to rounding.
    assert all(row.error < 1e-14 for row in started)
    # What is left is the other statistics' share of 1.8e-4: 4.4e-5 measured, of logits up to 0.18
    # that moved by 0.1 before.
    torch.testing.assert_close(net(x)["linear"], before, rtol=0, atol=2e-4)


def test_the_share_of_bn_is_what_the_gap_says():
    net, _ = small_net()
    replace_norms(net, [1, 4], swb("newton"))
    warm_start(net)
    leakage = 4 * math.exp(-LOGIT_GAP)
    for layer in (net.stem.conv1.norm, net.res3[0].conv1.norm):
        for ratios in layer.importance().values():
            assert 1 - ratios["bn"] == pytest.approx(leakage, rel=1e-2)


@pytest.mark.parametrize("num_iterations", [5, 9])
def test_newtons_error_is_that_of_the_scalar_iteration(num_iterations):
    net, _ = small_net()
    norms = [net.stem.conv1.norm, net.res2[0].conv2.norm, net.res4[0].conv1.norm]
    norms[0].running_var[3] = 1e-4
    replace_norms(net, [1, 3, 6], swb("newton", num_iterations))
    expected = [(newton_ratios(norm, num_iterations) - 1).abs().max().item() for norm in norms]
    assert expected[0] > 0.5  # one channel of little variance among others
    # float64: rounding
    assert [row.error for row in warm_start(net)] == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_without_bn_there_is_nothing_to_start():
    net, _ = small_net()
    replace_norms(net, [1], "SW")
    weights = net.stem.conv1.norm.sw_mean_weight.clone()
    with pytest.raises(UserError, match="no SW layer has bn.*--statistics"):
        warm_start(net)
    assert torch.equal(net.stem.conv1.norm.sw_mean_weight, weights)
    replace_norms(net, [4], "SWb")
    assert [row.name for row in warm_start(net)] == ["res3.0.conv1"]
    assert torch.equal(net.stem.conv1.norm.sw_mean_weight, weights)


def test_in_a_torchvision_net():
    torch.manual_seed(0)
    net = torchvision.models.resnet18(weights=None).eval()
    replace_norms(net, "imagenet", swb("eigh"))
    assert [row.name for row in warm_start(net)] == ["conv1", "layer2.0.conv1", "layer3.1.conv1"]


def real_net(shared_data, depth):
    net = make_cifar_resnet(depth, num_classes=10).eval()
    net.load_state_dict(pretrained_state(shared_data, depth))
    return net


@pytest.mark.parametrize("depth", [20, 44, 56])
def test_real_weights_with_exact_whitening(shared_data, depth):
    images, _ = cifar_test_images(shared_data, 128)
    net = real_net(shared_data, depth)
    with torch.inference_mode():
        before = net(images)["linear"]
        replace_norms(net, "cifar", swb("eigh"))
        started = warm_start(net)
        after = net(images)["linear"]
    assert all(row.error < 1e-6 for row in started)  # float32: rounding
    # Logits go up to 30. What is left is the share of the other statistics: 6e-3 measured.
    torch.testing.assert_close(after, before, rtol=0, atol=0.02)
    assert torch.equal(after.argmax(dim=1), before.argmax(dim=1))


@pytest.mark.parametrize("depth", [20, 44, 56])
def test_real_weights_with_newton(shared_data, depth):
    images, _ = cifar_test_images(shared_data, 128)
    net = real_net(shared_data, depth)
    with torch.inference_mode():
        before = net(images)["linear"]
        replaced = replace_norms(net, "cifar", swb("newton"))
        started = warm_start(net)
        after = net(images)["linear"]
        ratios = {name: newton_ratios(norm) for name, norm in replaced.items()}
        expected = [(r - 1).abs().max().item() for r in ratios.values()]
        # BN with the scales of five iterations, which fall short in channels of little variance
        reference = real_net(shared_data, depth)
        for name, ratio in ratios.items():
            reference.get_submodule(f"{name}.norm").weight.mul_(ratio)
        short = reference(images)["linear"]
    # Real weights have channels that are as good as dead: their scale is off by up to 99 %.
    assert max(expected) > 0.9
    assert [row.error for row in started] == pytest.approx(expected, rel=1e-4)  # float32
    # The iteration explains all but what exact whitening leaves too.
    torch.testing.assert_close(after, short, rtol=0, atol=0.02)
    # And this is how far that is from BN, of logits up to 30: 3.2 measured.
    torch.testing.assert_close(after, before, rtol=0, atol=4)
