"""The whole layer by Triton kernels: against float64, how often it launches, and its check."""

import itertools
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.kernel_cases import DEVICE, DTYPES, WHITENING_SETS, make_options
from helpers.layer_cases import correlated, make_layer
from helpers.ranks import Counter, spawn
from torch.utils._python_dispatch import TorchDispatchMode

from sw_detectron.layers import STATISTICS, backend, set_backend, triton
from sw_detectron.layers.check import disagreement
from sw_detectron.layers.padding import image_sizes
from sw_detectron.layers.triton import plan
from sw_detectron.layers.triton.common import map_of, tl
from sw_detectron.layers.triton.common import triton as compiler


@pytest.fixture(autouse=True)
def _by_kernels():
    set_backend("triton")
    yield
    set_backend("auto")


# Relative to the largest value; float32's roundings, amplified by the inverse root. 16-bit outputs
# are rounded once, in the interpreter downwards.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

# (N, C, H, W, G): one sample, one pixel, odd sizes, groups of 8 to 64, several chunks.
SHAPES = [(1, 8, 1, 1, 8), (2, 16, 3, 5, 8), (1, 24, 7, 1, 12), (2, 16, 17, 19, 16)]
CASES = [
    *zip(WHITENING_SETS, itertools.cycle(SHAPES), itertools.cycle(DTYPES[:1])),
    *((("bw", "iw"), (1, c, 3, 5, c), torch.float32) for c in (9, 32, 33, 64)),
    *((STATISTICS, (2, 16, 5, 7, 8), dtype) for dtype in DTYPES[1:]),
    (("bw",), (5, 8, 20, 30, 8), torch.float32),
    (("bw", "iw"), (1, 32, 30, 40, 32), torch.float32),
]


@pytest.mark.parametrize(
    "statistics, shape, dtype",
    CASES,
    ids=lambda v: "+".join(v) if isinstance(v[0] if isinstance(v, tuple) else v, str) else str(v),
)
def test_layer_equals_float64(statistics, shape, dtype):
    *size, group_size = shape
    index = WHITENING_SETS.index(statistics)
    options = {"num_pergroup": group_size, "statistics": statistics}
    options |= {"tie_weight": index % 2 == 0, "affine": index % 5 != 0}
    memory_format = (torch.contiguous_format, torch.channels_last)[index % 2]
    tolerance = TOLERANCE[dtype]
    if size[0] * size[2] * size[3] == 1:
        # There is no variance but ε: the rounding of x - μ̂, 1e-7, is amplified by 1 / √ε = 316.
        tolerance = 1e-4
    for training in (True, False):
        exact = make_layer(size[1], **options).train(training)
        layer = make_layer(size[1], **options).float().to(DEVICE).train(training)
        x, dy = (correlated(*size, seed=seed).to(dtype) for seed in (1, 2))
        x64 = x.double().clone().requires_grad_()
        expected = exact(x64)
        expected.backward(dy.double())
        x = x.to(DEVICE).contiguous(memory_format=memory_format).requires_grad_()
        versions = [buffer._version for buffer in layer.buffers()]
        y = layer(x)
        y.backward(dy.to(DEVICE))
        assert y.dtype == dtype and y.is_contiguous(memory_format=memory_format)
        scale = max(p.grad.abs().max() for p in exact.parameters())
        values = [("y", y, expected), ("dx", x.grad, x64.grad)]
        values += [(name, b, a) for (name, a), b in zip(exact.named_buffers(), layer.buffers())]
        for name, actual, wanted in values:
            error = (actual.double().cpu() - wanted).abs().max()
            assert error <= tolerance * wanted.abs().max().clamp(min=1), (name, training)
        for (name, p), q in zip(exact.named_parameters(), layer.named_parameters()):
            error = (q[1].grad.double().cpu() - p.grad).abs().max()
            assert error <= tolerance * scale, (name, training)
        # A graph that has kept the running values from before must notice.
        moved = [buffer._version > v for buffer, v in zip(layer.buffers(), versions)]
        assert moved == [training and layer.uses_batch] * 2


def count_launches(layer, x, backward=True):
    names = []
    with triton.replaced_launches(lambda launch, _: names.append(launch.kernel.fn.__name__)):
        y = layer(x)
        if backward:
            y.backward(torch.zeros_like(y))
    return names


@pytest.mark.parametrize("shape", [(2, 32, 7, 7), (8, 32, 56, 56), (1, 32, 200, 304)], ids=str)
def test_launches(shape):
    x = torch.zeros(shape, device=DEVICE).requires_grad_()
    for statistics in WHITENING_SETS:
        layer = make_layer(32, statistics=statistics).float().to(DEVICE)
        training = count_launches(layer, x)
        assert len(training) == len(set(training)) == (7 if layer.uses_batch else 6)
        evaluation = count_launches(layer.eval(), x, backward=False)
        assert len(evaluation) == (2 if layer.uses_sample else 1)


def test_a_value_that_is_not_finite_leaves_the_running_values():
    layer = make_layer(16, num_pergroup=8).float().to(DEVICE)
    before = [buffer.clone() for buffer in layer.buffers()]
    x = correlated(2, 16, 5, 4, dtype=torch.float32).to(DEVICE)
    x[1, 3, 2, 2] = float("inf")
    layer(x)
    assert all(map(torch.equal, layer.buffers(), before))


def test_the_choice_holds_for_the_backward_pass():
    layer, x = make_layer(8, num_pergroup=8).float().to(DEVICE), torch.randn(2, 8, 3, 3)
    gradients = []
    for first, then in (("torch", "triton"), ("triton", "torch"), ("torch", "torch")):
        other = x.clone().to(DEVICE).requires_grad_()
        set_backend(first)
        y = layer(other)
        set_backend(then)
        y.sin().sum().backward()
        gradients.append(other.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-5)


def synchronized(rank, world_size):
    """Training and its gradients, of ranks with 2, 0 and 1 samples, by kernels and without."""
    results = []
    for name in ("torch", "triton"):
        set_backend(name)
        layer = make_layer(16, num_pergroup=8, statistics=("bw", "iw")).float()
        x = correlated((2, 0, 1)[rank], 16, 3, 5, seed=rank, dtype=torch.float32).requires_grad_()
        y = layer(x)
        y.sin().sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        for gradient in gradients:
            dist.all_reduce(gradient)
        results.append([y.detach(), x.grad, *gradients, *layer.buffers()])
    layer = make_layer(16, num_pergroup=8, statistics=("bw", "iw")).float()
    with Counter() as collectives:
        launches = count_launches(layer, x.detach().requires_grad_())
    return results, launches, [name for name, _ in collectives.calls]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="ranks without GPUs of their own")
def test_ranks_with_and_without_samples(tmp_path):
    results = spawn(synchronized, 3, tmp_path)
    (_, first), *_ = results[0]
    for (plain, kernels), launches, collectives in results:
        for expected, actual in zip(plain, kernels):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        for value, other in zip(kernels[-2:], first[-2:]):
            assert torch.equal(value, other)
        # One more than in one process, which puts the ranks' moments together.
        assert len(launches) == len(set(launches)) == (8 if len(kernels[0]) else 1)
        assert len(collectives) == 2


# ---------------------------------------------------------------------------------------------
# The check at the first use
# ---------------------------------------------------------------------------------------------


@compiler.jit
def wrong_newton_backward(normalized, identity, iterates, grad_p, T: tl.constexpr, SIZE):
    return grad_p


# Sizes of images, of which the largest is that of the map: within a chunk, over several and over
# more than one program puts together, images of one pixel and of none.
PADDED = [
    (("bw", "iw"), torch.channels_last, [(9, 7), (4, 7), (9, 3)]),
    (STATISTICS, torch.contiguous_format, [(33, 36), (40, 10)]),
    (("bw", "iw"), torch.channels_last, [(70, 61), (50, 70)]),
    (("iw", "ln"), torch.contiguous_format, [(6, 6), (1, 1)]),
    (("bw", "bn"), torch.channels_last, [(6, 6), (0, 3)]),
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("statistics, memory_format, sizes", PADDED)
def test_padding_is_left_out(statistics, memory_format, sizes, training):
    """As by plain PyTorch in float64, which other tests compare with images alone."""
    height, width = (max(sides) for sides in zip(*sizes))
    results = []
    for name, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        set_backend(name)
        layer = make_layer(16, num_pergroup=8, statistics=statistics, padding="ignored")
        layer = layer.to(DEVICE, dtype).train(training)
        x, dy = (correlated(len(sizes), 16, height, width, seed=seed) for seed in (1, 2))
        x = x.to(DEVICE, dtype).contiguous(memory_format=memory_format).requires_grad_()
        with image_sizes(sizes, (height, width)):
            y = layer(x)
        y.backward(dy.to(x))
        gradients = [p.grad for p in layer.parameters()]
        results.append([y.detach(), x.grad, *gradients, *layer.buffers()])
    for expected, actual in zip(*results):
        # Where an image has one pixel, 1 / √ε amplifies the rounding of x - μ̂.
        error = (actual.double() - expected).abs().max()
        assert error <= 2e-4 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("training", [True, False])
def test_padding_takes_no_launch_more(training):
    layer = make_layer(16, num_pergroup=8, padding="ignored").float().train(training)
    x = torch.zeros(2, 16, 6, 6, device=DEVICE)
    launches = []
    for sizes in (None, [(6, 6), (4, 6)]):
        with triton.replaced_launches(lambda launch, _: launches.append(launch.kernel)):
            with image_sizes(sizes, (6, 6)):
                y = layer.to(DEVICE)(x.clone().requires_grad_())
            y.backward(torch.zeros_like(y))
    half = len(launches) // 2
    assert half == (7 if training else 6)
    assert launches[:half] == launches[half:]


def test_a_compiled_kernel_gets_its_arguments_in_its_own_order(monkeypatch):
    monkeypatch.setattr(sys.modules[plan.Launch.__module__], "_direct", True)
    given = []
    compiled = SimpleNamespace(
        run=lambda *arguments: given.extend(arguments), function=None, packed_metadata=None
    )
    names = ["x_ptr", "length", "eps", "G", "BLOCK"]
    kernel = type("Kernel", (dict,), {"arg_names": names})()
    kernel[3,] = lambda *_, **__: compiled
    launch = plan.Launch(kernel, 3, 10, 0.5, num_warps=1, BLOCK=64, G=16)
    launch(None, "x")
    assert given == []  # compiled by Triton, which knows the names
    launch(None, "x")
    assert given[-5:] == ["x", 10, 0.5, 16, 64]


def test_a_program_puts_no_more_chunks_together_than_it_can():
    map = map_of(torch.zeros(1, 8, 70, 70), 8)
    with pytest.raises(ValueError, match="17 chunks are more"):
        plan.whiten(map, 17, 300, make_options(("iw",), 8))


def break_a_kernel(monkeypatch):
    module = sys.modules[plan.whiten_backward.__module__]
    monkeypatch.setattr(module, "newton_backward", wrong_newton_backward)


def break_triton(monkeypatch):
    def raises(*_):
        raise RuntimeError("ptxas was not found\nmore lines")

    monkeypatch.setattr(plan.Launch, "__call__", raises)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_good_kernels_pass_their_check(dtype):
    x = torch.zeros(1, 8, 1, 1, dtype=dtype, device=DEVICE)
    for padded in (False, True):
        assert disagreement(x, make_options(("bw", "ln"), 8), padded) is None


@pytest.mark.parametrize(
    "broken, words", [(break_a_kernel, "gradient of x differs"), (break_triton, "ptxas")]
)
def test_kernels_that_fail_their_check_are_not_used(monkeypatch, broken, words):
    monkeypatch.setattr(backend, "_objections", {})
    monkeypatch.setattr(backend, "_is_for_kernels", lambda x: True)
    monkeypatch.setattr(triton, "needs_no_check", lambda: False)
    monkeypatch.setattr(triton, "_plans", {})
    broken(monkeypatch)
    layer = make_layer(8, num_pergroup=8, statistics=("iw",)).float().to(DEVICE)
    x = correlated(2, 8, 3, 3, dtype=torch.float32).to(DEVICE)
    set_backend("torch")
    expected = layer(x)
    set_backend("auto")
    with pytest.warns(UserWarning, match=words):
        assert torch.equal(layer(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the second time it is known
        assert torch.equal(layer(x), expected)
    set_backend("triton")
    with pytest.raises(RuntimeError, match=words):
        layer(x)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_hundredth_and_what_is_no_number_fail_the_check(monkeypatch, factor):
    exact = triton.backward
    scaled = lambda *args: tuple(gradient * factor for gradient in exact(*args))  # noqa: E731
    monkeypatch.setattr(triton, "backward", scaled)
    x = torch.zeros(1, 8, 1, 1, device=DEVICE)
    for padded in (False, True):
        assert "gradient of x differs" in disagreement(x, make_options(("bw", "iw"), 8), padded)


def test_every_number_of_iterations_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(backend, "_objections", {})
    monkeypatch.setattr(triton, "needs_no_check", lambda: False)
    monkeypatch.setattr(
        backend, "disagreement", lambda x, options, _: checked.append(options.num_iterations)
    )
    x = correlated(2, 8, 3, 3, dtype=torch.float32).to(DEVICE)
    for iterations in (3, 5, 3):
        layer = make_layer(8, num_pergroup=8, num_iterations=iterations).float().to(DEVICE)
        layer(x)
    assert checked == [3, 5]


@pytest.mark.parametrize("statistics", [("bw",), ("bw", "iw"), ("iw", "ln")], ids="+".join)
def test_compiled_layer_computes_by_kernels(statistics):
    torch.compiler.reset()
    layers = [make_layer(8, num_pergroup=8, statistics=statistics).float().to(DEVICE) for _ in "ab"]
    compiled = torch.compile(layers[0], backend="aot_eager", dynamic=True, fullgraph=True)
    for n, training in ((2, True), (0, True), (3, False)):
        inputs = []
        for layer, function in zip(layers, (compiled, layers[1])):
            layer.train(training)
            x = correlated(n, 8, 3, 5, dtype=torch.float32).to(DEVICE).requires_grad_()
            y = function(x)
            y.sin().sum().backward()
            inputs.append((y, x.grad))
        assert all(map(torch.equal, *inputs))
    for values in zip(*(layer.buffers() for layer in layers)):
        assert torch.equal(*values)
    for values in zip(*(layer.parameters() for layer in layers)):
        assert torch.equal(*(p.grad for p in values))


class Waiting(TorchDispatchMode):
    """Collects the operations for which the host would wait for a GPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_to_copy", "item")

    def __init__(self):
        super().__init__()
        self.found, self.all = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.all.append(name)
        if name in self.NAMES:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["meta", DEVICE])
@pytest.mark.parametrize("statistics", [("bw", "iw"), STATISTICS, ("bn", "ln")], ids="+".join)
def test_nothing_waits_for_the_device(statistics, device):
    # On the meta device the operations of a GPU without kernels: there are no values to look at.
    if device == "meta":
        set_backend("torch")
    elif statistics == ("bn", "ln"):
        pytest.skip("no kernels for a set that does not whiten")
    layer = make_layer(16, num_pergroup=8, statistics=statistics).float().to(device)
    x = torch.randn(2, 16, 5, 4).to(device).requires_grad_()
    dy = torch.empty_like(x)
    with triton.replaced_launches(lambda *_: None), Waiting() as waiting:
        layer(x).backward(dy)
        layer.eval()(x).backward(dy)
    assert waiting.all and not waiting.found
