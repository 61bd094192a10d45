"""The Triton kernels' mixing, whitening and their gradients, against float64.

Shape shorthand: N samples, g groups of G channels, K statistics in the set.
"""

import itertools

import pytest
import torch
from helpers.kernel_cases import (
    DEVICE,
    WHITENING_SETS,
    assert_near,
    double,
    make_options,
    make_parameters,
    make_statistics,
    newton64,
    random,
    random_covariance,
)
from helpers.kernel_operations import (
    TransformGradients,
    sum_gradients,
    whiten,
    whiten_backward,
)

from sw_detectron.layers import STATISTICS, plain
from sw_detectron.layers.mixing import Statistics, layer_moments
from sw_detectron.layers.options import Parameters, Running
from sw_detectron.layers.plain.transform import whitening_transform, whitening_transform_backward
from sw_detectron.layers.triton.mixture import SLOTS

# (N, g, G): group sizes below, at and above a tile's, one sample, one group.
pytestmark = pytest.mark.slow  # Triton's interpreter takes minutes for all of them

SHAPES = [(3, 3, 8), (1, 3, 12), (3, 1, 16), (3, 3, 12), (1, 1, 32), (1, 3, 16), (3, 2, 24)]

# Every subset with one of the shapes, and half of them affine or tied; all statistics in all
# four ways.
CASES = [
    (subset, SHAPES[i % len(SHAPES)], i % 3 != 0, i % 2 == 1)
    for i, subset in enumerate(WHITENING_SETS)
]
CASES += [
    (STATISTICS, (3, 3, 16), affine, tied)
    for affine, tied in itertools.product([True, False], repeat=2)
]
every_case = pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda c: f"{'+'.join(c[0])}-{c[1]}" + "-affine" * c[2] + "-tied" * c[3],
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_inputs(case):
    statistics, (n, g, group_size), affine, tied = case
    parameters = make_parameters(statistics, g * group_size, affine, tied)
    return parameters, make_statistics(statistics, n, g, group_size)


def forward(parameters, statistics, options, running=None):
    """Outputs of `whiten` for pixels μ̂ + e_i, one for every channel: the matrix, and the rest."""
    like = next(t for t in statistics if t is not None)
    groups, group_size = like.shape[-2 - (like.dim() == 4) :][:2]
    n = len(statistics.mean) if options.of_sample else 1
    pixels = torch.eye(group_size, device=DEVICE).expand(n, groups, group_size, group_size)
    x = pixels.reshape(n, groups * group_size, 1, group_size).contiguous()
    chunks = statistics
    if options.of_sample:
        chunks = statistics._replace(mean=like[:, :, None], cov=statistics.cov[:, :, None])
    y, _, center, layer = whiten(x, chunks, group_size, parameters, running, options)
    return y.view_as(pixels), center, layer


def backward(product, total, layer, parameters, statistics, options):
    gradients = whiten_backward(
        product[:, :, None], total[:, :, None], statistics, layer, parameters, options
    )
    return gradients, *sum_gradients(gradients, parameters, options)


@every_case
def test_transform(case):
    compare_transforms(case)


@pytest.mark.parametrize("num_iterations", [1, 2, 9])
def test_transform_with_other_numbers_of_iterations(num_iterations):
    compare_transforms((("bw", "iw"), (1, 1, 8), True, False), num_iterations)


def test_sums_over_many_samples():
    # More matrices, and more samples, than are taken at a time.
    names, (n, groups, group_size) = ("bw", "iw"), (300, 2, 8)
    options = make_options(names, group_size)
    parameters = make_parameters(names, groups * group_size)
    vectors, (matrix, mixed) = random(3, n, groups, group_size), random(2, n, groups, 8, 8)
    inner = random(n, groups, 2, SLOTS.value)
    gradients = TransformGradients(matrix, *vectors, mixed, inner)
    found, (batch_mean, batch_cov) = sum_gradients(gradients, parameters, options)
    weights = [w.double().softmax(0) for w in (parameters.mean_weight, parameters.var_weight)]
    sums = inner.double().sum((0, 1))[:, :2]
    expected = [omega * (grad - omega @ grad) for omega, grad in zip(weights, sums)]
    for name, actual, wanted in zip(("mean_weight", "var_weight"), found[2:], expected):
        assert_near(actual, wanted, name, sums.abs().max())
    for name, actual, summed in zip(("weight", "bias"), found, vectors):
        assert_near(actual, summed.double().sum(0).flatten(), name)
    assert_near(batch_mean, weights[0][0] * vectors[2].double().sum(0), "batch mean")
    assert_near(batch_cov, weights[1][0] * mixed.double().sum(0), "batch cov")


def test_transform_of_many_channels():
    # More channels than are taken at a time for the layer's moments.
    names = ("iw", "ln")
    parameters, statistics = make_inputs((names, (1, 17, 64), False, False))
    options = make_options(names, 64, num_iterations=1)
    _, _, layer = forward(parameters, statistics, options)
    mean, cov = double(statistics)[:2]
    exact = layer_moments(mean, cov.diagonal(dim1=-2, dim2=-1))
    assert_near(layer, torch.cat(exact, dim=2)[:, 0])


def compare_transforms(case, num_iterations=5):
    names, shape, _, _ = case
    options = make_options(names, shape[-1], num_iterations)
    parameters, statistics = make_inputs(case)
    y, center, layer = forward(parameters, statistics, options)
    parameters64, statistics64 = double(parameters), double(statistics)
    exact = whitening_transform(statistics64, parameters64, torch.float64, options)
    assert_near(center, exact.center, "center")
    shift = exact.shift - (exact.matrix @ exact.center[..., None])[..., 0]
    assert_near(y, exact.matrix + shift[..., None], "y")
    if layer is not None:
        variance = statistics64.cov.diagonal(dim1=-2, dim2=-1)
        exact_layer = layer_moments(statistics64.mean, variance)
        assert_near(layer, torch.cat(exact_layer, dim=2)[:, 0], "layer")

    n = shape[0] if options.of_sample else 1
    product, total = random(n, *shape[1:], shape[-1]), random(n, *shape[1:])
    gradients, of_parameters, of_batch = backward(
        product, total, layer, parameters, statistics, options
    )
    exact_parameters, exact_statistics, exact_matrix = whitening_transform_backward(
        product.double(), total.double(), exact.saved, statistics64, parameters64, options
    )
    assert_near(gradients.matrix, exact_matrix, "matrix")
    assert_near(of_batch[0], exact_statistics.batch_mean, "batch mean")
    assert_near(of_batch[1], exact_statistics.batch_cov, "batch cov")
    for name, actual, expected in zip(Parameters._fields, of_parameters, exact_parameters):
        # A softmax's gradient is a difference of sums of the size of the others' gradients.
        scale = largest(exact_parameters, exact_statistics) if name.endswith("_weight") else None
        assert_near(actual, expected, name, scale)


def largest(*gradients):
    return max(g.abs().max() for some in gradients for g in some if g is not None)


@pytest.mark.parametrize("case", [CASES[-4], (("bw",), (3, 3, 16), True, True)], ids=str)
def test_transform_repeats_to_the_bit(case):
    names, shape, _, _ = case
    options = make_options(names, shape[-1])
    parameters, statistics = make_inputs(case)
    n = shape[0] if options.of_sample else 1
    product, total = random(n, *shape[1:], shape[-1]), random(n, *shape[1:])

    def run():
        *outputs, layer = forward(parameters, statistics, options)
        gradients, of_parameters, of_batch = backward(
            product, total, layer, parameters, statistics, options
        )
        return [t for t in (*outputs, *gradients, *of_parameters, *of_batch) if t is not None]

    assert all(map(torch.equal, run(), run()))


@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("groups, group_size", [(1, 8), (5, 16)])
def test_update_of_running_values(groups, group_size, momentum):
    names = ("bw", "iw")
    options = make_options(names, group_size, momentum=momentum)
    case = names, (2, groups, group_size), True, False
    parameters, statistics = make_inputs(case)
    running = Running(random(groups, group_size, 1), random(groups, group_size, group_size))
    before, exact = [t.clone() for t in running], double(running)
    forward(parameters, statistics, options, running)
    plain.update_running(exact, *double(statistics)[2:], 7, momentum)
    for name, actual, expected in zip(Running._fields, running, exact):
        assert_near(actual, expected, name)
    if momentum == 0:
        assert all(map(torch.equal, running, before))
    if momentum == 1:
        assert torch.equal(running.mean[..., 0], statistics.batch_mean)
        assert torch.equal(running.cov, statistics.batch_cov)


# ---------------------------------------------------------------------------------------------
# Newton's iteration
# ---------------------------------------------------------------------------------------------


def iterate(cov, grad, num_iterations):
    """The root of cov + ε I and its gradient, for one whitening statistic alone."""
    group_size = cov.shape[-1]
    options = make_options(("bw",), group_size, num_iterations, eps=1e-12)
    parameters = Parameters(None, None, random(1), None)
    statistics = Statistics(None, None, random(*cov.shape[:-1]), cov)
    gradients, _, _ = backward(
        grad[None], torch.zeros_like(grad[None, ..., 0]), None, parameters, statistics, options
    )
    return gradients.matrix[0], gradients.mixed[0]


@pytest.mark.parametrize("num_iterations", [1, 3, 5, 7])
@pytest.mark.parametrize("groups, group_size", [(1, 8), (6, 12), (2, 16), (2, 64)])
def test_newton(groups, group_size, num_iterations):
    cov = random_covariance(groups, group_size=group_size)
    # A gradient need not be symmetric.
    grad = torch.randn_like(cov)
    root, gradient = iterate(cov, grad, num_iterations)
    cov64 = cov.double().requires_grad_()
    root64 = newton64(cov64, num_iterations)
    (gradient64,) = torch.autograd.grad(root64, cov64, grad.double())
    assert_near(root, root64.detach())
    assert_near(gradient, (gradient64 + gradient64.mT) / 2)
    assert torch.equal(gradient, gradient.mT)


def test_newton_of_an_ill_conditioned_covariance():
    # Condition number 1e4, where float32 keeps half its digits, and as many iterations as
    # converge. Computed as it is defined, the iteration would diverge here, in float64 too.
    basis = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q
    cov = (basis * torch.logspace(-4, 0, 24, dtype=torch.float64)) @ basis.mT
    cov = cov.float().to(DEVICE)[None]
    grad = torch.randn_like(cov)

    cov64 = cov.double().requires_grad_()
    values, vectors = torch.linalg.eigh(cov64)
    root64 = (vectors * values.rsqrt()[..., None, :]) @ vectors.mT
    (gradient64,) = torch.autograd.grad(root64, cov64, grad.double())
    root, gradient = iterate(cov, grad, 20)
    assert_near(root, root64.detach(), tolerance=1e-3)
    assert_near(gradient, (gradient64 + gradient64.mT) / 2, tolerance=1e-3)
