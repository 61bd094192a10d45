"""SwitchWhiten2d on one process: against golden vectors, float64 formulas and torch's layers."""

import warnings

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.layer_cases import GOLDEN, SUBSETS, correlated, load_golden, make_layer
from torch import nn

from sw_detectron.layers import STATISTICS, SwitchWhiten2d
from sw_detectron.layers.functional import switch_whiten


def by_reference(layer, x, running=None):
    return reference.switch_whiten(
        list(x),
        layer.weight,
        layer.bias,
        layer.sw_mean_weight,
        layer.sw_var_weight,
        layer.statistics,
        layer.num_pergroup,
        layer.whitening,
        layer.num_iterations,
        layer.eps,
        running,
    )


@pytest.mark.skipif(not GOLDEN, reason="the golden vectors of ../shared are not here")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-4)])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden_vectors(path, dtype, tolerance):
    # float32: some 1e3 roundings of 6e-8 pile up in the iteration and its backward; relative to
    # the largest value of each tensor, as small gradients are differences of large terms.
    data, layer = load_golden(path, dtype)

    def check(value, name):
        expected = torch.from_numpy(data[name])
        scale = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(
            value.double() / scale, expected / scale, rtol=0, atol=tolerance, msg=lambda m: name + m
        )

    x = torch.from_numpy(data["x"]).to(dtype).requires_grad_()
    y = layer(x)
    check(y, "y")
    y.backward(torch.from_numpy(data["dy"]).to(dtype))
    check(x.grad, "dx")
    check(layer.running_mean, "running_mean_after")
    check(layer.running_cov, "running_cov_after")
    for name, parameter in layer.named_parameters():
        check(parameter.grad, f"d{name}")
    layer.eval()
    check(layer(x), "y_eval")


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SUBSETS, ids="+".join)
def test_every_subset_equals_the_formulas(statistics, whitening):
    layer = make_layer(24, num_pergroup=8, statistics=statistics, whitening=whitening)
    x = correlated(3, 24, 5, 4)
    before = layer.running_mean.clone(), layer.running_cov.clone()
    layer.eval()
    expected, _, _ = by_reference(layer, x, (before[0][..., 0], before[1]))
    torch.testing.assert_close(layer(x), torch.stack(expected), rtol=1e-10, atol=1e-10)
    layer.train()
    expected, mean, cov = by_reference(layer, x)
    torch.testing.assert_close(layer(x), torch.stack(expected), rtol=1e-10, atol=1e-10)

    mean = 0.9 * before[0] + 0.1 * mean[..., None]
    cov = 0.9 * before[1] + 0.1 * cov
    if not {"bw", "bn"} & set(statistics):
        mean, cov = before
    elif not {"bw", "iw"} & set(statistics):
        diagonal = torch.eye(8, dtype=torch.bool)
        cov = torch.where(diagonal, cov, before[1])
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_cov, cov, rtol=1e-12, atol=1e-12)


def gradcheck(layer, x, training):
    names = [name for name, _ in layer.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def function(x, *parameters):
        p = dict(zip(names, parameters))
        return switch_whiten(
            x,
            p.get("weight"),
            p.get("bias"),
            p["sw_mean_weight"],
            p.get("sw_var_weight"),
            layer.running_mean.clone(),
            layer.running_cov.clone(),
            statistics=layer.statistics,
            num_pergroup=layer.num_pergroup,
            training=training,
            eps=layer.eps,
            whitening=layer.whitening,
            num_iterations=layer.num_iterations,
        )

    x = x.detach().requires_grad_()
    return torch.autograd.gradcheck(function, (x, *parameters), fast_mode=False)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "statistics, whitening",
    [(s, w) for s in SUBSETS for w in ("newton", "eigh") if w == "newton" or {"bw", "iw"} & {*s}],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_gradients(statistics, whitening, training):
    layer = make_layer(6, num_pergroup=3, statistics=statistics, whitening=whitening)
    assert gradcheck(layer, correlated(2, 6, 2, 2), training)


@pytest.mark.parametrize("options", [{"tie_weight": True}, {"affine": False}], ids=str)
def test_gradients_of_options(options):
    layer = make_layer(6, num_pergroup=3, statistics=STATISTICS, **options)
    assert gradcheck(layer, correlated(2, 6, 2, 3), True)


def orthogonal_features(channels, pixels):
    """One sample whose covariance is exactly a multiple of I: all eigenvalues equal."""
    basis = torch.linalg.qr(
        torch.cat([torch.ones(pixels, 1), torch.randn(pixels, pixels - 1)], 1).double()
    ).Q
    return basis[:, 1 : channels + 1].T.reshape(1, channels, pixels, 1) * pixels**0.5


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", [("bw",), ("iw",), ("bw", "iw"), STATISTICS], ids="+".join)
def test_gradients_with_equal_eigenvalues(statistics, whitening):
    torch.manual_seed(0)
    x = orthogonal_features(4, 7)
    cov = reference.covariance(x.reshape(4, 7))[1]
    torch.testing.assert_close(cov, torch.eye(4).double(), rtol=0, atol=1e-14)
    layer = make_layer(4, num_pergroup=4, statistics=statistics, whitening=whitening)
    assert gradcheck(layer, x, True)


def torch_twin(statistics, channels):
    if statistics == "bn":
        return nn.BatchNorm2d(channels)
    if statistics == "in":
        return nn.InstanceNorm2d(channels, affine=True)
    return nn.GroupNorm(1, channels)


@pytest.mark.parametrize("name", ["bn", "in", "ln"])
def test_single_standardizers_equal_torch(name):
    layer = make_layer(32, statistics=(name,), seed=3)
    twin = torch_twin(name, 32).double()
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
        twin.bias.copy_(layer.bias)
        if name == "bn":
            twin.running_mean.copy_(layer.running_mean.flatten())
            twin.running_var.copy_(layer.running_cov.diagonal(dim1=1, dim2=2).flatten())
    layer.eval(), twin.eval()
    a, b = (correlated(3, 32, 5, 6).requires_grad_() for _ in range(2))
    torch.testing.assert_close(layer(a), twin(b), rtol=1e-10, atol=1e-10)
    layer.train(), twin.train()
    ya, yb = layer(a), twin(b)
    torch.testing.assert_close(ya, yb, rtol=1e-10, atol=1e-10)
    dy = torch.randn_like(ya)
    ya.backward(dy), yb.backward(dy)
    for p, q in ((a, b), (layer.weight, twin.weight), (layer.bias, twin.bias)):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)
    if name == "bn":
        # torch's running variance is unbiased, ours biased; both are 1/10 new.
        torch.testing.assert_close(layer.running_mean.flatten(), twin.running_mean)


@pytest.mark.parametrize("statistics", [("bw",), ("iw",)], ids="+".join)
def test_whitened_output_has_identity_covariance(statistics):
    layer = SwitchWhiten2d(32, statistics=statistics, whitening="eigh", eps=1e-12).double()
    y = layer(correlated(4, 32, 8, 8))
    whole = y.transpose(0, 1).reshape(1, 32, -1) if statistics == ("bw",) else y.flatten(2)
    for sample in whole:
        for rows in sample.split(16):
            mean, cov = reference.covariance(rows)
            torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-8)
            torch.testing.assert_close(cov, torch.eye(16).double(), rtol=0, atol=1e-8)


def test_newton_approaches_the_exact_root_with_iterations():
    x = correlated(2, 16, 12, 12)
    exact = SwitchWhiten2d(16, whitening="eigh").double()(x)
    errors = [
        (SwitchWhiten2d(16, num_iterations=t).double()(x) - exact).abs().max().item()
        for t in (2, 5, 10, 40)
    ]
    assert errors[0] > errors[1] > errors[2] > errors[3] and errors[3] < 1e-8, errors


def test_newton_is_stable_in_float32_with_many_iterations():
    # The uncoupled recurrence blows up here: its rounding errors grow with the condition number.
    torch.manual_seed(0)
    x = torch.randn(2, 16, 20, 20) * torch.logspace(-2, 1, 16).view(1, 16, 1, 1)
    newton = SwitchWhiten2d(16, num_iterations=60)(x)
    exact = SwitchWhiten2d(16, whitening="eigh").double()(x.double())
    # 1e-3: the condition number 1e6 times float32's 6e-8, over 16 channels' sum.
    torch.testing.assert_close(newton.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", [("bw", "iw"), STATISTICS, ("bn", "in", "ln")], ids="+".join)
def test_channels_last_is_kept_and_equal(statistics, whitening):
    layer = make_layer(32, statistics=statistics, whitening=whitening)
    x = correlated(2, 32, 5, 7)
    y = layer(x)
    y_last = layer(x.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous()
    assert y_last.is_contiguous(memory_format=torch.channels_last) and not y_last.is_contiguous()
    torch.testing.assert_close(y_last, y, rtol=1e-12, atol=1e-12)


def test_non_contiguous_input():
    layer = make_layer(16, num_pergroup=8)
    x = correlated(2, 16, 8, 10)[:, :, ::2, 1::3]
    torch.testing.assert_close(layer(x), layer(x.contiguous()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whitening", ["newton", "eigh"])
def test_low_precision_under_autocast(dtype, whitening):
    layer = make_layer(32, dtype=torch.float32, whitening=whitening)
    x = correlated(2, 32, 6, 6).to(dtype)
    exact = torch.stack(by_reference(layer.double(), x.double())[0])
    layer.float()
    with torch.autocast("cpu", dtype=dtype if dtype == torch.bfloat16 else torch.float16):
        x.requires_grad_()
        y = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == dtype and x.grad.dtype == dtype
    assert layer.weight.grad.dtype == torch.float32
    # Statistics are float32, so only the output is rounded: half a unit of its last place.
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)


def test_float32_output_under_autocast_is_the_one_without():
    layer = make_layer(32, dtype=torch.float32)
    x = correlated(2, 32, 6, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32 and torch.equal(y, layer(x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shape", [(0, 32, 4, 4), (2, 32, 0, 4)], ids=str)
@pytest.mark.parametrize("statistics", SUBSETS[::6], ids="+".join)
def test_no_pixels(statistics, shape, training):
    layer = make_layer(32, statistics=statistics).train(training)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad.shape == x.shape
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


EXTREMES = {
    "one pixel": lambda x: x[:, :, :1, :1],
    "one pixel of one sample": lambda x: x[:1, :, :1, :1],
    "constant": lambda x: torch.full_like(x, 3.7),
    "large constant": lambda x: torch.full_like(x, 1e6),
    "zero": torch.zeros_like,
    "scale 1e-6": lambda x: x * 1e-6,
    "scale 1e6": lambda x: x * 1e6,
    "mean 1e3": lambda x: x + 1e3,
    "a dead channel": lambda x: x * (torch.arange(x.shape[1]) != 5).view(1, -1, 1, 1),
    "equal channels": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SUBSETS[::3], ids="+".join)
def test_extreme_features_stay_finite(statistics, whitening, extreme):
    layer = SwitchWhiten2d(16, num_pergroup=8, statistics=statistics, whitening=whitening)
    x = EXTREMES[extreme](correlated(3, 16, 6, 5, dtype=torch.float32)).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    values = [y, x.grad, *layer.buffers(), *(p.grad for p in layer.parameters())]
    assert all(v.isfinite().all() for v in values)
    assert layer.eval()(x).isfinite().all()


def test_large_mean_keeps_its_covariance():
    # 1e-3 relative: float32 holds 1e3 + noise to 6e-5, which moves a unit variance by 1e-4.
    x = correlated(4, 16, 30, 30) + 1e3
    layer = SwitchWhiten2d(16, momentum=1.0)
    layer(x.float())
    cov = reference.covariance(x.transpose(0, 1).reshape(16, -1))[1]
    error = (layer.running_cov[0].double() - cov).norm() / cov.norm()
    assert error < 1e-3, error


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_features": 24}, ["24", "16"]),
        ({"num_features": 32, "num_pergroup": 0}, ["32", "0"]),
        ({"num_features": 32, "statistics": ("bw", "gn")}, ["gn", "'bw', 'iw'"]),
        ({"num_features": 32, "statistics": ()}, ["at least one"]),
        ({"num_features": 32, "statistics": ("bw", "bw")}, ["distinct"]),
        ({"num_features": 32, "statistics": "bw"}, ["sequence"]),
        ({"num_features": 32, "whitening": "svd"}, ["svd", "newton"]),
        ({"num_features": 32, "num_iterations": 0}, ["0"]),
        ({"num_features": 32, "eps": 0.0}, ["eps", "0.0"]),
        ({"num_features": 32, "momentum": 2.0}, ["2.0"]),
        ({"num_features": 32, "momentum": None}, ["None", "cumulative"]),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ValueError) as error:
        SwitchWhiten2d(**arguments)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("momentum", [0, 1])
def test_either_end_of_momentum_is_allowed(momentum):
    layer = SwitchWhiten2d(16, 8, momentum=momentum).double()
    x = correlated(2, 16, 5, 4)
    layer(x)
    cov = torch.cov(x.transpose(0, 1).flatten(1), correction=0)
    for j, running in enumerate(layer.running_cov):
        part = slice(8 * j, 8 * j + 8)
        expected = cov[part, part] if momentum else torch.eye(8).double()
        torch.testing.assert_close(running, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 32, 4), (32, 4, 4), (2, 16, 4, 4), (2, 32, 4, 4, 4)])
def test_wrong_input_shape_is_named(shape):
    with pytest.raises(ValueError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
        SwitchWhiten2d(32)(torch.zeros(shape))


def test_names_shapes_and_initial_values_are_those_of_released_checkpoints():
    layer = SwitchWhiten2d(64)
    shapes = {k: tuple(v.shape) for k, v in layer.state_dict().items()}
    assert shapes == {
        "weight": (64,),
        "bias": (64,),
        "sw_mean_weight": (2,),
        "sw_var_weight": (2,),
        "running_mean": (4, 16, 1),
        "running_cov": (4, 16, 16),
    }
    assert torch.equal(layer.running_cov, torch.eye(16).expand(4, 16, 16))
    assert layer.sw_mean_weight.tolist() == [1, 1] and layer.weight.eq(1).all()
    assert SwitchWhiten2d(64, tie_weight=True).sw_var_weight is None
    assert SwitchWhiten2d(64, affine=False).weight is None


def test_statistics_are_put_in_their_fixed_order():
    assert SwitchWhiten2d(16, statistics=["ln", "bw", "in"]).statistics == ("bw", "in", "ln")


def test_frozen_layer_uses_running_values_and_learns_nothing():
    layer = make_layer(32).freeze().train()
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    x = correlated(2, 32, 5, 5).requires_grad_()
    y = layer(x)
    expected, _, _ = by_reference(layer, x, (layer.running_mean[..., 0], layer.running_cov))
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-10, atol=1e-10)
    y.sum().backward()
    assert all(p.grad is None for p in layer.parameters())
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())


def test_importance_is_the_softmax_of_the_weights():
    layer = SwitchWhiten2d(16)
    with torch.no_grad():
        layer.sw_var_weight.copy_(torch.tensor([0.0, np.log(3.0)]))
    assert layer.importance()["mean"] == {"bw": 0.5, "iw": 0.5}
    assert layer.importance()["cov"] == pytest.approx({"bw": 0.25, "iw": 0.75})


def test_no_warnings_and_a_readable_repr():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = SwitchWhiten2d(32, tie_weight=True)
        layer(torch.randn(2, 32, 3, 3)).sum().backward()
    assert "num_pergroup=16" in repr(layer) and "tie_weight=True" in repr(layer)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SUBSETS[::3], ids="+".join)
def test_a_value_that_is_not_finite_leaves_the_running_values(statistics, whitening, value):
    layer = make_layer(16, num_pergroup=8, statistics=statistics, whitening=whitening)
    before = [buffer.clone() for buffer in layer.buffers()]
    x = correlated(3, 16, 5, 4)
    x[1, 3, 2, 2] = value
    if whitening == "eigh" and layer.whitens:
        with pytest.raises(FloatingPointError, match=r"SwitchWhiten2d\(16.* is not finite"):
            layer(x)
    else:
        assert not layer(x).isfinite().all()
    assert all(map(torch.equal, layer.buffers(), before))
    layer(correlated(3, 16, 5, 4))
    assert layer.uses_batch != all(map(torch.equal, layer.buffers(), before))


def test_a_finite_value_whose_square_is_not_leaves_the_running_values():
    layer = make_layer(16, num_pergroup=8, dtype=torch.float32)
    before = [buffer.clone() for buffer in layer.buffers()]
    x = correlated(3, 16, 5, 4, dtype=torch.float32)
    x[1, 3, 2, 2] = 1e30
    layer(x)
    assert all(map(torch.equal, layer.buffers(), before))


def test_a_finite_input_without_eigenvalues_is_not_said_to_be_infinite():
    layer = make_layer(16, num_pergroup=8, whitening="eigh", dtype=torch.float32)
    x = correlated(3, 16, 5, 4, dtype=torch.float32) * 1e30  # their squares are not finite
    with pytest.raises(torch.linalg.LinAlgError):
        layer(x)
    x[1, 3, 2, 2] = float("inf")
    with pytest.raises(FloatingPointError, match="not finite"):
        layer(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whitening", ["newton", "eigh"])
def test_running_values_stay_float32(whitening, dtype):
    # Channels that are nearly equal: their covariance rounded to 16 bits is not positive definite.
    layer = SwitchWhiten2d(16, statistics=("bw",), whitening=whitening, momentum=1.0)
    x = torch.randn(4, 1, 16, 16) + 0.03 * torch.randn(4, 16, 16, 16)
    layer(x)
    expected = layer.eval()(x)
    layer.to(dtype)
    assert layer.weight.dtype == dtype
    assert layer.running_mean.dtype == layer.running_cov.dtype == torch.float32
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert layer(x.to(dtype)).dtype == dtype
    assert layer.double().running_cov.dtype == torch.float64
    assert layer.half().float().running_cov.dtype == torch.float32


def test_eigh_of_a_rank_deficient_covariance_in_float32():
    # Two independent channels in eight: six eigenvalues are rounding errors, some of them negative.
    torch.manual_seed(0)
    x = torch.einsum("ij,njhw->nihw", torch.randn(8, 2), torch.randn(2, 2, 9, 9)) * 100
    layer = SwitchWhiten2d(8, 8, ("bw",), "eigh")
    x.requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    # No direction is blown up by more than what is known of the eigenvalues allows.
    assert y.square().mean() < 8


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 100.0])
def test_eigh_amplifies_no_direction_by_more_than_is_known_of_it(scale, create_graph):
    """Six of eight eigenvalues are ε itself; computed, they are off by roundings of the largest."""
    torch.manual_seed(0)
    layer = SwitchWhiten2d(8, 8, ("bw",), "eigh", affine=False).eval()
    x = torch.randn(8, 8, 1, 1, requires_grad=True)
    basis = torch.eye(8)[..., None, None]
    for factor in torch.randn(20, 8, 2) * scale:
        layer.running_cov[0] = factor @ factor.T
        (root,) = torch.autograd.grad(layer(x), x, basis, create_graph=create_graph)
        largest = torch.linalg.matrix_norm(root.flatten(1).double(), 2)
        rounding = 8 * 2**-23 * torch.linalg.matrix_norm(factor, 2) ** 2
        assert largest <= max(layer.eps, rounding) ** -0.5 * (1 + 1e-4)


@pytest.mark.parametrize("statistics", SUBSETS, ids="+".join)
def test_the_layer_says_what_its_set_needs(statistics):
    layer = SwitchWhiten2d(16, statistics=statistics)
    assert layer.uses_batch == ("bw" in statistics or "bn" in statistics)
    assert layer.uses_sample == any(name in statistics for name in ("iw", "in", "ln"))
    assert layer.whitens == ("bw" in statistics or "iw" in statistics)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
def test_meta_device(whitening):
    with torch.device("meta"):
        layer = SwitchWhiten2d(32, whitening=whitening)
        y = layer(torch.randn(2, 32, 3, 3))
    y.sum().backward()
    assert y.shape == (2, 32, 3, 3) and layer.weight.grad.device.type == "meta"
    layer.to_empty(device="cpu").reset_parameters()
    x = torch.randn(2, 32, 3, 3)
    torch.testing.assert_close(layer(x), SwitchWhiten2d(32, whitening=whitening)(x))
