"""The passes over the pixels in plain PyTorch, where other tests of the layer do not look."""

import pytest
import torch
from helpers.kernel_cases import FORMAT_NAMES, FORMATS, moments64, pixels64

from sw_detectron.layers import plain
from sw_detectron.layers.plain.passes import affine, cross_moments, input_gradient


@pytest.mark.parametrize("memory_format", FORMATS, ids=FORMAT_NAMES)
@pytest.mark.parametrize("deviations", [10, 50, 250])
def test_moments_of_a_mean_of_many_standard_deviations(deviations, memory_format):
    torch.manual_seed(0)
    x = (torch.randn(3, 32, 40, 40) + deviations).contiguous(memory_format=memory_format)
    mean, cov = plain.moments(x, 16, diagonal=False)
    exact_mean, exact_cov = moments64(x, 16)
    assert (mean - exact_mean).abs().max() <= 1e-6 * deviations
    # E[xx] - E[x]E[x] has an error of 6e-8 times the mean's square: 6e-6 to 4e-3.
    assert (cov - exact_cov).abs().max() <= 1e-5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("diagonal", [False, True])
def test_moments_of_no_samples(device, diagonal):
    """As of a rank without data. On the meta device by the operations of a GPU."""
    mean, cov = plain.moments(torch.empty(0, 32, 5, 4, device=device), 16, diagonal)
    assert mean.shape == (0, 2, 16)
    assert cov.shape == ((0, 2, 16) if diagonal else (0, 2, 16, 16))


@pytest.mark.parametrize("memory_format", FORMATS, ids=FORMAT_NAMES)
def test_moments_of_images_that_are_taken_in_pieces(memory_format):
    """2^18 values at a time are centred, which is less than one image."""
    torch.manual_seed(0)
    x = (torch.randn(2, 32, 90, 110) + 100).contiguous(memory_format=memory_format)
    _, cov = plain.moments(x, 16, diagonal=False)
    torch.testing.assert_close(cov.double(), moments64(x, 16)[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("groups, group_size", [(3, 16), (5, 8), (6, 12), (7, 4)])
def test_channels_last_groups_that_do_not_fill_a_product(groups, group_size):
    torch.manual_seed(0)
    shape = (2, groups * group_size, 5, 3)
    x, dy = (torch.randn(shape).double().contiguous(memory_format=FORMATS[1]) for _ in range(2))
    vector = torch.randn(2, groups, group_size).double()
    a, s = torch.randn(2, 2, groups, group_size, group_size).double()
    centred = pixels64(x, group_size) - vector[..., None]
    expected = a @ centred + vector[..., None]
    torch.testing.assert_close(affine(x, vector, a, vector), expected.reshape(shape))
    product, total = cross_moments(dy, x, vector, diagonal=False)
    torch.testing.assert_close(product, pixels64(dy, group_size) @ centred.mT)
    torch.testing.assert_close(total, pixels64(dy, group_size).sum(dim=-1))
    expected = a.mT @ pixels64(dy, group_size) + s @ centred + vector[..., None]
    dx = input_gradient(dy, x, vector, a, s + s.mT - s.mT, vector)
    torch.testing.assert_close(dx, expected.reshape(shape))
