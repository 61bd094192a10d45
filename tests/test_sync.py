"""Statistics over ranks: several gloo processes against one computation on all samples."""

import copy
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from helpers import reference
from helpers.ranks import Counter, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sw_detectron.layers import STATISTICS, SwitchWhiten2d

CHANNELS, GROUP = 16, 8
SETS = [("bw", "iw"), STATISTICS, ("bn", "in", "ln"), ("bw",), ("iw", "ln")]
# What each rank gets: N, H, W. Ranks beyond the list start over. Every sample has more pixels than
# a group has channels: the reference's torch.linalg.eigh has no gradient for equal eigenvalues.
BATCHES = {
    "even": [(2, 4, 5)],
    "uneven N": [(1, 4, 5), (3, 4, 5), (2, 4, 5), (1, 4, 5)],
    "uneven size": [(2, 4, 5), (2, 7, 3), (1, 3, 4), (2, 6, 6)],
    "an empty rank": [(0, 4, 5), (2, 4, 3), (1, 3, 3), (2, 5, 2)],
    "all empty": [(0, 4, 5)],
}
CASES = list(itertools.product(BATCHES, SETS, ("newton", "eigh"), (torch.float64, torch.float32)))


def make_layer(statistics, whitening, dtype):
    torch.manual_seed(0)
    layer = SwitchWhiten2d(CHANNELS, GROUP, statistics, whitening).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        layer.running_mean.normal_()
    return layer


def make_batch(rank, shapes, dtype, seed=1):
    """x and dy of a rank, float64 numbers rounded to `dtype`."""
    n, h, w = shapes[rank % len(shapes)]
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x, dy = torch.randn(2, n, CHANNELS, h, w, generator=generator, dtype=torch.float64)
    return (x + rank).to(dtype), dy.to(dtype)


def all_cases(rank, world_size):
    """Outputs, gradients (of parameters summed over ranks) and buffers of every case."""
    results = []
    for batch, statistics, whitening, dtype in CASES:
        layer = make_layer(statistics, whitening, dtype)
        x, dy = make_batch(rank, BATCHES[batch], dtype)
        x.requires_grad_()
        y = layer(x)
        y.backward(dy)
        gradients = {}
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad
        results.append((y.detach(), x.grad, gradients, dict(layer.named_buffers())))
    return results


@pytest.fixture(
    scope="module",
    params=[2, 3, 4],
    ids=lambda n: f"{n} ranks",
)
def ranks(request, tmp_path_factory):
    """The results of all cases from every rank."""
    return spawn(all_cases, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: " ".join(map(str, CASES[i])))
def test_equals_one_process_with_all_samples(ranks, index):
    batch, statistics, whitening, dtype = CASES[index]
    # float32 against float64: a few hundred roundings of 6e-8, amplified by the inverse root.
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4}[dtype]
    layer = make_layer(statistics, whitening, dtype).double()
    inputs = [make_batch(rank, BATCHES[batch], dtype) for rank in range(len(ranks))]
    samples = [x.double().requires_grad_() for xs, _ in inputs for x in xs]
    gradients = [dy.double() for _, dys in inputs for dy in dys]
    results = [result[index] for result in ranks]
    before = dict(layer.named_buffers())

    def check(actual, expected):
        scale = expected.abs().max().clamp(min=1) if expected.numel() else 1
        torch.testing.assert_close(
            actual.double() / scale, expected / scale, rtol=0, atol=tolerance
        )

    expected_buffers = {k: v.clone() for k, v in before.items()}
    if samples:
        outputs, mean, cov = reference.switch_whiten(
            samples,
            *(layer.weight, layer.bias, layer.sw_mean_weight, layer.sw_var_weight),
            *(layer.statistics, GROUP, whitening),
        )
        sum((y * dy).sum() for y, dy in zip(outputs, gradients)).backward()
        check(
            torch.cat([y.flatten() for y, *_ in results]), torch.cat([y.flatten() for y in outputs])
        )
        check(
            torch.cat([dx.flatten() for _, dx, *_ in results]),
            torch.cat([x.grad.flatten() for x in samples]),
        )
        if "bw" in statistics or "bn" in statistics:
            expected_buffers["running_mean"].lerp_(mean[..., None].detach(), 0.1)
            if "bw" not in statistics:
                cov = torch.where(torch.eye(GROUP, dtype=torch.bool), cov, before["running_cov"])
            expected_buffers["running_cov"].lerp_(cov.detach(), 0.1)
    for _, _, parameters, buffers in results:
        for name, parameter in layer.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            check(parameters[name], expected)
        for name, value in buffers.items():
            check(value, expected_buffers[name])
            assert torch.equal(value, results[0][3][name]), "buffers differ between ranks"


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3),
        SwitchWhiten2d(CHANNELS, GROUP),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3),
        SwitchWhiten2d(CHANNELS, GROUP, STATISTICS),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 1, 1),
    ).double()


def sgd_batches(world_size):
    torch.manual_seed(4)
    return torch.randn(4, 2 * world_size, 3, 9, 8, dtype=torch.float64)


def train(net, batches):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x in batches:
        optimizer.zero_grad()
        (net(x) - x.mean(dim=(1, 2, 3), keepdim=True)).square().mean().backward()
        optimizer.step()
    return {k.removeprefix("module."): v for k, v in net.state_dict().items()}


class Checkpointed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


class WithUnusedPart(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)


def ddp(net, **options):
    return DistributedDataParallel(net, broadcast_buffers=False, **options)


def trainings(rank, world_size):
    batches = sgd_batches(world_size)[:, 2 * rank : 2 * rank + 2]
    results = {"plain": train(ddp(make_net()), batches)}
    results["unused"] = train(
        ddp(WithUnusedPart(make_net().double()), find_unused_parameters=True), batches
    )
    # One step: checkpointing computes the forward pass twice, and so updates the running values
    # twice, of BN too. Parameters are not concerned.
    results["checkpoint"] = train(ddp(Checkpointed(make_net())), batches)

    net = ddp(make_net())
    with net.no_sync():
        net(batches[0]).square().mean().backward()
    net(batches[1]).square().mean().backward()
    results["no_sync"] = {k: p.grad for k, p in net.module.named_parameters()}
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_one_process(world_size, tmp_path):
    results = spawn(trainings, world_size, tmp_path)
    batches = sgd_batches(world_size)
    expected = train(make_net(), batches)
    net = make_net()
    for x in batches[:2]:
        net(x).square().mean().backward()
    accumulated = {k: p.grad for k, p in net.named_parameters()}
    for result in results:
        for key, value in expected.items():
            torch.testing.assert_close(result["plain"][key], value, rtol=0, atol=1e-10)
            torch.testing.assert_close(result["unused"][f"net.{key}"], value, rtol=0, atol=1e-10)
            if "running" not in key:
                actual = result["checkpoint"][f"net.{key}"]
                torch.testing.assert_close(actual, value, rtol=0, atol=1e-10)
        for key, value in accumulated.items():
            torch.testing.assert_close(result["no_sync"][key], value, rtol=0, atol=1e-10)


def collectives(rank, world_size):
    """The collectives of the seven layers of ResNet-50, by image size; and those of other sets."""
    results = {}
    widths = (64, 64, 128, 128, 256, 256, 256)
    strides = (2, 4, 8, 8, 16, 16, 16)
    for size in (64, 128):
        with Counter() as counter:
            for width, stride in zip(widths, strides):
                x = torch.randn(2, width, size // stride, size // stride, requires_grad=True)
                SwitchWhiten2d(width)(x).sum().backward()
        results[size] = counter.calls
    x = torch.randn(2, 64, 4, 4, requires_grad=True)
    for name, layer in {
        "eval": SwitchWhiten2d(64).eval(),
        "frozen": SwitchWhiten2d(64).freeze(),
        "local": SwitchWhiten2d(64, sync=False),
        "per sample": SwitchWhiten2d(64, statistics=("iw", "in", "ln")),
        "all five": SwitchWhiten2d(64, statistics=STATISTICS),
        "diagonal": SwitchWhiten2d(64, statistics=("bn", "in", "ln")),
    }.items():
        with Counter() as counter:
            layer(x).sum().backward()
        results[name] = counter.calls
    return results


def test_collectives_are_one_each_way_and_of_fixed_size(tmp_path):
    for result in spawn(collectives, 2, tmp_path):
        assert result[64] == result[128]
        expected = []
        for width in (64, 64, 128, 128, 256, 256, 256):
            numbers = width + width * 16  # mean, and covariance in groups of 16
            expected += [("all_gather", 4 * (numbers + 1)), ("all_reduce", 4 * numbers)]
        assert result[64] == expected
        for name in ("eval", "frozen", "local", "per sample"):
            assert result[name] == [], name
        assert [name for name, _ in result["all five"]] == ["all_gather", "all_reduce"]
        assert result["diagonal"] == [("all_gather", 4 * 129), ("all_reduce", 4 * 128)]


def large_mean(rank, world_size):
    torch.manual_seed(0)
    x = torch.randn(4, CHANNELS, 40, 40, dtype=torch.float64)
    x = x * torch.linspace(0.5, 2, CHANNELS, dtype=torch.float64).view(1, -1, 1, 1) + 1e3
    layer = SwitchWhiten2d(CHANNELS, CHANNELS, momentum=1.0)
    layer((x[:1] if rank == 0 else x[1:]).float())
    cov = reference.covariance(x.transpose(0, 1).reshape(CHANNELS, -1))[1]
    return ((layer.running_cov[0] - cov).norm() / cov.norm()).item()


def test_a_large_mean_keeps_its_covariance(tmp_path):
    # float32 holds 1e3 plus noise to 6e-5.
    assert max(spawn(large_mean, 2, tmp_path)) < 1e-3


def subgroups(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = SwitchWhiten2d(CHANNELS, GROUP, process_group=groups[rank // 2]).double()
    alone = copy.copy(layer)
    assert alone.process_group is layer.process_group
    x, _ = make_batch(rank, BATCHES["uneven N"], torch.float64)
    y = layer(x)
    return y.detach(), layer.running_cov


def test_a_group_of_some_ranks(tmp_path):
    results = spawn(subgroups, 4, tmp_path)
    for pair in ((0, 1), (2, 3)):
        x = torch.cat([make_batch(rank, BATCHES["uneven N"], torch.float64)[0] for rank in pair])
        layer = SwitchWhiten2d(CHANNELS, GROUP).double()
        y = torch.cat([results[rank][0] for rank in pair])
        torch.testing.assert_close(y, layer(x).detach(), rtol=0, atol=1e-10)
        for rank in pair:
            torch.testing.assert_close(results[rank][1], layer.running_cov, rtol=0, atol=1e-10)


def test_a_single_rank_does_not_communicate(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    try:
        with Counter() as counter:
            SwitchWhiten2d(CHANNELS)(torch.randn(2, CHANNELS, 3, 3)).sum().backward()
        assert counter.calls == []
    finally:
        dist.destroy_process_group()
    assert os.environ.get("WORLD_SIZE") is None


def second_order(rank, world_size):
    """A gradient penalty, and first gradients with and without a graph of their own."""
    results = []
    for batch, statistics, whitening in SECOND_ORDER:
        for training in (True, False):
            layer = make_layer(statistics, whitening, torch.float64).train(training)
            x, dy = make_batch(rank, BATCHES[batch], torch.float64)
            x.requires_grad_()
            inputs = [x, *layer.parameters()]
            plain = torch.autograd.grad((layer(x) * dy).sum(), inputs)
            first = torch.autograd.grad((layer(x) * dy).sum(), inputs, create_graph=True)
            penalty = first[0].square().sum() + sum((g * g).sum() for g in first[1:])
            if penalty.requires_grad:
                second = torch.autograd.grad(penalty, inputs, materialize_grads=True)
            else:  # in evaluation nothing of a rank without samples depends on anything
                second = [torch.zeros_like(t) for t in inputs]
            results.append([[t.detach() for t in some] for some in (plain, first, second)])
    return results


SECOND_ORDER = [
    (batch, statistics, whitening)
    for batch, statistics, whitening in itertools.product(BATCHES, SETS[:3], ("newton", "eigh"))
    if batch in ("uneven N", "an empty rank") and (whitening == "newton" or statistics == SETS[0])
]


def test_second_order_gradients_of_ranks(tmp_path):
    results = spawn(second_order, 2, tmp_path)
    for index, (batch, statistics, whitening) in enumerate(
        case for case in SECOND_ORDER for _ in range(2)
    ):
        layer = make_layer(statistics, whitening, torch.float64).train(index % 2 == 0)
        inputs = [make_batch(rank, BATCHES[batch], torch.float64) for rank in range(2)]
        plain, first, _ = zip(*(result[index] for result in results))
        for rank in range(2):
            for a, b in zip(plain[rank], first[rank]):
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
        # The loss whose gradients a rank sees is the sum of all ranks' losses; its parameters are
        # its own, and each rank's penalty is of their gradients alone.
        x = [x.requires_grad_() for x, _ in inputs]
        copies = [make_layer(statistics, whitening, torch.float64) for _ in range(2)]
        outputs = by_copies(copies, layer.training, x)
        loss = sum((y * dy).sum() for y, (_, dy) in zip(outputs, inputs))
        of_rank = [[x[r], *copies[r].parameters()] for r in range(2)]
        gradients = [
            torch.autograd.grad(loss, some, create_graph=True, materialize_grads=True)
            for some in of_rank
        ]
        penalty = sum((g * g).sum() for some in gradients for g in some)
        for rank in range(2):
            expected = torch.autograd.grad(
                penalty, of_rank[rank], retain_graph=True, materialize_grads=True
            )
            for a, b in zip(results[rank][index][2], expected):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def by_copies(layers, training, xs):
    """The formulas for samples of ranks, each of which has parameters of its own."""
    running = None if training else (layers[0].running_mean[..., 0], layers[0].running_cov)
    samples = [sample for x in xs for sample in x]
    outputs, first = [], 0
    for layer, x in zip(layers, xs):
        y, _, _ = reference.switch_whiten(
            samples,
            *(layer.weight, layer.bias, layer.sw_mean_weight, layer.sw_var_weight),
            *(layer.statistics, GROUP, layer.whitening),
            running=running,
        )
        own = y[first : first + len(x)]
        outputs.append(torch.stack(own) if own else x.clone())
        first += len(x)
    return outputs


def compiled(rank, world_size):
    """Batches of 3 and of none, of one and then of the other rank."""
    results = []
    for statistics in (SETS[0], SETS[2]):
        torch.compiler.reset()
        eager, twin = (make_layer(statistics, "newton", torch.float64) for _ in range(2))
        function = torch.compile(twin, backend="aot_eager", dynamic=True)
        for turn in range(3):
            x = torch.randn(3 if (rank + turn) % 2 == 0 else 0, CHANNELS, 4, 5).double()
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            ya, yb = eager(a), function(b)
            ya.sin().sum().backward(), yb.sin().sum().backward()
            results += [(ya.detach(), yb.detach()), (a.grad, b.grad)]
        pairs = zip(eager.parameters(), twin.parameters())
        results += [(p.grad, q.grad) for p, q in pairs]
        results += list(zip(eager.buffers(), twin.buffers()))
    return results


@pytest.mark.slow
def test_compiled_layer_of_ranks_with_and_without_samples(tmp_path):
    for result in spawn(compiled, 2, tmp_path):
        for eager, other in result:
            torch.testing.assert_close(other, eager, rtol=1e-9, atol=1e-9)


def test_a_copy_of_a_layer_has_the_same_ranks(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    try:
        net = nn.Sequential(SwitchWhiten2d(CHANNELS, process_group=dist.new_group([0])))
        net.register_forward_hook(lambda *_: None)
        copied = copy.deepcopy(net)
        assert copied[0].process_group is net[0].process_group
        assert copied[0].weight is not net[0].weight
        x = torch.randn(2, CHANNELS, 3, 3)
        torch.testing.assert_close(copied(x), net(x))
    finally:
        dist.destroy_process_group()
