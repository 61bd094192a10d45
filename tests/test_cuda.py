"""The layer on a GPU, in every dtype and memory format, against float64 on the CPU."""

import pytest
import torch
from helpers.layer_cases import GOLDEN, SUBSETS, correlated, load_golden, make_layer

from sw_detectron.layers import STATISTICS, set_backend

if not torch.cuda.is_available():
    pytest.skip("the layer on a GPU needs a GPU", allow_module_level=True)

# Relative to the largest value: float32's roundings, some hundreds of them, amplified by the
# inverse root; bfloat16 and float16 outputs are rounded once, but their dx is a sum of terms that
# were computed from rounded x and dy, which the reference has too.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


@pytest.fixture(params=["triton", "torch"])
def path(request):
    set_backend(request.param)
    yield
    set_backend("auto")


def close(actual, expected, tolerance, name):
    scale = expected.abs().max().clamp(min=1)
    torch.testing.assert_close(
        actual.double().cpu() / scale,
        expected / scale,
        rtol=0,
        atol=tolerance,
        msg=lambda m: f"{name}: {m}",
    )


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize(
    "statistics",
    [("bw", "iw"), ("bw",), ("iw", "bn", "ln"), STATISTICS, ("bn", "in", "ln")],
    ids="+".join,
)
def test_layer_equals_float64(statistics, whitening, dtype, memory_format):
    options = {"statistics": statistics, "whitening": whitening}
    for training in (True, False):
        exact = make_layer(48, **options).train(training)
        layer = make_layer(48, **options).cuda().train(training)
        if dtype != torch.float64:
            layer.float()
        x, dy = (correlated(3, 48, 17, 13, seed=s).to(dtype) for s in (1, 2))
        x64 = x.double().clone().requires_grad_()
        expected = exact(x64)
        expected.backward(dy.double())
        x = x.cuda().contiguous(memory_format=memory_format).requires_grad_()
        y = layer(x)
        y.backward(dy.cuda())
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=memory_format)
        tolerance = TOLERANCE[dtype]
        close(y, expected, tolerance, "y")
        close(x.grad, x64.grad, tolerance, "dx")
        for (name, p), q in zip(exact.named_parameters(), layer.parameters()):
            close(q.grad, p.grad, min(tolerance, 1e-3), name)
        for (name, p), q in zip(exact.named_buffers(), layer.buffers()):
            close(q, p, min(tolerance, 1e-5), name)


@pytest.mark.usefixtures("path")
@pytest.mark.skipif(not GOLDEN, reason="the golden vectors of ../shared are not here")
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda p: p.stem)
def test_golden_vectors(golden):
    data, layer = load_golden(golden, torch.float32)
    layer.cuda()
    x = torch.from_numpy(data["x"]).float().cuda().requires_grad_()
    y = layer(x)
    y.backward(torch.from_numpy(data["dy"]).float().cuda())
    for value, name in [(y, "y"), (x.grad, "dx"), (layer.running_cov, "running_cov_after")] + [
        (p.grad, f"d{name}") for name, p in layer.named_parameters()
    ]:
        close(value, torch.from_numpy(data[name]), TOLERANCE[torch.float32], name)


@pytest.mark.parametrize("statistics", SUBSETS, ids="+".join)
def test_iteration_is_float32_whatever_the_tf32_setting(statistics, monkeypatch):
    layer = make_layer(32, statistics=statistics).float().cuda()
    x = correlated(2, 32, 20, 20, dtype=torch.float32).cuda()
    strict = layer(x)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert torch.equal(layer(x), strict)


def test_compiled_layer_equals_the_layer():
    torch.compiler.reset()
    eager, twin = (make_layer(32).float().cuda() for _ in range(2))
    x = correlated(2, 32, 20, 20, dtype=torch.float32).cuda()
    torch.testing.assert_close(
        torch.compile(twin, fullgraph=True)(x), eager(x), rtol=2e-4, atol=2e-4
    )


def test_autocast_and_empty_input():
    layer = make_layer(32).float().cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        x = correlated(2, 32, 9, 9, dtype=torch.float32).cuda()
        assert layer(x).dtype == torch.float32
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    before = layer.running_cov.clone()
    x = torch.zeros(0, 32, 3, 3, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer.running_cov, before)
    assert layer.weight.grad.eq(0).all()
