"""Statistics of the pixels of images alone, against layers that see nothing but these."""

import threading

import pytest
import torch
import torch.distributed as dist
from helpers import reference
from helpers.layer_cases import SUBSETS, correlated, make_layer
from helpers.ranks import spawn

from sw_detectron.layers import STATISTICS, SwitchWhiten2d, plain
from sw_detectron.layers.padding import Extent, ImageSizes, current_sizes, image_sizes

FORMATS = (torch.contiguous_format, torch.channels_last)
SIDE = 64  # of the padded images; a map has a fourth
SIZES = [(40, 64), (64, 33), (29, 18), (64, 64)]
SIDES = [(10, 16), (16, 9), (8, 5), (16, 16)]


def padded_call(layer, x, dy, sizes=SIZES):
    """y, and the gradients of x and of the parameters."""
    x = x.clone().requires_grad_()
    with image_sizes(sizes, (SIDE, SIDE)):
        y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


def cut(maps):
    return [image[:, :h, :w] for image, (h, w) in zip(maps, SIDES)]


def near(actual, expected, tolerance=1e-12):
    scale = expected.abs().max().clamp(min=1)
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "whitening, memory_format",
    [("newton", FORMATS[0]), ("newton", FORMATS[1]), ("eigh", FORMATS[0])],
    ids=["newton nchw", "newton nhwc", "eigh nchw"],
)
@pytest.mark.parametrize("statistics", SUBSETS, ids="+".join)
def test_images_are_whitened_as_without_padding(statistics, whitening, memory_format):
    layer = make_layer(12, num_pergroup=4, statistics=statistics, whitening=whitening)
    layer.padding = "ignored"
    running = layer.running_mean.clone(), layer.running_cov.clone()
    x, dy = correlated(4, 12, 16, 16), torch.zeros(4, 12, 16, 16, dtype=torch.float64)
    x = x.contiguous(memory_format=memory_format)
    for image in cut(dy):
        image.copy_(torch.randn(image.shape, dtype=torch.float64))
    y, dx, gradients = padded_call(layer, x, dy)

    samples = [image.clone().requires_grad_() for image in cut(x)]
    parameters = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    names = ("weight", "bias", "sw_mean_weight", "sw_var_weight")
    outputs, mean, cov = reference.switch_whiten(
        samples, *(parameters[name] for name in names), layer.statistics, 4, whitening
    )
    sum((a * b).sum() for a, b in zip(outputs, cut(dy))).backward()
    for actual, expected in zip(cut(y), outputs):
        near(actual, expected)
    for actual, sample in zip(cut(dx), samples):
        near(actual, sample.grad, 1e-10)
    for name, gradient in gradients.items():
        near(gradient, parameters[name].grad, 1e-10)
    if layer.uses_batch:
        near(layer.running_mean, running[0].lerp(mean[..., None], 0.1))
        if not layer.whitens:
            cov = torch.where(torch.eye(4, dtype=torch.bool), cov, running[1])
        near(layer.running_cov, running[1].lerp(cov, 0.1))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "statistics",
    [("bw",), ("iw",), ("bn",), ("in",), ("ln",), ("bn", "in", "ln"), STATISTICS],
    ids="+".join,
)
def test_gradients_where_the_padding_has_some_too(statistics, training):
    layer = make_layer(4, num_pergroup=2, statistics=statistics).train(training)
    layer.padding = "ignored"
    parameters = dict(layer.named_parameters())
    sizes = ImageSizes(((4, 12), (12, 8)), 12, 12)

    def function(x, *values):
        with image_sizes(sizes):
            return torch.func.functional_call(layer, dict(zip(parameters, values)), (x,))

    x = correlated(2, 4, 3, 3).requires_grad_()
    values = [p.detach().clone().requires_grad_() for p in parameters.values()]
    assert torch.autograd.gradcheck(function, (x, *values))


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
def test_gradients_of_gradients(whitening):
    layer = make_layer(4, num_pergroup=2, statistics=STATISTICS, whitening=whitening)
    layer.padding = "ignored"
    sizes = ImageSizes(((8, 12), (12, 8)), 12, 12)

    def function(x):
        with image_sizes(sizes):
            return layer(x)

    x = correlated(2, 4, 3, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(function, x)


def test_torch_func_sees_the_same():
    layer = make_layer(4, num_pergroup=2, statistics=STATISTICS, padding="ignored").eval()
    x, dy = (correlated(2, 4, 6, 6, seed=seed) for seed in (1, 2))
    sizes = [(40, 64), (64, 33)]
    y, dx, _ = padded_call(layer, x, dy, sizes)
    with image_sizes(sizes, (SIDE, SIDE)):
        traced, pull = torch.func.vjp(layer, x)
        near(traced, y)
        near(pull(dy)[0], dx)


@pytest.mark.parametrize("statistics", SUBSETS, ids="+".join)
def test_an_image_without_a_pixel_takes_no_part(statistics):
    """As where a map of a large stride has none of a narrow image."""
    layer = make_layer(4, num_pergroup=2, statistics=statistics, padding="ignored")
    other = make_layer(4, num_pergroup=2, statistics=statistics)
    x, dy = correlated(3, 4, 6, 6), torch.randn(3, 4, 6, 6, dtype=torch.float64)
    dy[1] = 0
    y, dx, gradients = padded_call(layer, x, dy, [(SIDE, SIDE), (0, 0), (SIDE, SIDE)])
    expected, dx_of_others, expected_gradients = padded_call(
        other, x[[0, 2]], dy[[0, 2]], [(SIDE, SIDE)] * 2
    )
    assert y.isfinite().all()
    assert torch.equal(dx[1], torch.zeros_like(dx[1]))
    near(y[[0, 2]], expected)
    near(dx[[0, 2]], dx_of_others)
    for name, gradient in gradients.items():
        near(gradient, expected_gradients[name])
    for name, value in layer.named_buffers():
        near(value, other.get_buffer(name))


def test_no_image_with_a_pixel_leaves_the_running_values():
    layer = make_layer(4, num_pergroup=2, statistics=STATISTICS, padding="ignored")
    before = {name: value.clone() for name, value in layer.named_buffers()}
    x = correlated(2, 4, 6, 6)
    y, dx, _ = padded_call(layer, x, torch.ones_like(x), [(0, 9), (9, 0)])
    assert y.isfinite().all()
    assert dx.isfinite().all()
    for name, value in layer.named_buffers():
        assert torch.equal(value, before[name])


def test_without_padding_nothing_is_different(monkeypatch):
    layer, other = (make_layer(12, num_pergroup=4) for _ in range(2))
    layer.padding = "ignored"
    x, dy = correlated(4, 12, 16, 16), torch.randn(4, 12, 16, 16, dtype=torch.float64)
    plainly = padded_call(other, x, dy)  # which counts all pixels
    monkeypatch.setattr(Extent, "pixels", None)  # nobody asks for them
    whole = padded_call(layer, x, dy, [(SIDE, SIDE)] * 4)
    for actual, expected in zip(whole[:2], plainly[:2]):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_near_float64(dtype):
    layer, exact = (make_layer(12, num_pergroup=4, padding="ignored") for _ in range(2))
    x, dy = (correlated(4, 12, 16, 16, seed=i, dtype=dtype) for i in range(2))
    y, dx, gradients = padded_call(layer.float(), x, dy)
    expected = padded_call(exact, x.double(), dy.double())
    # The roundings of the result, and of float32 sums amplified by the inverse root.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    assert y.dtype == dx.dtype == dtype
    near(y.double(), expected[0], tolerance)
    near(dx.double(), expected[1], tolerance)
    for name, gradient in gradients.items():
        near(gradient.double(), expected[2][name], 1e-4)


def test_the_moments_of_a_part_of_an_image():
    x = correlated(2, 8, 6, 6)
    mean, cov = plain.moments(x, 4, diagonal=False, extent=Extent(((6, 3), (2, 5))))
    for n, (h, w) in enumerate([(6, 3), (2, 5)]):
        pixels = x[n, 4:, :h, :w].reshape(4, -1)
        near(mean[n, 1], pixels.mean(dim=1))
        near(cov[n, 1], torch.cov(pixels, correction=0))


@pytest.mark.parametrize("side, expected", [(64, 40), (32, 20), (8, 5), (4, 3), (2, 2), (1, 1)])
def test_the_rows_of_a_map_are_rounded_up(side, expected):
    sizes = ImageSizes(((40, 64), (64, 64)), 64, 64)
    extent = sizes.extent(torch.empty(2, 1, side, side))
    found = None if extent is None else extent.sides
    assert found == (None if expected == side else ((expected, side), (side, side)))


def test_a_map_of_other_images_is_refused():
    layer = SwitchWhiten2d(16, padding="ignored")
    with image_sizes(SIZES, (SIDE, SIDE)), pytest.raises(ValueError, match="3 samples.*4 images"):
        layer(torch.randn(3, 16, 4, 4))
    with pytest.raises(ValueError, match="'zero'"):
        SwitchWhiten2d(16, padding="zero")


def test_sizes_are_those_of_the_thread_and_end_with_an_error():
    seen = []
    with image_sizes(SIZES, (SIDE, SIDE)):
        thread = threading.Thread(target=lambda: seen.append(current_sizes()))
        thread.start()
        thread.join()
        assert seen == [None]
        assert current_sizes().sizes == tuple(SIZES)
        with pytest.raises(ValueError, match="images"), image_sizes(SIZES[:1], (SIDE, SIDE)):
            SwitchWhiten2d(16, padding="ignored")(torch.randn(2, 16, 4, 4))
        assert current_sizes().sizes == tuple(SIZES)
    assert current_sizes() is None


def on_ranks(rank, world_size):
    """Of two ranks: three images and one, of different padding."""
    layer = make_layer(12, num_pergroup=4, statistics=STATISTICS, padding="ignored")
    some = slice(0, 3) if rank == 0 else slice(3, 4)
    x, dy = inputs()
    y, dx, gradients = padded_call(layer, x[some], dy[some], SIZES[some])
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return y, dx, gradients, dict(layer.named_buffers())


def inputs():
    return (correlated(4, 12, 16, 16, seed=seed) for seed in (1, 2))


def test_ranks_with_different_padding_equal_one_process(tmp_path):
    layer = make_layer(12, num_pergroup=4, statistics=STATISTICS, padding="ignored")
    x, dy = inputs()
    y, dx, gradients = padded_call(layer, x, dy)
    results = spawn(on_ranks, 2, tmp_path)
    near(torch.cat([result[0] for result in results]), y)
    near(torch.cat([result[1] for result in results]), dx)
    for _, _, of_rank, buffers in results:
        for name, gradient in gradients.items():
            near(of_rank[name], gradient)
        for name, value in layer.named_buffers():
            near(buffers[name], value)
