"""The Triton kernels that read feature maps, each against the same equations in float64.

Shape shorthand: N samples, C channels, H x W pixels, G channels per group.
"""

import os
import subprocess
import sys

import pytest
import torch
from helpers.kernel_cases import (
    DEVICE,
    DTYPES,
    FORMATS,
    assert_near,
    assert_same_map,
    double,
    dtypes,
    feature_maps,
    formats,
    make_options,
    make_parameters,
    make_statistics,
    moments64,
    pixels64,
    random,
    random_covariance,
    random_map,
)
from helpers.kernel_operations import (
    batch_moments,
    cross_moments,
    input_gradient,
    moments,
    ranks_moments,
    sum_gradients,
    whiten,
    whiten_backward,
)

from sw_detectron.layers import STATISTICS, backend, plain, set_backend, triton
from sw_detectron.layers.options import Running
from sw_detectron.layers.plain.transform import (
    input_coefficients,
    whitening_transform,
    whitening_transform_backward,
)
from sw_detectron.layers.triton.cross_moments import parts_of

pytestmark = pytest.mark.slow  # Triton's interpreter takes minutes for all of them

MANY = 1 << 30  # chunks, of which there are never so many


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def whole(chunk_mean, chunk_cov, chunk_length, length, of_samples=True):
    """Moments of samples and of the batch from those of chunks, by kernel."""
    *result, count = batch_moments(chunk_mean, chunk_cov, chunk_length, length, of_samples)
    assert count == len(chunk_mean) * length
    return result


# ---------------------------------------------------------------------------------------------
# Moments
# ---------------------------------------------------------------------------------------------


@feature_maps
@formats
@dtypes
def test_moments(shape, memory_format, dtype):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    mean, cov, chunk_length = moments(x, shape[-1], MANY)
    pixels = pixels64(x, shape[-1])
    assert mean.shape[2] == -(-pixels.shape[-1] // chunk_length)
    for chunk, part in enumerate(pixels.split(chunk_length, dim=-1)):
        expected = part.mean(dim=-1)
        centred = part - expected[..., None]
        assert_near(mean[:, :, chunk], expected, "mean")
        assert_near(cov[:, :, chunk], centred @ centred.mT / part.shape[-1], "cov")


@pytest.mark.parametrize("most_chunks", [1, 16, MANY])
def test_moments_of_many_chunks(most_chunks):
    # 129 chunks at most, more than are combined at a time.
    x = random_map((1, 8, 150, 220, 8), torch.float32, torch.channels_last, mean=2.0)
    chunk_mean, *rest = moments(x, 8, most_chunks)
    assert chunk_mean.shape[2] == min(most_chunks, 129)
    mean, cov, batch_mean, batch_cov = whole(chunk_mean, *rest, 150 * 220)
    mean64, cov64 = moments64(x, 8)
    assert_near(mean, mean64, "mean")
    assert_near(cov, cov64, "cov")
    assert_near(batch_mean, mean64[0], "batch mean")
    assert_near(batch_cov, cov64[0], "batch cov")


@pytest.mark.parametrize("shape", [(2, 16, 7, 9, 16), (1, 24, 20, 30, 12)], ids=str)
@formats
def test_moments_with_a_large_mean(shape, memory_format):
    x = random_map(shape, torch.float32, memory_format)
    x = (x / x.std(dim=(2, 3), keepdim=True) + 1e3).contiguous(memory_format=memory_format)
    _, cov, _, _ = whole(*moments(x, shape[-1], MANY), shape[2] * shape[3])
    # E[xx] - E[x]E[x] in float32 has an error of 6e-8 * 1e6, some percent.
    assert_near(cov, moments64(x, shape[-1])[1], tolerance=1e-5)


@pytest.mark.parametrize("value", [0.0, -1234.567])
@dtypes
def test_moments_of_a_constant(value, dtype):
    x = torch.full((2, 16, 17, 19), value, device=DEVICE, dtype=dtype)
    mean, cov, batch_mean, batch_cov = whole(*moments(x, 16, MANY), 17 * 19)
    torch.testing.assert_close(mean, torch.full_like(mean, x[0, 0, 0, 0].item()))
    torch.testing.assert_close(batch_mean, mean[0])
    for some in (cov, batch_cov):
        assert some.isfinite().all()
        assert (some.diagonal(dim1=-2, dim2=-1) >= 0).all()
        assert some.abs().max() <= 1e-12 * value**2


@pytest.mark.parametrize("n, g, group_size", [(3, 3, 8), (1, 3, 12), (3, 1, 16), (150, 1, 16)])
def test_batch_moments(n, g, group_size):
    # A mean whose square has no digits left for a variance of 1.
    mean = random(n, g, 1, group_size) + 1e4
    cov = random_covariance(n, g, 1, group_size=group_size)
    _, _, batch_mean, batch_cov = whole(mean, cov, 50, 50, of_samples=False)
    exact_mean, exact_cov = plain.batch_moments(mean[:, :, 0].double(), cov[:, :, 0].double())
    assert_near(batch_mean, exact_mean, "mean")
    # Offsets are known to 1e4 * 6e-8, and there are half a dozen roundings.
    assert (batch_cov - exact_cov).abs().max() <= 5e-3
    assert torch.equal(batch_cov, batch_cov.mT)
    small = mean - 1e4
    _, _, _, batch_cov = whole(small, cov, 50, 50, of_samples=False)
    _, exact_cov = plain.batch_moments(small[:, :, 0].double(), cov[:, :, 0].double())
    assert_near(batch_cov, exact_cov, "cov")


@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("counts", [(7, 3, 5), (0, 3, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("groups, group_size", [(1, 8), (5, 16)])
def test_moments_of_ranks(groups, group_size, counts, momentum):
    mean, cov = random(3, groups, group_size), random_covariance(3, groups, group_size=group_size)
    empty = torch.tensor(counts, device=DEVICE) == 0
    mean[empty], cov[empty] = 0, 0
    gathered = torch.cat(
        [mean.flatten(1), cov.flatten(1), torch.tensor(counts, device=DEVICE)[:, None]], dim=1
    )
    running = Running(random(groups, group_size, 1), random(groups, group_size, group_size))
    before = [t.clone() for t in running]
    exact = double(running)
    all_mean, all_cov, count = ranks_moments(gathered, running, momentum)
    assert count.tolist() == [sum(counts)]
    if not sum(counts):
        assert all(map(torch.equal, running, before))
        return
    shares = torch.tensor(counts, dtype=torch.float64, device=DEVICE) / sum(counts)
    exact_mean = torch.einsum("r,rgi->gi", shares, mean.double())
    offset = mean.double() - exact_mean
    exact_cov = torch.einsum("r,rgij->gij", shares, cov.double())
    exact_cov += torch.einsum("r,rgi,rgj->gij", shares, offset, offset)
    assert_near(all_mean, exact_mean, "mean")
    assert_near(all_cov, exact_cov, "cov")
    plain.update_running(exact, exact_mean, exact_cov, sum(counts), momentum)
    for name, actual, expected in zip(Running._fields, running, exact):
        assert_near(actual, expected, name)
    if momentum == 0:
        assert all(map(torch.equal, running, before))
    if momentum == 1:
        assert torch.equal(running.mean[..., 0], all_mean)
        assert torch.equal(running.cov, all_cov)


# ---------------------------------------------------------------------------------------------
# The other passes
# ---------------------------------------------------------------------------------------------


def prepared(shape, statistics=("bw", "iw"), **changes):
    """Options, parameters and statistics for a feature map."""
    n, channels, _, _, group_size = shape
    options = make_options(statistics, group_size, **changes)
    parameters = make_parameters(statistics, channels)
    return options, parameters, make_statistics(statistics, n, channels // group_size, group_size)


def in_chunks(statistics):
    """The moments of samples as those of one chunk each."""
    mean, cov = statistics[:2]
    return statistics._replace(mean=mean[:, :, None], cov=cov[:, :, None])


@feature_maps
@formats
@dtypes
def test_whiten(shape, memory_format, dtype):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    options, parameters, statistics = prepared(shape)
    length = shape[2] * shape[3]
    y, _, center, _ = whiten(x, in_chunks(statistics), length, parameters, None, options)
    exact = whitening_transform(double(statistics), double(parameters), torch.float64, options)
    assert_near(center, exact.center)
    expected = exact.matrix @ (pixels64(x, shape[-1]) - exact.center[..., None])
    assert_same_map(y, expected + exact.shift[..., None], like=x)


@feature_maps
@formats
@dtypes
@pytest.mark.parametrize("of_sample", [True, False], ids=["each sample", "all samples"])
def test_cross_moments(shape, memory_format, dtype, of_sample):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    # The gradient comes in the other format.
    dy = random_map(shape, dtype, FORMATS[1 - FORMATS.index(memory_format)])
    center = random(shape[0] if of_sample else 1, shape[1] // shape[-1], shape[-1])
    product, total = cross_moments(dy, x, center, of_sample)
    dy64 = pixels64(dy, shape[-1])
    exact = dy64 @ (pixels64(x, shape[-1]) - center.double()[..., None]).mT
    exact_total = dy64.sum(dim=-1)
    if not of_sample:
        exact, exact_total = exact.sum(dim=0, keepdim=True), exact_total.sum(dim=0, keepdim=True)
    assert_near(product.sum(dim=2), exact)
    assert_near(total.sum(dim=2), exact_total)
    again = cross_moments(dy, x, center, of_sample)
    assert torch.equal(product, again[0])
    assert torch.equal(total, again[1])


def test_cross_moments_of_more_samples_than_parts(monkeypatch):
    monkeypatch.setattr(sys.modules[parts_of.__module__], "PARTS_OF_BATCH", 4)
    x, dy = (random_map((7, 8, 3, 5, 8), torch.float32, FORMATS[0]) for _ in range(2))
    center = random(1, 1, 8)
    product, total = cross_moments(dy, x, center, False)
    assert total.shape[2] == 4
    exact = pixels64(dy, 8) @ (pixels64(x, 8) - center.double()[..., None]).mT
    assert_near(product.sum(dim=2), exact.sum(dim=0, keepdim=True))
    assert_near(total.sum(dim=2), pixels64(dy, 8).sum(dim=(0, 3))[None])


def gradients_of_transform(options, parameters, statistics, product, total, layer):
    gradients = whiten_backward(product, total, statistics, layer, parameters, options)
    return gradients, *sum_gradients(gradients, parameters, options)


@feature_maps
@formats
@dtypes
def test_input_gradient(shape, memory_format, dtype):
    check_input_gradient(shape, memory_format, dtype, ("bw", "iw"))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("statistics", [("bw",), ("iw", "ln"), ("bw", "ln")], ids="+".join)
def test_input_gradient_of_other_sets(statistics, training):
    check_input_gradient((2, 16, 3, 5, 8), FORMATS[0], torch.float32, statistics, training)


def check_input_gradient(shape, memory_format, dtype, names, training=True):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    dy = random_map(shape, dtype, FORMATS[1 - FORMATS.index(memory_format)])
    options, parameters, statistics = prepared(shape, names, training=training)
    n, length, group_size = shape[0], shape[2] * shape[3], shape[-1]
    exact = whitening_transform(double(statistics), double(parameters), torch.float64, options)
    center, layer = exact.center.float(), None
    if options.of_sample:
        small = x.new_zeros((n, *shape[1:2], 1, 1), dtype=torch.float32)
        _, _, center, layer = whiten(small, in_chunks(statistics), 1, parameters, None, options)
    product, total = cross_moments(dy, x, center, options.of_sample)
    gradients, _, of_batch = gradients_of_transform(
        options, parameters, statistics, product, total, layer
    )
    count = n * length
    dx = input_gradient(
        *(dy, x, center, gradients, of_batch, statistics, layer, None, parameters, options)
    )
    dy64, centred = pixels64(dy, group_size), pixels64(x, group_size) - exact.center[..., None]
    _, exact_gradients, matrix = whitening_transform_backward(
        dy64 @ centred.mT,
        dy64.sum(dim=-1),
        exact.saved,
        double(statistics),
        double(parameters),
        options,
    )
    if not training:
        exact_gradients = exact_gradients._replace(batch_mean=None, batch_cov=None)
    x_matrix, shift = input_coefficients(
        exact_gradients, double(statistics), exact.center, length, count
    )
    expected = matrix.mT @ dy64 + shift[..., None]
    if x_matrix is not None:
        expected = expected + x_matrix @ centred
    assert_same_map(dx, expected, like=x)
    if of_batch[0] is not None:  # the number of pixels of all ranks, where there are several
        again = input_gradient(
            *(dy, x, center, gradients, of_batch, statistics, layer),
            *(torch.tensor([float(count)], device=DEVICE), parameters, options),
        )
        torch.testing.assert_close(again, dx)


def test_unusual_strides_of_the_gradient():
    shape = (2, 16, 6, 7, 8)
    x, center = random_map(shape, torch.float32, FORMATS[0]), random(2, 2, 8)
    centred = pixels64(x, 8) - center.double()[..., None]
    # The gradient of y.sum(), and a window of a larger map, whose rows do not follow each other.
    wide = random_map((2, 16, 9, 11, 8), torch.float32, FORMATS[0])
    for dy in (torch.ones((), device=DEVICE).expand(2, 16, 6, 7), wide[..., 1:7, 2:9]):
        product, total = cross_moments(dy, x, center, True)
        assert_near(product.sum(dim=2), pixels64(dy, 8) @ centred.mT)
        assert_near(total.sum(dim=2), pixels64(dy, 8).sum(dim=-1))


# ---------------------------------------------------------------------------------------------
# The choice of a backend
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def chosen():
    """Whatever a test chooses, the next one starts with "auto"."""
    yield set_backend
    set_backend("auto")


def test_what_has_kernels():
    x = torch.ones(2, 48, 3, 3, device=DEVICE)
    running = Running(x.new_ones(3, 16, 1), x.new_ones(3, 16, 16))
    options, parameters = make_options(("bw", "ln"), 16), make_parameters(("bw", "ln"), 48)
    assert all(triton.has_kernels(x.to(dtype), parameters, running, options) for dtype in DTYPES)
    assert not triton.has_kernels(x.double(), parameters, running, options)
    assert not triton.has_kernels(x, parameters, running._replace(cov=running.cov.mT), options)
    for changes in (
        {"num_pergroup": 7},
        {"num_pergroup": 65},
        {"whitening": "eigh"},
        {"statistics": ("bn", "ln")},
    ):
        assert not triton.has_kernels(x, parameters, running, options._replace(**changes))


def test_a_chosen_backend_computes(chosen):
    x = torch.ones(2, 48, 3, 3, device=DEVICE)
    running = Running(x.new_ones(3, 16, 1), x.new_ones(3, 16, 16))
    options, parameters = make_options(STATISTICS, 16), make_parameters(STATISTICS, 48)
    chosen("triton")
    assert backend.backend_of_call(x, parameters, running, options) is triton
    assert backend.backend_of_call(x.double(), parameters, running, options) is plain
    chosen("torch")
    assert backend.backend_of_call(x, parameters, running, options) is plain
    with pytest.raises(ValueError, match="cuda"):
        chosen("cuda")


def run_python(program, **environment):
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from sw_detectron.layers import SwitchWhiten2d, set_backend, triton
assert not triton.HAS_TRITON
layer, x = SwitchWhiten2d(16), torch.randn(1, 16, 2, 2)
layer(x).sum().backward()
set_backend("triton")
try:
    layer(x)
except RuntimeError as error:
    assert "not installed" in str(error), error
else:
    raise AssertionError
"""
    run = run_python(program)
    assert run.returncode == 0, run.stderr


def test_the_environment_variable_is_read_at_the_import():
    program = """
import os
from sw_detectron.layers.backend import get_backend
os.environ["SW_DETECTRON_BACKEND"] = "triton"
print(get_backend())
"""
    assert run_python(program, SW_DETECTRON_BACKEND="torch").stdout == "torch\n"
