"""The Triton kernels against the same equations in float64, on a GPU or in Triton's interpreter.

Triton decides when it is imported whether to compile or to interpret. So where there is no GPU,
one test runs this file once more, in a process of its own with the interpreter, and all others
are run there.

Shape shorthand: N samples, C channels, H x W pixels, G channels per group.
"""

import os
import subprocess
import sys

import pytest
import torch

from sw_detectron.layers import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_KERNELS = kernels.HAS_TRITON and (DEVICE == "cuda" or kernels.INTERPRETED)

needs_kernels = pytest.mark.skipif(
    not RUNS_KERNELS, reason="run by test_in_interpreter, where Triton is installed"
)

# Products of split factors keep 22 bits (2.4e-7), sums of some hundred of them and the float32
# results somewhat less. Errors are measured against the largest value of a result.
FLOAT32_TOLERANCE = 5e-6

FORMATS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# (N, C, H, W, G): groups below, at and above a tile's size, pixels below and above a tile; the
# last is summed up in three chunks.
SHAPES = [
    (1, 16, 1, 1, 8),
    (3, 24, 1, 7, 12),
    (2, 32, 7, 9, 16),
    (1, 48, 10, 13, 24),
    (2, 32, 13, 10, 32),
    (1, 64, 9, 7, 64),
    (1, 16, 20, 30, 16),
]

feature_maps = pytest.mark.parametrize("shape", SHAPES, ids=str)
formats = pytest.mark.parametrize("memory_format", FORMATS, ids=("nchw", "nhwc"))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_map(shape, dtype, memory_format, mean=0.0):
    n, c, h, w, _ = shape
    x = torch.randn(n, c, h, w, device=DEVICE) * torch.rand(n, c, 1, 1, device=DEVICE) + mean
    return x.to(dtype).to(memory_format=memory_format)


def random_vectors(shape):
    n, c, _, _, group_size = shape
    return torch.randn(n, c // group_size, group_size, device=DEVICE)


def random_matrices(shape):
    n, c, _, _, group_size = shape
    return torch.randn(n, c // group_size, group_size, group_size, device=DEVICE)


def pixels64(x, group_size):
    """(N, C, H, W) as float64 (N, g, G, L)."""
    n, c, h, w = x.shape
    return x.double().reshape(n, c // group_size, group_size, h * w)


def moments64(x, group_size):
    pixels = pixels64(x, group_size)
    mean = pixels.mean(dim=-1)
    centred = pixels - mean[..., None]
    return mean, centred @ centred.mT / pixels.shape[-1]


def assert_near(actual, expected, tolerance=FLOAT32_TOLERANCE):
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same_map(actual, expected, like):
    """`expected` (N, g, G, L) in the dtype and format of `like`, to one unit in its last place.

    A GPU rounds to half a unit, the interpreter truncates.
    """
    assert actual.dtype == like.dtype
    assert actual.stride() == like.stride()
    expected = expected.reshape(like.shape)
    rounding = 0.0 if like.dtype == torch.float32 else torch.finfo(like.dtype).eps
    limit = rounding * expected.abs() + FLOAT32_TOLERANCE * expected.abs().max()
    assert ((actual.double() - expected).abs() <= limit).all()


@pytest.mark.skipif(RUNS_KERNELS, reason="the kernels run in this process")
@pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not installed")
def test_in_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


# ---------------------------------------------------------------------------------------------
# Passes over the pixels
# ---------------------------------------------------------------------------------------------


@needs_kernels
@feature_maps
@formats
@dtypes
def test_moments(shape, memory_format, dtype):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    mean, cov = kernels.moments(x, shape[-1])
    mean64, cov64 = moments64(x, shape[-1])
    assert_near(mean, mean64)
    assert_near(cov, cov64)


@needs_kernels
def test_moments_of_many_chunks():
    # 129 chunks, more than are combined at a time.
    x = random_map((1, 8, 150, 220, 8), torch.float32, torch.channels_last, mean=2.0)
    mean, cov = kernels.moments(x, 8)
    mean64, cov64 = moments64(x, 8)
    assert_near(mean, mean64)
    assert_near(cov, cov64)


@needs_kernels
@pytest.mark.parametrize("shape", [(2, 16, 7, 9, 16), (1, 24, 20, 30, 12)], ids=str)
@formats
def test_moments_with_a_large_mean(shape, memory_format):
    x = random_map(shape, torch.float32, memory_format)
    x = (x / x.std(dim=(2, 3), keepdim=True) + 1e3).contiguous(memory_format=memory_format)
    _, cov = kernels.moments(x, shape[-1])
    # E[xx] - E[x]E[x] in float32 has an error of 6e-8 * 1e6, some percent.
    assert_near(cov, moments64(x, shape[-1])[1], 1e-5)


@needs_kernels
@pytest.mark.parametrize("value", [0.0, -1234.567])
@dtypes
def test_moments_of_a_constant(value, dtype):
    x = torch.full((2, 16, 17, 19), value, device=DEVICE, dtype=dtype)
    mean, cov = kernels.moments(x, 16)
    torch.testing.assert_close(mean, torch.full_like(mean, x[0, 0, 0, 0].item()))
    assert cov.isfinite().all()
    assert (cov.diagonal(dim1=-2, dim2=-1) >= 0).all()
    assert cov.abs().max() <= 1e-12 * value**2


@needs_kernels
@feature_maps
@formats
@dtypes
def test_affine(shape, memory_format, dtype):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    center, bias, matrix = random_vectors(shape), random_vectors(shape), random_matrices(shape)
    y = kernels.affine(x, center, matrix, bias)
    centred = pixels64(x, shape[-1]) - center.double()[..., None]
    expected = matrix.double() @ centred + bias.double()[..., None]
    assert_same_map(y, expected, like=x)


@needs_kernels
@feature_maps
@formats
@dtypes
def test_cross_moments(shape, memory_format, dtype):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    # The gradient comes in the other format.
    dy = random_map(shape, dtype, FORMATS[1 - FORMATS.index(memory_format)])
    center = random_vectors(shape)
    cross, total = kernels.cross_moments(dy, x, center)
    dy64 = pixels64(dy, shape[-1])
    centred = pixels64(x, shape[-1]) - center.double()[..., None]
    assert_near(cross, dy64 @ centred.mT)
    assert_near(total, dy64.sum(dim=-1))
    again = kernels.cross_moments(dy, x, center)
    assert torch.equal(cross, again[0])
    assert torch.equal(total, again[1])


@needs_kernels
@feature_maps
@formats
@dtypes
def test_input_gradient(shape, memory_format, dtype):
    x = random_map(shape, dtype, memory_format, mean=2.0)
    dy = random_map(shape, dtype, FORMATS[1 - FORMATS.index(memory_format)])
    center, bias = random_vectors(shape), random_vectors(shape)
    dy_matrix, x_matrix = random_matrices(shape), random_matrices(shape)
    dx = kernels.input_gradient(dy, x, center, dy_matrix, x_matrix, bias)
    centred = pixels64(x, shape[-1]) - center.double()[..., None]
    expected = dy_matrix.double().mT @ pixels64(dy, shape[-1]) + x_matrix.double() @ centred
    assert_same_map(dx, expected + bias.double()[..., None], like=x)


@needs_kernels
def test_unusual_strides():
    shape = (2, 16, 6, 7, 8)
    center, matrix = random_vectors(shape), random_matrices(shape)
    # The gradient of y.sum(), and a window of a larger map, whose rows do not follow each other.
    dy = torch.ones((), device=DEVICE).expand(2, 16, 6, 7)
    window = random_map((2, 16, 9, 11, 8), torch.float32, torch.contiguous_format)[..., 1:7, 2:9]
    cross, total = kernels.cross_moments(dy, window, center)
    centred = pixels64(window, 8) - center.double()[..., None]
    assert_near(cross, pixels64(dy, 8) @ centred.mT)
    assert_near(total, torch.full_like(center.double(), 42.0))
    y = kernels.affine(window, center, matrix, center)
    expected = matrix.double() @ centred + center.double()[..., None]
    assert_near(y, expected.reshape(y.shape))
    # One matrix for all samples.
    shared, center = matrix[:1].expand(2, -1, -1, -1), center[:1].expand(2, -1, -1)
    y = kernels.affine(window, center, shared, center)
    assert torch.equal(y, kernels.affine(window, center.clone(), shared.clone(), center.clone()))


# ---------------------------------------------------------------------------------------------
# Newton's iteration
# ---------------------------------------------------------------------------------------------


def random_covariance(*batch, group_size):
    samples = torch.randn(*batch, group_size, 3 * group_size, device=DEVICE)
    samples *= 0.3 + torch.rand(*batch, group_size, 1, device=DEVICE)
    return samples @ samples.mT / samples.shape[-1]


def newton64(cov, num_iterations):
    """The iteration as it is defined, differentiable."""
    trace = cov.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    normalized = cov / trace
    p = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device).expand_as(cov)
    for _ in range(num_iterations):
        p = (3 * p - p @ p @ p @ normalized) / 2
    return p / trace.sqrt()


def newton_gradient64(cov, grad, num_iterations):
    cov = cov.double().requires_grad_()
    (gradient,) = torch.autograd.grad(newton64(cov, num_iterations), cov, grad.double())
    return (gradient + gradient.mT) / 2


@needs_kernels
@pytest.mark.parametrize("num_iterations", [1, 3, 5, 7])
@pytest.mark.parametrize("batch, group_size", [((), 8), ((3, 2), 12), ((2,), 16), ((1, 2), 64)])
def test_newton(batch, group_size, num_iterations):
    cov = random_covariance(*batch, group_size=group_size)
    root = kernels.newton_inverse_sqrt(cov, num_iterations)
    assert_near(root, newton64(cov.double(), num_iterations))
    # A gradient need not be symmetric.
    grad = torch.randn_like(cov)
    gradient = kernels.newton_inverse_sqrt_backward(cov, grad, num_iterations)
    assert_near(gradient, newton_gradient64(cov, grad, num_iterations))
    assert torch.equal(gradient, gradient.mT)


@needs_kernels
def test_newton_of_an_ill_conditioned_covariance():
    # Condition number 1e4, where float32 keeps half its digits, and as many iterations as
    # converge. Computed as it is defined, the iteration would diverge here, in float64 too.
    basis = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q
    cov = (basis * torch.logspace(-4, 0, 24, dtype=torch.float64)) @ basis.mT
    cov = cov.float().to(DEVICE)
    grad = torch.randn_like(cov)

    cov64 = cov.double().requires_grad_()
    values, vectors = torch.linalg.eigh(cov64)
    root64 = (vectors * values.rsqrt()) @ vectors.mT
    (gradient64,) = torch.autograd.grad(root64, cov64, grad.double())
    assert_near(kernels.newton_inverse_sqrt(cov, 20), root64.detach(), 1e-3)
    gradient = kernels.newton_inverse_sqrt_backward(cov, grad, 20)
    assert_near(gradient, (gradient64 + gradient64.mT) / 2, 1e-3)


# ---------------------------------------------------------------------------------------------
# As operators of the library
# ---------------------------------------------------------------------------------------------


def operator_examples():
    shape = (2, 16, 5, 6, 8)
    x = random_map(shape, torch.float32, torch.channels_last)
    vectors, matrices = random_vectors(shape), random_matrices(shape)
    cov = random_covariance(3, 2, group_size=8)
    return {
        "moments": (x, 8),
        "affine": (x, vectors, matrices, vectors),
        "cross_moments": (x.contiguous(), x, vectors),
        "input_gradient": (x.contiguous(), x, vectors, matrices, matrices, vectors),
        "newton_inverse_sqrt": (cov, 3),
        "newton_inverse_sqrt_backward": (cov, torch.randn_like(cov), 3),
    }


@needs_kernels
@pytest.mark.parametrize("name", list(operator_examples()))
def test_operator_registration(name):
    torch.library.opcheck(getattr(torch.ops.sw_detectron, name), operator_examples()[name])


@needs_kernels
def test_compile_without_graph_break():
    def whiten(x, vectors, matrices):
        if not kernels.available(x, vectors.shape[-1]):
            return x
        mean, _ = kernels.moments(x, vectors.shape[-1])
        return kernels.affine(x, mean, matrices, vectors)

    shape = (2, 16, 5, 6, 8)
    arguments = (
        random_map(shape, torch.float32, torch.channels_last),
        random_vectors(shape),
        random_matrices(shape),
    )
    compiled = torch.compile(whiten, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), whiten(*arguments))


@needs_kernels
def test_available(monkeypatch):
    x = torch.ones(2, 48, 3, 3, device=DEVICE)
    assert kernels.available(x)
    assert all(kernels.available(x.to(dtype), 12) for dtype in DTYPES)
    assert kernels.available(x, 8)
    assert not kernels.available(x, 6)
    assert not kernels.available(x.double(), 16)
    assert not kernels.available(x[:0], 16)
    monkeypatch.setenv("SW_DETECTRON_PLAIN", "1")
    assert not kernels.available(x, 16)


def test_import_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from sw_detectron.layers import kernels
assert not kernels.available(torch.ones(1, 16, 2, 2), 16)
assert not kernels.HAS_TRITON
"""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)
