"""Who looks into the computation gets plain operations, without asking: same numbers."""

import pytest
import torch
from helpers.layer_cases import SUBSETS, correlated, make_layer
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from sw_detectron.layers import STATISTICS, SwitchWhiten2d

SETS = [("bw", "iw"), STATISTICS, ("bn", "in", "ln")]


@pytest.fixture(params=["train", "eval"])
def training(request):
    return request.param == "train"


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_gradients_of_gradients(statistics, whitening, training):
    layer = make_layer(6, num_pergroup=3, statistics=statistics, whitening=whitening)
    layer.train(training)
    buffers = {k: v.clone() for k, v in layer.named_buffers()}
    parameters = {k: v.detach().clone().requires_grad_() for k, v in layer.named_parameters()}

    def function(x, *values):
        state = dict(zip(parameters, values)) | {k: v.clone() for k, v in buffers.items()}
        return functional_call(layer, state, (x,))

    x = correlated(2, 6, 2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(function, (x, *parameters.values()))


REUSES = {
    "twice in a chain": lambda layer, x: layer(layer(x).tanh()),
    "twice in a sum": lambda layer, x: layer(x) + layer(x * x),
    "an input made of a parameter": lambda layer, x: layer(x * layer.weight.view(1, -1, 1, 1)),
    "a gradient in the input": lambda layer, x: layer(
        torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)[0]
    ),
}


@pytest.mark.parametrize("reuse", REUSES)
@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_gradients_that_can_be_differentiated_equal_those_that_cannot(
    statistics, whitening, reuse, training
):
    layer = make_layer(6, num_pergroup=3, statistics=statistics, whitening=whitening)
    layer.train(training)
    x = correlated(2, 6, 3, 4).requires_grad_()
    weights = correlated(2, 6, 3, 4, seed=1)

    def gradients(create_graph):
        loss = (REUSES[reuse](layer, x) * weights).sum()
        return torch.autograd.grad(loss, [x, *layer.parameters()], create_graph=create_graph)

    (dx, *first), (other_dx, *second) = gradients(False), gradients(True)
    # The importance weights' gradients are differences of terms as large as the others'.
    scales = [dx.abs().max()] + [max(g.abs().max() for g in first)] * len(first)
    for scale, a, b in zip(scales, (dx, *first), (other_dx, *second)):
        torch.testing.assert_close(b / scale, a / scale, rtol=0, atol=1e-12)


def test_gradients_of_gradients_under_autocast_are_those_without(training):
    layer = make_layer(16, num_pergroup=8, dtype=torch.float32).train(training)
    x = correlated(2, 16, 5, 4, dtype=torch.float32).requires_grad_()
    gradients = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (dx,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
        inputs = [x, layer.weight, layer.sw_mean_weight]
        gradients.append([dx, *torch.autograd.grad(dx.square().sum(), inputs)])
    assert all(map(torch.equal, *gradients))


def test_gradients_of_gradients_of_a_reused_layer(training):
    layer = make_layer(4, num_pergroup=2).train(training)
    buffers = {k: v.clone() for k, v in layer.named_buffers()}
    parameters = {k: v.detach().clone().requires_grad_() for k, v in layer.named_parameters()}

    def function(x, *values):
        state = dict(zip(parameters, values))
        call = lambda x: functional_call(  # noqa: E731
            layer, state | {k: v.clone() for k, v in buffers.items()}, (x,)
        )
        return call(call(x).tanh())

    x = correlated(2, 4, 2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(function, (x, *parameters.values()))


def test_a_second_gradient_does_not_update_the_running_values_again():
    layer = make_layer(16, num_pergroup=8)
    x = correlated(2, 16, 4, 4).requires_grad_()
    y = layer(x)
    after_forward = layer.running_cov.clone()
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert torch.equal(layer.running_cov, after_forward)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SUBSETS[::4], ids="+".join)
def test_torch_func_grad(statistics, whitening, training):
    layer = make_layer(16, num_pergroup=8, statistics=statistics, whitening=whitening)
    layer.train(training)
    x = correlated(2, 16, 4, 4)
    state = {k: v.detach().clone() for k, v in layer.state_dict().items()}
    loss = lambda state, x: functional_call(layer, state, (x,)).sin().sum()  # noqa: E731
    parameters = {k: v for k, v in state.items() if not k.startswith("running")}
    buffers = {k: v.clone() for k, v in state.items() if k.startswith("running")}
    by_func = grad(lambda p: loss(p | {k: v.clone() for k, v in buffers.items()}, x))(parameters)
    layer(x).sin().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(by_func[name], parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_torch_func_updates_the_running_values_in_training(statistics):
    layer = make_layer(16, num_pergroup=8, statistics=statistics)
    x = correlated(2, 16, 4, 4)
    before = {k: v.clone() for k, v in layer.named_buffers()}
    parameters = {k: v.detach().clone() for k, v in layer.named_parameters()}

    def loss(parameters):
        buffers = {k: v.clone() for k, v in before.items()}
        return functional_call(layer, parameters | buffers, (x,)).sum(), buffers

    _, after = grad(loss, has_aux=True)(parameters)
    layer(x)
    for name, buffer in layer.named_buffers():
        assert not torch.equal(buffer, before[name])
        torch.testing.assert_close(after[name], buffer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
def test_torch_func_vmap_and_jvp_in_evaluation(whitening):
    layer = make_layer(16, num_pergroup=8, whitening=whitening).eval()
    x = correlated(3, 16, 4, 4)
    per_sample = vmap(lambda sample: layer(sample[None])[0])(x)
    torch.testing.assert_close(per_sample, layer(x), rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(x)
    _, forward_mode = jvp(layer, (x,), (direction,))
    step = 1e-6
    difference = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    torch.testing.assert_close(forward_mode, difference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_traced_layer_equals_the_layer_on_other_batches(statistics, whitening):
    layer = make_layer(16, num_pergroup=8, statistics=statistics, whitening=whitening).eval()
    traced = torch.jit.trace(layer, correlated(2, 16, 5, 4))
    assert "PythonOp" not in str(traced.inlined_graph)
    for shape in ((1, 16, 5, 4), (3, 16, 7, 9)):
        x = correlated(*shape, seed=5)
        torch.testing.assert_close(traced(x), layer(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_exported_layer_equals_the_layer(statistics):
    layer = make_layer(16, num_pergroup=8, statistics=statistics).eval()
    batch, height = torch.export.Dim("batch"), torch.export.Dim("height")
    exported = torch.export.export(
        layer, (correlated(2, 16, 5, 4),), dynamic_shapes={"x": {0: batch, 2: height}}
    )
    x = correlated(3, 16, 9, 4, seed=5)
    torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_compiled_layer_has_no_graph_break_and_equals_the_layer(statistics, whitening, training):
    torch.compiler.reset()
    options = {"num_pergroup": 8, "statistics": statistics, "whitening": whitening}
    eager, twin = (make_layer(16, **options).train(training) for _ in range(2))
    # aot_eager: Dynamo and AOTAutograd, but no code generation, which wants a C++ compiler.
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):
        a, b = (correlated(2, 16, 5, 4, seed=seed).requires_grad_() for _ in range(2))
        ya, yb = eager(a), compiled(b)
        torch.testing.assert_close(yb, ya, rtol=1e-10, atol=1e-10)
        ya.sin().sum().backward(), yb.sin().sum().backward()
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-9)
    for (name, p), q in zip(eager.named_parameters(), twin.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9, msg=name)
    for p, q in zip(eager.buffers(), twin.buffers()):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_compiled_layer_with_batches_of_any_size(statistics, whitening):
    torch.compiler.reset()
    options = {"num_pergroup": 8, "statistics": statistics, "whitening": whitening}
    eager, twin = (make_layer(16, **options) for _ in range(2))
    compiled = torch.compile(twin, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in (4, 0, 3):
        a, b = (correlated(n, 16, 5, 4).requires_grad_() for _ in range(2))
        ya, yb = eager(a), compiled(b)
        torch.testing.assert_close(yb, ya, rtol=1e-10, atol=1e-10)
        ya.sin().sum().backward(), yb.sin().sum().backward()
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-9)
    for (name, p), q in zip(eager.named_parameters(), twin.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9, msg=name)
    for p, q in zip(eager.buffers(), twin.buffers()):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12)


def saved_bytes(function):
    """Bytes of the distinct storages that autograd keeps while `function` runs."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return storages


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_only_x_and_small_tensors_are_kept(statistics, memory_format):
    layer = SwitchWhiten2d(64, statistics=statistics)
    x = torch.randn(4, 64, 56, 56).contiguous(memory_format=memory_format).requires_grad_()
    kept = saved_bytes(lambda: layer(x))
    x_bytes = x.untyped_storage().nbytes()
    assert kept.pop(x.untyped_storage().data_ptr()) == x_bytes  # x itself, not a copy
    assert sum(kept.values()) < 0.05 * x_bytes


@pytest.mark.parametrize("statistics", SETS, ids="+".join)
def test_compiled_layer_keeps_no_more(statistics):
    torch.compiler.reset()
    layer = torch.compile(
        SwitchWhiten2d(64, statistics=statistics), backend="aot_eager", fullgraph=True
    )
    x = torch.randn(4, 64, 56, 56).requires_grad_()
    kept = saved_bytes(lambda: layer(x))
    assert sum(kept.values()) < 1.05 * x.untyped_storage().nbytes()


def test_memory_counter_sees_copies():
    x = torch.randn(8, requires_grad=True)
    assert sum(saved_bytes(lambda: nn.functional.silu(x * 2)).values()) == 2 * 8 * 4 - 32
