"""The Triton kernels between the passes against the plain functions in float64.

On a GPU, or in Triton's interpreter; see `test_kernels` for how that comes about.

Shape shorthand: N samples, g groups of G channels, K statistics in the set.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from test_kernels import DEVICE, RUNS_KERNELS, needs_kernels, random_covariance

from sw_detectron.layers import STATISTICS, functional, kernels, moments, small_kernels, whitening
from sw_detectron.layers.mixing import OF_BATCH, OF_SAMPLE, WHITENING
from sw_detectron.layers.options import Options
from sw_detectron.layers.whitening import Parameters, Statistics

SUBSETS = [
    subset
    for k in range(1, 6)
    for subset in itertools.combinations(STATISTICS, k)
    if WHITENING & set(subset)
]

# (N, g, G): group sizes below, at and above a tile's, one sample, one group.
SHAPES = [(3, 3, 8), (1, 3, 12), (3, 1, 16), (3, 3, 12), (1, 1, 32), (1, 3, 16), (3, 2, 24)]

# Every subset with one of the shapes, and half of them affine or tied; all statistics in all
# four ways.
CASES = [
    (subset, SHAPES[i % len(SHAPES)], i % 3 != 0, i % 2 == 1) for i, subset in enumerate(SUBSETS)
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

# Some hundred roundings of 6e-8, in products and sums of G or N * g * G terms, which whitening
# amplifies where a variance is small. Relative to the largest value of a result.
TOLERANCE = 5e-6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.skipif(RUNS_KERNELS, reason="the kernels run in this process")
@pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not installed")
def test_in_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def random(*shape):
    return torch.randn(shape, device=DEVICE)


def double(tensors):
    return type(tensors)(*(None if t is None else t.double() for t in tensors))


def make_options(statistics, group_size, num_iterations=5):
    return Options(statistics, group_size, 0.1, 1e-5, "newton", num_iterations, None)


def make_inputs(case):
    statistics, (n, g, group_size), affine, tied = case
    mean, cov = random(n, g, group_size), random_covariance(n, g, group_size=group_size)
    of_batch = (t.float() for t in moments.batch_moments(mean.double(), cov.double()))
    parameters = Parameters(
        1 + 0.3 * random(g * group_size) if affine else None,
        random(g * group_size) if affine else None,
        random(len(statistics)),
        None if tied else random(len(statistics)),
    )
    return parameters, Statistics(
        *((mean, cov) if OF_SAMPLE & set(statistics) else (None, None)),
        *(of_batch if OF_BATCH & set(statistics) else (None, None)),
    )


def forward(parameters, statistics, options):
    return small_kernels.whitening_transform(
        *statistics, *parameters, options.statistics, options.eps, options.num_iterations
    )


def backward(product, total, saved, parameters, statistics, options):
    weight, _, mean_weight, var_weight = parameters
    return small_kernels.whitening_transform_backward(
        product,
        total,
        saved,
        *statistics,
        weight,
        mean_weight,
        var_weight,
        options.statistics,
        options.eps,
        options.num_iterations,
    )


def assert_near(actual, expected, name, scale=None):
    if expected is None:
        assert actual is None, name
        return
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape, name
    error = (actual - expected).abs().max()
    scale = expected.abs().max() if scale is None else scale
    assert error <= TOLERANCE * scale, f"{name}: {error} of {scale}"


# ---------------------------------------------------------------------------------------------
# The transform
# ---------------------------------------------------------------------------------------------


@needs_kernels
@every_case
def test_transform(case):
    compare_transforms(case)


@needs_kernels
@pytest.mark.parametrize("num_iterations", [1, 2, 9])
def test_transform_with_other_numbers_of_iterations(num_iterations):
    compare_transforms((("bw", "iw"), (1, 1, 8), True, False), num_iterations)


@needs_kernels
def test_transform_of_many_channels():
    # More channels than are taken at a time for the layer's moments.
    compare_transforms((("iw", "ln"), (1, 17, 64), False, False), num_iterations=2)


def compare_transforms(case, num_iterations=5):
    options = make_options(case[0], case[1][-1], num_iterations)
    parameters, statistics = make_inputs(case)
    center, matrix, shift, saved = forward(parameters, statistics, options)
    parameters64, statistics64 = double(parameters), double(statistics)
    exact = whitening.whitening_transform(statistics64, parameters64, torch.float64, options)
    assert_near(center, exact.center, "center")
    assert_near(matrix, exact.matrix, "matrix")
    assert_near(shift, exact.shift, "shift", scale=1.0)

    product, total = random(*case[1], case[1][-1]), random(*case[1])
    grad_parameters, grad_statistics, matrix = backward(
        product, total, saved, parameters, statistics, options
    )
    exact_parameters, exact_statistics, exact_matrix = whitening.whitening_transform_backward(
        product.double(), total.double(), exact.saved, statistics64, parameters64, options
    )
    assert_near(matrix, exact_matrix, "matrix")
    for name, actual, expected in zip(Statistics._fields, grad_statistics, exact_statistics):
        assert_near(actual, expected, name)
    for name, actual, expected in zip(Parameters._fields, grad_parameters, exact_parameters):
        # A softmax's gradient is a difference of sums of the size of the others' gradients.
        scale = largest(exact_parameters, exact_statistics) if name.endswith("_weight") else None
        assert_near(actual, expected, name, scale)


def largest(*gradients):
    return max(g.abs().max() for some in gradients for g in some if g is not None)


@needs_kernels
def test_gradients_of_a_rank_without_samples():
    case = (("bw", "bn"), (1, 2, 8), True, False)
    options = make_options(case[0], 8)
    parameters, statistics = make_inputs(case)
    _, _, _, saved = forward(parameters, statistics, options)
    *gradients, matrix = backward(
        random(0, 2, 8, 8), random(0, 2, 8), saved, parameters, statistics, options
    )
    assert matrix.shape == (1, 2, 8, 8)
    assert all(g.eq(0).all() for some in gradients for g in some if g is not None)


@needs_kernels
@pytest.mark.parametrize("case", [CASES[-4], (("bw",), (3, 3, 16), True, True)], ids=str)
def test_transform_repeats_to_the_bit(case):
    options = make_options(case[0], case[1][-1])
    parameters, statistics = make_inputs(case)
    product, total = random(*case[1], case[1][-1]), random(*case[1])

    def run():
        *transform, saved = forward(parameters, statistics, options)
        *gradients, matrix = backward(product, total, saved, parameters, statistics, options)
        return [*transform, matrix, *(g for some in gradients for g in some if g is not None)]

    assert all(map(torch.equal, run(), run()))


# ---------------------------------------------------------------------------------------------
# The others
# ---------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("shape", [*SHAPES, (150, 1, 16)], ids=str)
def test_batch_moments(shape):
    # A mean whose square has no digits left for a variance of 1.
    mean, cov = random(*shape) + 1e4, random_covariance(*shape[:2], group_size=shape[-1])
    batch_mean, batch_cov = small_kernels.batch_moments(mean, cov)
    exact_mean, exact_cov = moments.batch_moments(mean.double(), cov.double())
    assert_near(batch_mean, exact_mean, "mean")
    # Offsets are known to 1e4 * 6e-8, and there are half a dozen roundings.
    assert (batch_cov - exact_cov).abs().max() <= 5e-3
    assert torch.equal(batch_cov, batch_cov.mT)
    small_mean = mean - 1e4
    _, batch_cov = small_kernels.batch_moments(small_mean, cov)
    assert_near(batch_cov, moments.batch_moments(small_mean.double(), cov.double())[1], "cov")


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("count", [7, 0, 7.0, 0.0, None], ids=str)
@pytest.mark.parametrize("of_sample", [True, False])
def test_input_coefficients(shape, count, of_sample):
    _, statistics = make_inputs((STATISTICS, shape, False, False))
    _, gradients = make_inputs((STATISTICS, shape, False, False))
    center = random(*shape)
    if not of_sample:
        statistics = statistics._replace(mean=None, cov=None)
        gradients = gradients._replace(mean=None, cov=None)
        center = center[:1]
    if count is None:
        gradients = gradients._replace(batch_mean=None, batch_cov=None)
    elif isinstance(count, float):  # of several ranks
        count = torch.tensor(count, device=DEVICE)
    matrix, shift = small_kernels.input_coefficients(
        *gradients, statistics.mean, statistics.batch_mean, center, 5, count
    )
    exact_matrix, exact_shift = whitening.input_coefficients(
        double(gradients),
        double(statistics),
        center.double(),
        5,
        count,
        make_options(STATISTICS, shape[-1]),
    )
    assert_near(matrix, exact_matrix, "matrix")
    assert_near(shift, exact_shift, "shift")


@needs_kernels
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("count", [7, 0, 7.0, 0.0], ids=str)
@pytest.mark.parametrize("groups, group_size", [(1, 8), (5, 16)])
def test_update_running(groups, group_size, count, momentum):
    running_mean, mean = random(groups, group_size, 1), random(groups, group_size)
    running_cov, cov = (
        random(groups, group_size, group_size),
        random(groups, group_size, group_size),
    )
    running = running_mean, running_cov
    count = torch.tensor(count, device=DEVICE) if isinstance(count, float) else count
    exact = running_mean.double(), running_cov.double()
    if count != 0:
        functional._update_running(*exact, mean.double(), cov.double(), count, momentum)
    before = [t.clone() for t in running]
    versions = [t._version for t in running]
    small_kernels.update_running(*running, mean, cov, count, momentum)
    for name, actual, expected in zip(("mean", "cov"), running, exact):
        assert_near(actual, expected, name)
    if count == 0 or momentum == 0:
        assert all(map(torch.equal, running, before))
    else:
        # A graph that has kept the values from before must notice.
        assert all(t._version > v for t, v in zip(running, versions))
    if count != 0 and momentum == 1:
        assert torch.equal(running_mean[..., 0], mean)
        assert torch.equal(running_cov, cov)


@needs_kernels
def test_launches(monkeypatch):
    launched = []
    launch = small_kernels._launch

    def count_and_launch(kernel, *arguments, **options):
        launched.append(kernel)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(small_kernels, "_launch", count_and_launch)
    case = (STATISTICS, (1, 1, 8), True, False)
    options = make_options(case[0], 8)
    parameters, statistics = make_inputs(case)
    _, _, _, saved = forward(parameters, statistics, options)
    assert len(launched) == 1
    backward(random(1, 1, 8, 8), random(1, 1, 8), saved, parameters, statistics, options)
    assert len(launched) == 3


@needs_kernels
def test_supported(monkeypatch):
    monkeypatch.setenv("SW_DETECTRON_SMALL_KERNELS", "1")
    weight, cov = torch.ones(16, device=DEVICE), torch.ones(1, 2, 8, 8, device=DEVICE)
    tensors = (None, weight, cov)
    assert small_kernels.supported(("bw", "ln"), "newton", 8, *tensors)
    assert not small_kernels.supported(("bn", "ln"), "newton", 8, *tensors)
    assert not small_kernels.supported(("bw", "ln"), "eigh", 8, *tensors)
    assert not small_kernels.supported(("bw", "ln"), "newton", 7, *tensors)
    assert not small_kernels.supported(("bw", "ln"), "newton", 8, *tensors, weight.double())
    assert not small_kernels.supported(("bw", "ln"), "newton", 8, *tensors, cov.mT)
    assert not small_kernels.supported(("bw", "ln"), "newton", 8, *tensors, cov[:0])
    monkeypatch.setenv("SW_DETECTRON_PLAIN", "1")
    assert not small_kernels.supported(("bw", "ln"), "newton", 8, *tensors)


def test_import_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from sw_detectron.layers import small_kernels
assert not small_kernels.supported(("bw", "iw"), "newton", 16, torch.ones(16))
"""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)
