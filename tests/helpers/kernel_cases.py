"""What tests of the Triton kernels share: shapes, random tensors, and how near is near.

The kernels run on a GPU or in Triton's interpreter; see `conftest`.

Shape shorthand: N samples, C channels, H x W pixels, G channels per group.
"""

import itertools

import pytest
import torch

from sw_detectron.layers import STATISTICS, plain, triton
from sw_detectron.layers.mixing import OF_BATCH, OF_SAMPLE, WHITENING, Statistics
from sw_detectron.layers.options import Options, Parameters

if not triton.HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if triton.INTERPRETED:
    from triton.runtime.interpreter import InterpretedFunction

    # The interpreter prepares Triton's language anew at every call of one function by another,
    # which takes most of its time. Once for each function is enough.
    _prepared, _call = set(), InterpretedFunction.__call__

    def _call_prepared(self, *args, **kwargs):
        if self in _prepared:
            return self.rewrite()(*args, **kwargs)
        _prepared.add(self)
        return _call(self, *args, **kwargs)

    InterpretedFunction.__call__ = _call_prepared

# Products of split factors keep 22 bits (2.4e-7), sums of some hundred of them and the float32
# results somewhat less; whitening amplifies errors where a variance is small. Errors are measured
# against the largest value of a result.
TOLERANCE = 5e-6

FORMATS = (torch.contiguous_format, torch.channels_last)
FORMAT_NAMES = ("nchw", "nhwc")
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

# In the interpreter, which takes seconds a case, the shorter types see some of the shapes: what a
# type changes is how values are read and written.
feature_maps = pytest.mark.parametrize(
    "shape, memory_format, dtype",
    [
        pytest.param(shape, memory_format, dtype, id=f"{shape}-{name}-{str(dtype).split('.')[1]}")
        for i, shape in enumerate(SHAPES)
        for j, (memory_format, name) in enumerate(zip(FORMATS, FORMAT_NAMES))
        for k, dtype in enumerate(DTYPES)
        if DEVICE == "cuda" or k == 0 or (i + j + k) % 4 == 0
    ],
)

WHITENING_SETS = [
    subset
    for k in range(1, 6)
    for subset in itertools.combinations(STATISTICS, k)
    if not WHITENING.isdisjoint(subset)
]


def random(*shape):
    return torch.randn(shape, device=DEVICE)


def random_map(shape, dtype, memory_format, mean=0.0):
    n, c, h, w, _ = shape
    x = torch.randn(n, c, h, w, device=DEVICE) * torch.rand(n, c, 1, 1, device=DEVICE) + mean
    return x.to(dtype).to(memory_format=memory_format)


def random_covariance(*batch, group_size):
    samples = random(*batch, group_size, 3 * group_size)
    samples *= 0.3 + torch.rand(*batch, group_size, 1, device=DEVICE)
    return samples @ samples.mT / samples.shape[-1]


def make_options(statistics, group_size, num_iterations=5, **changes):
    options = Options(statistics, group_size, 0.1, 1e-5, "newton", num_iterations, None, True)
    return options._replace(**changes)


def make_parameters(statistics, channels, affine=True, tied=False):
    return Parameters(
        1 + 0.3 * random(channels) if affine else None,
        random(channels) if affine else None,
        random(len(statistics)),
        None if tied else random(len(statistics)),
    )


def make_statistics(statistics, n, groups, group_size):
    mean, cov = random(n, groups, group_size), random_covariance(n, groups, group_size=group_size)
    of_batch = (t.float() for t in plain.batch_moments(mean.double(), cov.double()))
    return Statistics(
        *((mean, cov) if OF_SAMPLE & set(statistics) else (None, None)),
        *(of_batch if OF_BATCH & set(statistics) else (None, None)),
    )


def double(tensors):
    return type(tensors)(*(None if t is None else t.double() for t in tensors))


def pixels64(x, group_size):
    """(N, C, H, W) as float64 (N, g, G, L)."""
    n, c, h, w = x.shape
    return x.double().reshape(n, c // group_size, group_size, h * w)


def moments64(x, group_size):
    pixels = pixels64(x, group_size)
    mean = pixels.mean(dim=-1)
    centred = pixels - mean[..., None]
    return mean, centred @ centred.mT / pixels.shape[-1]


def newton64(cov, num_iterations):
    """The iteration as it is defined, differentiable."""
    trace = cov.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    normalized = cov / trace
    p = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device).expand_as(cov)
    for _ in range(num_iterations):
        p = (3 * p - p @ p @ p @ normalized) / 2
    return p / trace.sqrt()


def assert_near(actual, expected, name="", scale=None, tolerance=TOLERANCE):
    if expected is None:
        assert actual is None, name
        return
    assert actual.dtype == torch.float32, name
    assert actual.shape == expected.shape, name
    error = (actual - expected).abs().max()
    scale = expected.abs().max() if scale is None else scale
    assert error <= tolerance * scale, f"{name}: {error} of {scale}"


def assert_same_map(actual, expected, like):
    """`expected` (N, g, G, L) in the dtype and format of `like`, to one unit in its last place.

    A GPU rounds to half a unit, the interpreter truncates.
    """
    assert actual.dtype == like.dtype
    assert actual.stride() == like.stride()
    expected = expected.reshape(like.shape)
    rounding = 0.0 if like.dtype == torch.float32 else torch.finfo(like.dtype).eps
    limit = rounding * expected.abs() + TOLERANCE * expected.abs().max()
    assert ((actual.double() - expected).abs() <= limit).all()
