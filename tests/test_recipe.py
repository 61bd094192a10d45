"""The training recipe: parameter groups, the early stop of importance weights, scaling, results."""

import copy
import functools
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.engine import SimpleTrainer, hooks
from detectron2.modeling import ResNet
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem
from detectron2.solver import build_lr_scheduler
from detectron2.solver import build_optimizer as detectron2_build_optimizer
from detectron2.solver.build import _generate_optimizer_class_with_gradient_clipping
from detectron2.utils.events import JSONWriter, TensorboardXWriter
from helpers.ranks import spawn
from helpers.runs import SHAPES, TINY, TRAIN_NET, refuse, run, same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sw_detectron import SwitchWhiten2d, UserError, add_sw_config
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.engine import Trainer, argument_parser, train_or_evaluate
from sw_detectron.engine.hooks import ImportanceWriter, StopImportance
from sw_detectron.engine.optimizer import build_optimizer, get_sw_optimizer_params
from sw_detectron.report.tables import write_results


def config(**solver):
    cfg = get_cfg()
    add_sw_config(cfg)
    for key, value in solver.items():
        cfg.merge_from_list([f"SOLVER.{key}", value])
    return cfg


class Net(nn.Module):
    """A small ResNet with a linear layer, and a loss as Detectron2's trainers want it."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        block = functools.partial(ResNet.make_stage, BasicBlock, norm=norm)
        stages = [
            block(1, stride_per_block=[1], in_channels=16, out_channels=16),
            block(1, stride_per_block=[2], in_channels=16, out_channels=32),
        ]
        self.resnet = ResNet(BasicStem(3, 16, norm), stages, num_classes=4)

    def forward(self, x):
        return {"loss": self.resnet(x)["linear"].sin().square().mean()}


def is_importance(name):
    return name.endswith(("sw_mean_weight", "sw_var_weight"))


def importance_of(model):
    return {k: v.detach().clone() for k, v in model.named_parameters() if is_importance(k)}


# ---- parameter groups


def options(optimizer, model):
    """The options of each parameter's group, by the parameter's name."""
    groups = {
        id(p): {k: v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
        for p in group["params"]
    }
    named = dict(model.named_parameters())
    assert len(groups) == sum(len(g["params"]) for g in optimizer.param_groups)  # each once
    return {name: groups[id(p)] for name, p in named.items() if id(p) in groups}


def test_parameter_groups_by_hand():
    model = nn.Sequential(nn.Conv2d(3, 16, 1), SwitchWhiten2d(16), SwitchWhiten2d(16).freeze())
    cfg = config(
        BASE_LR=0.5,
        WEIGHT_DECAY=0.01,
        WEIGHT_DECAY_NORM=0.02,
        WEIGHT_DECAY_BIAS=0.03,
        BIAS_LR_FACTOR=2.0,
        WEIGHT_DECAY_IMPORTANCE=0.04,
        IMPORTANCE_LR_FACTOR=0.1,
    )
    actual = options(build_optimizer(cfg, model), model)
    assert {k: (v["lr"], v["weight_decay"]) for k, v in actual.items()} == {
        "0.weight": (0.5, 0.01),
        "0.bias": (1.0, 0.03),
        "1.weight": (0.5, 0.02),
        "1.bias": (1.0, 0.03),
        "1.sw_mean_weight": (0.05, 0.04),
        "1.sw_var_weight": (0.05, 0.04),
    }


@pytest.mark.parametrize("norm", ["SW", "SN", "IW"])
@pytest.mark.parametrize("decay_norm", [0.0, 0.3, None])
@pytest.mark.parametrize("decay_bias", [None, 0.0, 0.4])
@pytest.mark.parametrize("bias_factor", [1.0, 2.0])
def test_parameter_groups_are_those_of_batch_norm(norm, decay_norm, decay_bias, bias_factor):
    solver = {"WEIGHT_DECAY_BIAS": decay_bias, "BIAS_LR_FACTOR": bias_factor}
    cfg = config(NESTEROV=True, **solver)
    cfg.SOLVER.WEIGHT_DECAY_NORM = decay_norm
    bn, sw = Net("BN"), Net(norm)
    optimizer_bn, optimizer_sw = detectron2_build_optimizer(cfg, bn), build_optimizer(cfg, sw)
    assert type(optimizer_sw) is type(optimizer_bn)
    assert optimizer_sw.defaults == optimizer_bn.defaults
    assert len(optimizer_sw.param_groups) == len(optimizer_bn.param_groups)
    expected, actual = options(optimizer_bn, bn), options(optimizer_sw, sw)
    assert {k: v for k, v in actual.items() if not is_importance(k)} == expected
    # By default the importance weights learn as the convolutions do.
    importance = [v for k, v in actual.items() if is_importance(k)]
    assert len(importance) == 2 * 6
    assert all(v == expected["resnet.stem.conv1.weight"] for v in importance)


def test_a_layer_in_two_places_is_in_one_group():
    layer = SwitchWhiten2d(16, tie_weight=True, affine=False)
    groups = get_sw_optimizer_params(nn.Sequential(layer, nn.ReLU(), layer), weight_decay_norm=0.0)
    assert groups == [{"params": [layer.sw_mean_weight]}]


def test_groups_without_a_rate_leave_it_to_the_optimizer():
    layer = SwitchWhiten2d(16)
    groups = get_sw_optimizer_params(layer, weight_decay_norm=0.0, weight_decay_importance=0.1)
    assert groups == [
        {"params": [layer.weight, layer.bias], "weight_decay": 0.0},
        {"params": [layer.sw_mean_weight, layer.sw_var_weight], "weight_decay": 0.1},
    ]
    with pytest.raises(ValueError, match="importance_lr_factor requires base_lr"):
        get_sw_optimizer_params(layer, importance_lr_factor=0.1)


def test_a_decay_that_yaml_reads_as_text_is_refused():
    with pytest.raises(UserError, match=r"WEIGHT_DECAY_IMPORTANCE '1e-4'.* 1\.0e-4"):
        build_optimizer(config(WEIGHT_DECAY_IMPORTANCE="'1e-4'"), Net("SW"))


# ---- the early stop of the importance weights

ITERATIONS, STOP = 6, 3
# The rate changes in every iteration but one; decay and momentum would move a stopped weight.
SCHEDULE = {
    "MAX_ITER": ITERATIONS,
    "STEPS": (4,),
    "WARMUP_ITERS": 3,
    "BASE_LR": 0.1,
    "WEIGHT_DECAY": 0.1,
}


class Snapshots(hooks.HookBase):
    def __init__(self, model):
        self.model, self.after = model, []

    def after_step(self):
        self.after.append(importance_of(self.model))


def batches():
    """The same sequence in every call; float64, so that no rounding hides an update."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ITERATIONS, 4, 3, 32, 32, generator=generator, dtype=torch.float64)


def make_trainer(cfg, data, stop=STOP, distributed=False, optimizer=None):
    model = Net("SW").double()
    optimizer = optimizer(cfg, model) if optimizer else build_optimizer(cfg, model)
    wrapped = DistributedDataParallel(model) if distributed else model
    trainer = SimpleTrainer(wrapped, data, optimizer)
    snapshots = Snapshots(model)
    schedule = hooks.LRScheduler(scheduler=build_lr_scheduler(cfg, optimizer))
    trainer.register_hooks([StopImportance(wrapped, stop), schedule, snapshots])
    return trainer, model, snapshots


def check_stop(snapshots):
    """Every importance weight moved in every iteration before the stop, and in none after it."""
    start = importance_of(Net("SW").double())
    for before, after in itertools.pairwise([start, *snapshots[:STOP]]):
        assert all(not torch.equal(after[k], before[k]) for k in before)
    for after in snapshots[STOP:]:
        assert all(torch.equal(after[k], snapshots[STOP - 1][k]) for k in after)


def full_model_clipping(cfg, model):
    """As projects on Detectron2 build it: one norm over the gradients of all parameters."""
    optimizer = build_optimizer(cfg, model)
    optimizer.__class__ = _generate_optimizer_class_with_gradient_clipping(
        torch.optim.SGD, global_clipper=lambda p: nn.utils.clip_grad_norm_(p, 0.01)
    )
    return optimizer


@pytest.mark.parametrize("clipping", ["none", "each parameter", "full model"])
def test_stop_equals_an_optimizer_that_is_not_stepped_any_more(clipping):
    solver = {"CLIP_TYPE": "norm", "CLIP_VALUE": 0.01, "ENABLED": clipping == "each parameter"}
    cfg = config(**SCHEDULE, **{f"CLIP_GRADIENTS.{k}": v for k, v in solver.items()})
    make = full_model_clipping if clipping == "full model" else None
    trainer, model, snapshots = make_trainer(cfg, batches(), optimizer=make)
    trainer.train(0, ITERATIONS)
    check_stop(snapshots.after)

    twin = Net("SW").double()
    named = dict(twin.named_parameters())
    names = {True: [k for k in named if is_importance(k)]}
    names[False] = [k for k in named if k not in names[True]]
    decay = {k: 0.0 if ".norm." in k and not is_importance(k) else 0.1 for k in named}
    # Warm-up from a thousandth over 3 iterations; a tenth from iteration 4 on.
    rates = [0.1 * (1e-3 * (1 - i / 3) + i / 3) for i in range(3)] + [0.1, 0.01, 0.01]
    optimizers = {
        key: torch.optim.SGD([{"params": [named[k]], "weight_decay": decay[k]} for k in names[key]],
                             lr=1.0, momentum=0.9)
        for key in (True, False)
    }  # fmt: skip
    for i, (x, rate) in enumerate(zip(batches(), rates)):
        learning = [False, True] if i < STOP else [False]
        twin.zero_grad()
        twin(x)["loss"].backward()
        parameters = [named[k] for key in learning for k in names[key]]
        if clipping == "full model":
            nn.utils.clip_grad_norm_(parameters, 0.01)
        elif clipping == "each parameter":
            for parameter in parameters:
                nn.utils.clip_grad_norm_(parameter, 0.01)
        for key in learning:
            for group in optimizers[key].param_groups:
                group["lr"] = rate
            optimizers[key].step()
    for name, parameter in model.named_parameters():
        # float64, another order of summation, through six steps
        torch.testing.assert_close(parameter, named[name], rtol=1e-9, atol=1e-11, msg=name)


def test_runs_resumed_around_the_stop_equal_an_uninterrupted_one(tmp_path):
    cfg = config(**SCHEDULE)
    whole, model, snapshots = make_trainer(cfg, batches())
    whole_checkpointer = Checkpointer(model, str(tmp_path), trainer=whole)
    whole.register_hooks([hooks.PeriodicCheckpointer(whole_checkpointer, 1)])
    whole.train(0, ITERATIONS)
    check_stop(snapshots.after)
    for done in (STOP - 1, STOP, STOP + 1):
        trainer, resumed, _ = make_trainer(cfg, batches()[done:])
        checkpointer = Checkpointer(resumed, str(tmp_path), trainer=trainer)
        checkpointer.load(str(tmp_path / f"model_{done - 1:07d}.pth"))
        assert trainer.iter == done - 1
        trainer.train(done, ITERATIONS)
        same(resumed.state_dict(), model.state_dict())
        same(trainer.state_dict(), whole.state_dict())


def train_rank(rank, world_size):
    data = batches().unflatten(1, (world_size, -1))[:, rank]
    trainer, model, snapshots = make_trainer(config(**SCHEDULE), data, distributed=True)
    trainer.train(0, ITERATIONS)
    return snapshots.after, model.state_dict()


@pytest.mark.slow
def test_stop_under_distributed_data_parallel(tmp_path):
    (snapshots, first), (_, second) = spawn(train_rank, 2, tmp_path)
    check_stop(snapshots)
    same(dict(first), dict(second))
    trainer, model, _ = make_trainer(config(**SCHEDULE), batches())
    trainer.train(0, ITERATIONS)
    for name, value in model.state_dict().items():
        # float64, statistics and gradients summed in another order, through six steps
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_stop_with_a_gradient_scaler():
    """What mixed precision does around a step; the scaler itself also runs on CPUs."""
    model = Net("SW")
    optimizer = build_optimizer(config(**SCHEDULE), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    stop = StopImportance(model, 0)
    stop.trainer = SimpleNamespace(iter=0)
    for x in batches().float():
        optimizer.zero_grad()
        scaler.scale(model(x)["loss"]).backward()
        stop.after_backward()
        scaler.step(optimizer)
        scaler.update()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, start[name]) == is_importance(name), name


# ---- what else a recipe consists of


def test_linear_scaling_by_the_reference_world_size():
    cfg = config(
        REFERENCE_WORLD_SIZE=2,
        IMS_PER_BATCH=16,
        BASE_LR=0.02,
        MAX_ITER=100,
        STEPS=(60, 80),
        IMPORTANCE_STOP_ITER=30,
    )
    cfg.freeze()
    keys = ("IMS_PER_BATCH", "BASE_LR", "MAX_ITER", "STEPS", "IMPORTANCE_STOP_ITER")
    expected = {
        1: (8, 0.01, 200, (120, 160), 60),
        2: (16, 0.02, 100, (60, 80), 30),
        4: (32, 0.04, 50, (30, 40), 15),
        100: (800, 1.0, 2, (1, 2), 1),  # not 0, which would be never
    }
    for num_workers, values in expected.items():
        scaled = Trainer.auto_scale_workers(cfg, num_workers)
        assert tuple(scaled.SOLVER[key] for key in keys) == values
        assert scaled.is_frozen()
    assert cfg.SOLVER.IMPORTANCE_STOP_ITER == 30
    never = config(REFERENCE_WORLD_SIZE=2, IMPORTANCE_STOP_ITER=0)
    assert Trainer.auto_scale_workers(never, 4).SOLVER.IMPORTANCE_STOP_ITER == 0
    with pytest.raises(UserError, match=r"IMS_PER_BATCH 16 .*REFERENCE_WORLD_SIZE 3"):
        Trainer.auto_scale_workers(config(REFERENCE_WORLD_SIZE=3), 1)


def test_mixed_precision_without_gpu_is_one_clear_line(capsys, tmp_path):
    overrides = ["SOLVER.AMP.ENABLED", "True", "MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path)]
    message = refuse(capsys, "--config", SHAPES, *overrides)
    assert "SOLVER.AMP.ENABLED" in message and "'cpu'" in message


def test_training_under_autocast_on_the_cpu_follows_plain_training():
    """Detectron2's own mixed precision needs CUDA; PyTorch's autocast does not."""
    losses = {}
    for autocast in (False, True):
        model = Net("SW")
        optimizer = build_optimizer(config(**SCHEDULE), model)
        losses[autocast] = []
        for x in batches().float():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x)["loss"]
            loss.backward()
            optimizer.step()
            losses[autocast].append(loss.item())
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert all(b.dtype == torch.float32 for b in model.buffers() if b.is_floating_point())
    # bfloat16 has 8 bits: 0.4 % in every feature map of a few layers, six steps in a row
    assert losses[True] == pytest.approx(losses[False], rel=0.05)
    assert losses[True] != losses[False]


def test_gradients_under_activation_checkpointing():
    x = batches()[0]
    plain = Net("SW").double()
    checkpointed = copy.deepcopy(plain)
    before = {k: v.clone() for k, v in plain.named_buffers()}
    for stage in checkpointed.resnet.stages:
        for block in stage:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for model in (plain, checkpointed):
        model(x)["loss"].backward()
    for (name, p), q in zip(plain.named_parameters(), checkpointed.parameters()):
        assert torch.equal(p.grad, q.grad), name  # the same operations on the same numbers
    for name, q in checkpointed.named_buffers():
        once = plain.get_buffer(name)
        batch = (once - 0.9 * before[name]) / 0.1
        twice = once if ".stem." in name else 0.9 * once + 0.1 * batch
        torch.testing.assert_close(q, twice, rtol=1e-10, atol=1e-12, msg=name)


def test_importance_ratios_reach_metrics_json_and_tensorboard(tmp_path):
    trainer, model, snapshots = make_trainer(config(**SCHEDULE), batches())
    writers = [JSONWriter(str(tmp_path / "metrics.json")), TensorboardXWriter(str(tmp_path))]
    trainer.register_hooks([ImportanceWriter(model, 2), hooks.PeriodicWriter(writers, 2)])
    trainer.train(0, ITERATIONS)
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path)).Reload()
    for kind, parameter in (("mean", "sw_mean_weight"), ("cov", "sw_var_weight")):
        name = f"resnet.res3.0.conv2.norm.{parameter}"
        ratios = [after[name].softmax(0) for after in snapshots.after[1::2]]
        for i, statistic in enumerate(("bw", "iw")):
            key = f"sw/res3.0.conv2/{kind}/{statistic}"
            expected = [ratio[i].item() for ratio in ratios]
            # ratios are read as float32
            assert [line[key] for line in lines] == pytest.approx(expected, rel=1e-6)
            assert [e.value for e in events.Scalars(key)] == pytest.approx(expected, rel=1e-6)
            assert [e.step for e in events.Scalars(key)] == [1, 3, 5]


# ---- results


RESULTS = {
    "bbox": {"AP": 41.2345, "AP50": np.float64(62.0), "AP-cat": 30.0, "AP-dog": float("nan")},
    "segm": {"AP": 37.0, "APs": float("nan")},
}


def test_results_of_one_data_set(tmp_path):
    write_results(RESULTS, tmp_path, "mask_rcnn", 180000)
    assert (tmp_path / "results.md").read_text() == (
        "| config    | iterations   | box AP   | box AP50   | mask AP   | mask APs   |\n"
        "|-----------|--------------|----------|------------|-----------|------------|\n"
        "| mask_rcnn | 180000       | 41.2     | 62.0       | 37.0      | -          |\n"
    )

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    assert json.loads((tmp_path / "results.json").read_text(), parse_constant=no_constant) == {
        "config": "mask_rcnn",
        "iterations": 180000,
        "results": {
            "bbox": {"AP": 41.2345, "AP50": 62.0, "AP-cat": 30.0, "AP-dog": None},
            "segm": {"AP": 37.0, "APs": None},
        },
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.json", "results.md"]


def test_results_of_several_data_sets(tmp_path):
    write_results({"a": RESULTS, "b": {"bbox": {"AP": 1.0}}}, tmp_path, "x")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (tmp_path / "results.md").read_text().splitlines()
    ]
    assert rows[0] == ["config", "data set", "box AP", "box AP50", "mask AP", "mask APs"]
    assert rows[2:] == [["x", "a", "41.2", "62.0", "37.0", "-"], ["x", "b", "1.0", "", "", ""]]
    assert json.loads((tmp_path / "results.json").read_text())["iterations"] is None


def test_errors_have_two_decimals_and_precisions_one(tmp_path):
    results = {"classification": {"top1_error": 23.456, "accuracy": 76.544}}
    write_results(results, tmp_path, "a|b")
    header, _, row = (tmp_path / "results.md").read_text().splitlines()
    cells = [cell.strip() for cell in header.split("|")[1:-1]]
    assert cells == ["config", "classification top1_error", "classification accuracy"]
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    assert cells == [r"a\|b", "23.46", "76.5"]


def test_results_that_cannot_be_written_leave_the_old_ones(tmp_path, monkeypatch):
    write_results(RESULTS, tmp_path, "old")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def fill_the_disk(path, text):
        path.write_bytes(text.encode()[:10])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        write_results(RESULTS, tmp_path, "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_the_command_scales_stops_and_writes_its_results(datasets, tmp_path, monkeypatch):
    """Made for 2 processes, run with 1: twice the length, with half the rate and batch."""
    arguments = ["--config", SHAPES, *TINY, "DATASETS.TEST", "('shapes_val[:4]',)"]
    schedule = """
        SOLVER.REFERENCE_WORLD_SIZE 2 SOLVER.IMS_PER_BATCH 4 SOLVER.MAX_ITER 2
        SOLVER.CHECKPOINT_PERIOD 1 SOLVER.IMPORTANCE_STOP_ITER 1 SOLVER.WARMUP_ITERS 0
    """.split()
    augmentation = ["TEST.AUG.ENABLED", "True", "TEST.AUG.MIN_SIZES", "(64,)"]
    command = [*TRAIN_NET, *arguments, *schedule, *augmentation, "OUTPUT_DIR", str(tmp_path)]
    trained = run(command, datasets)
    assert trained.returncode == 0, trained.stderr[-2000:]
    middle, final = (
        torch.load(tmp_path / f"model_{name}.pth")["model"] for name in ("0000001", "final")
    )
    assert sorted(p.name for p in tmp_path.glob("model_*")) == [
        *("model_0000001.pth", "model_0000003.pth", "model_final.pth")
    ]
    names = [name for name in final if is_importance(name)]
    assert len(names) == 2 * 5
    for name in names:
        assert torch.equal(final[name], middle[name]), name
        assert not torch.equal(final[name], torch.ones(2)), name
    assert not torch.equal(*(m["backbone.bottom_up.stem.conv1.weight"] for m in (middle, final)))

    record = json.loads((tmp_path / "results.json").read_text())
    assert (record["config"], record["iterations"]) == (SHAPES.removesuffix(".yaml"), 4)
    assert list(record["results"]) == ["bbox", "segm", "bbox_TTA", "segm_TTA"]
    assert {"AP", "AP50", "AP75", "APs", "APm", "APl"} < set(record["results"]["segm"])
    assert "box TTA AP75" in (tmp_path / "results.md").read_text().splitlines()[0]

    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets))
    weights = ["MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]
    folder = ["OUTPUT_DIR", str(tmp_path / "again")]
    args = argument_parser("", "").parse_args(["--eval-only", *arguments, *weights, *folder])
    assert train_or_evaluate(args)["bbox"]["AP"] == record["results"]["bbox"]["AP"]
    second = json.loads((tmp_path / "again/results.json").read_text())
    assert second["iterations"] == 4
    assert second["results"] == {k: record["results"][k] for k in ("bbox", "segm")}
