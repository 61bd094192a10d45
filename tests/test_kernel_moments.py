"""The Triton kernels of moments, each against the same equations in float64.

Shape shorthand: N samples, C channels, H x W pixels, G channels per group.
"""

import pytest
import torch
from helpers.kernel_cases import (
    DEVICE,
    DTYPES,
    FORMAT_NAMES,
    FORMATS,
    assert_near,
    double,
    feature_maps,
    moments64,
    pixels64,
    random,
    random_covariance,
    random_map,
)
from helpers.kernel_operations import batch_moments, moments, ranks_moments

from sw_detectron.layers import plain
from sw_detectron.layers.options import Running

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


@feature_maps
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


@pytest.mark.parametrize(
    "shape, most_chunks, number",
    [
        # More than are combined at a time; up to 16 by one program for a sample.
        *(((2, 8, 150, 220, 8), most, min(most, 129)) for most in (1, 16, MANY)),
        ((2, 48, 60, 80, 24), MANY, 10),
        ((2, 64, 60, 60, 64), MANY, 4),
    ],
    ids=str,
)
def test_moments_of_many_chunks(shape, most_chunks, number):
    _, _, height, width, group_size = shape
    x = random_map(shape, torch.float32, torch.channels_last, mean=2.0)
    chunk_mean, *rest = moments(x, group_size, most_chunks)
    assert chunk_mean.shape[2] == number
    mean, cov, batch_mean, batch_cov = whole(chunk_mean, *rest, height * width)
    mean64, cov64 = moments64(x, group_size)
    batch_mean64, batch_cov64 = plain.batch_moments(mean64, cov64)
    assert_near(mean, mean64, "mean")
    assert_near(cov, cov64, "cov")
    assert_near(batch_mean, batch_mean64, "batch mean")
    assert_near(batch_cov, batch_cov64, "batch cov")


@pytest.mark.parametrize("shape", [(2, 16, 7, 9, 16), (1, 24, 20, 30, 12)], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS, ids=FORMAT_NAMES)
def test_moments_with_a_large_mean(shape, memory_format):
    x = random_map(shape, torch.float32, memory_format)
    x = (x / x.std(dim=(2, 3), keepdim=True) + 1e3).contiguous(memory_format=memory_format)
    _, cov, _, _ = whole(*moments(x, shape[-1], MANY), shape[2] * shape[3])
    # E[xx] - E[x]E[x] in float32 has an error of 6e-8 * 1e6, some percent.
    assert_near(cov, moments64(x, shape[-1])[1], tolerance=1e-5)


@pytest.mark.parametrize("value", [0.0, -1234.567])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
