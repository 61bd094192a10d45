"""The Triton kernels of the passes after the moments, each against the equations in float64.

Shape shorthand: N samples, C channels, H x W pixels, G channels per group.
"""

import sys

import pytest
import torch
from helpers.kernel_cases import (
    DEVICE,
    FORMATS,
    assert_near,
    assert_same_map,
    double,
    feature_maps,
    make_options,
    make_parameters,
    make_statistics,
    pixels64,
    random,
    random_map,
)
from helpers.kernel_operations import (
    cross_moments,
    input_gradient,
    sum_gradients,
    whiten,
    whiten_backward,
)

from sw_detectron.layers.plain.transform import (
    input_coefficients,
    whitening_transform,
    whitening_transform_backward,
)
from sw_detectron.layers.triton.cross_moments import parts_of

pytestmark = pytest.mark.slow  # Triton's interpreter takes minutes for all of them


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
