"""A run that is resumed with other values: they hold, and the log says so."""

import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from detectron2.config import get_cfg
from helpers.classification import TINY, TOY, run_here
from helpers.runs import same
from test_step import make_loop
from torch import nn

from sw_detectron import SwitchWhiten2d, add_sw_config
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.engine.continuation import differences, flatten, parameter_names, run_facts
from sw_detectron.engine.hooks import BestCheckpointer
from sw_detectron.engine.loop import Loop, RunSettings
from sw_detectron.engine.optimizer import build_lr_scheduler, build_optimizer
from sw_detectron.engine.step import MixedPrecisionStep, SupervisedStep


class Net(nn.Module):
    def __init__(self, norm=SwitchWhiten2d):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 1), norm(16), nn.Linear(16, 4)

    def forward(self, x):
        return {"loss": self.head(self.norm(self.conv(x)).amax(dim=(2, 3))).sin().square().mean()}


def config(**solver):
    cfg = get_cfg()
    add_sw_config(cfg)
    solver = {"MAX_ITER": 6, "STEPS": (4,), "BASE_LR": 0.1, "WARMUP_ITERS": 0} | solver
    for key, value in solver.items():
        cfg.merge_from_list([f"SOLVER.{key}", value])
    return cfg


class Batches:
    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(4, 3, 5, 5, generator=generator)


def make(folder, cfg, norm=SwitchWhiten2d, optimizer=build_optimizer, step_class=SupervisedStep):
    model = Net(norm)
    step = step_class(model, Batches(), optimizer(cfg, model), cfg.SOLVER.IMS_PER_BATCH)
    schedules = {name: build_lr_scheduler(cfg, o) for name, o in step.optimizers.items()}
    settings = RunSettings(str(folder), "", cfg.SOLVER.MAX_ITER, {"period": 1}, keys=cfg)
    return Loop(step, schedules, settings, dict, list, dict)


def begin(folder, **solver):
    loop = make(folder, config(**solver))
    loop.resume_or_load(resume=False)
    loop.train()
    return loop


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run as it was configured first."""
    folder = tmp_path_factory.mktemp("begun")
    begin(folder)
    return folder


def resume(folder, done, cfg, **kwargs):
    (folder / "last_checkpoint").write_text(f"model_{done - 1:07d}.pth")
    loop = make(folder, cfg, **kwargs)
    loop.resume_or_load(resume=True)
    assert loop.start_iter == done
    return loop


def options(loop):
    """The options of each parameter, and what its state has, by its name."""
    optimizer = loop._trainer.optimizer
    names = {id(p): name for name, p in loop.model.named_parameters()}
    return {
        names[id(p)]: ({k: v for k, v in group.items() if k != "params"}, optimizer.state[p])
        for group in optimizer.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize(
    "key, value",
    [
        ("BASE_LR", 0.3),
        ("WEIGHT_DECAY", 0.01),
        ("MOMENTUM", 0.5),
        ("NESTEROV", True),
        ("WEIGHT_DECAY_NORM", 0.02),
        ("WEIGHT_DECAY_BIAS", 0.02),
        ("WEIGHT_DECAY_IMPORTANCE", 0.02),
        ("IMPORTANCE_LR_FACTOR", 0.5),
        ("HEAD_LR_FACTOR", 3.0),
        ("BIAS_LR_FACTOR", 2.0),
        ("STEPS", (1, 2)),
        ("STEPS", (5,)),
        ("GAMMA", 0.5),
        ("MAX_ITER", 8),
        ("WARMUP_ITERS", 5),
        ("LR_SCHEDULER_NAME", "WarmupCosineLR"),
        ("LR_SCHEDULER_NAME", "WarmupPolyLR"),
        ("CLIP_GRADIENTS.ENABLED", True),
    ],
)
def test_the_new_value_holds_and_is_named(begun, tmp_path, caplog, key, value):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    cfg, fresh_cfg = config(**{key: value}), config(**{key: value})
    with caplog.at_level(logging.WARNING):
        loop = resume(tmp_path, 3, cfg)
    old = flatten(config())[f"SOLVER.{key}"]
    new = flatten(cfg)[f"SOLVER.{key}"]
    lines = [r.message for r in caplog.records if "before this resume" in r.message]
    assert lines == [
        f"SOLVER.{key} was {old!r} before this resume, and is {new!r} from iteration 3 on"
    ]

    # As an optimizer is that was made with the new values, and has come to this iteration.
    fresh = make(tmp_path / "fresh", fresh_cfg)
    for _ in range(3):
        fresh.schedules["optimizer"].step()
    expected = {name: group for name, (group, _) in options(fresh).items()}
    actual = options(loop)
    assert {name: group for name, (group, _) in actual.items()} == expected
    assert loop.schedules["optimizer"].base_lrs == fresh.schedules["optimizer"].base_lrs
    # What each parameter accumulated is still its own.
    saved = torch.load(tmp_path / "model_0000002.pth")["trainer"]
    buffers = saved["_trainer"]["optimizer"]["state"]
    names = [name for name, _ in saved["run"]["parameters"]["optimizer"]["parameters"]]
    assert set(names) == set(actual)
    for index, name in enumerate(names):
        assert torch.equal(actual[name][1]["momentum_buffer"], buffers[index]["momentum_buffer"])
    loop.train()


def test_nothing_is_said_of_a_run_that_goes_on_as_it_was(tmp_path, caplog):
    whole = begin(tmp_path, IMPORTANCE_LR_FACTOR=0.3, WARMUP_ITERS=5)
    state = whole._trainer.optimizer.state_dict()
    loop = resume(tmp_path, 6, config(IMPORTANCE_LR_FACTOR=0.3, WARMUP_ITERS=5))
    same(loop._trainer.optimizer.state_dict(), state)
    same(loop.model.state_dict(), whole.model.state_dict())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_another_network_in_part_starts_there_as_it_is(tmp_path, caplog):
    begin(tmp_path)
    loop = resume(tmp_path, 3, config(), norm=nn.BatchNorm2d)
    state = loop._trainer.optimizer.state
    assert "momentum_buffer" in state[loop.model.conv.weight]
    saved = torch.load(tmp_path / "model_0000002.pth")["model"]
    assert torch.equal(loop.model.norm.weight, saved["norm.weight"])
    loop.train()
    assert "sw_mean_weight" in caplog.text


def test_another_class_of_optimizer_starts_anew(tmp_path):
    begin(tmp_path)
    adam = lambda cfg, model: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731
    loop = resume(tmp_path, 3, config(), optimizer=adam)
    assert not loop._trainer.optimizer.state
    loop.train()


def test_mixed_precision_can_be_turned_on_and_off(tmp_path):
    begin(tmp_path)
    mixed = resume(tmp_path, 3, config(), step_class=MixedPrecisionStep)
    assert options(mixed)["conv.weight"][1]
    mixed.checkpointer.save("model_0000002", iteration=2)
    assert options(resume(tmp_path, 3, config()))["conv.weight"][1]


def test_a_checkpoint_without_facts_loads_as_it_did(tmp_path, caplog):
    begin(tmp_path)
    path = tmp_path / "model_0000002.pth"
    checkpoint = torch.load(path)
    del checkpoint["trainer"]["run"]
    torch.save(checkpoint, path)
    loop = resume(tmp_path, 3, config(BASE_LR=0.3))
    same(loop._trainer.optimizer.state_dict(), checkpoint["trainer"]["_trainer"]["optimizer"])
    assert "before this resume" not in caplog.text


def test_a_schedule_of_ones_own_goes_on_from_the_new_rate(tmp_path):
    loop, _ = make_loop(tmp_path)
    loop.train()
    (tmp_path / "last_checkpoint").write_text("model_0000002.pth")
    again, step = make_loop(tmp_path)
    for optimizer in step.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 10 * group["lr"]
    again.schedules["network"].base_lrs = [1.0]
    again.schedules["critic"].base_lrs = [0.1]
    again.resume_or_load(resume=True)
    again.train()
    rates = [o.param_groups[0]["lr"] for o in step.optimizers.values()]
    assert rates == pytest.approx([1.0 / 8, 0.1 / 8], rel=1e-12)


def test_fewer_iterations_than_are_done_are_named_and_evaluated(tmp_path, caplog):
    begin(tmp_path)
    loop = resume(tmp_path, 5, config(MAX_ITER=4, STEPS=(2,)))
    assert "has done 5 iterations, more than the 4" in caplog.text
    loop.train()
    assert loop.results_iterations == 5


def test_differences_name_the_machine_and_files_that_are_not_read():
    before = {"MODEL.WEIGHTS": "a.pkl", "torch": "2.6", "number of processes": 8}
    now = {"MODEL.WEIGHTS": "b.pkl", "torch": "2.6", "number of processes": 4}
    assert differences(before, now | {"new.key": [1]}, 100) == [
        "MODEL.WEIGHTS was 'a.pkl' before this resume, and is 'b.pkl' now: a resumed run does not "
        "read it",
        "number of processes was 8 before this resume, and is 4 from iteration 100 on",
        "new.key was None before this resume, and is [1] from iteration 100 on",
    ]


def test_facts_are_plain_data():
    assert {"OUTPUT_DIR", "train.output_dir"}.isdisjoint(run_facts(config()))
    nested = {"a": {"b": (1, [2.0]), "c": {}, "d": {"e": nn.Linear}}, "f": {"g": lambda: 0}}
    assert flatten(nested) == {
        "a.b": [1, [2.0]],
        "a.c": {},
        "a.d.e": "Linear",
        "f.g": "test_facts_are_plain_data.<locals>.<lambda>",
    }


def test_parameters_have_one_name_in_one_process_and_in_several():
    model = nn.Linear(2, 3)
    optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    parallel = nn.Module()
    parallel.module = model
    for whole in (model, parallel):
        names = parameter_names(whole, optimizers)["optimizer"]["parameters"]
        assert names == [["weight", [3, 2]], ["bias", [3]]]


# ---- the best checkpoint of a classifier


def best(folder):
    return torch.load(folder / "model_best.pth")


def classify(folder, errors, *arguments, monkeypatch):
    """A run whose evaluations find the given errors."""
    found = iter(errors)
    monkeypatch.setattr(
        "sw_detectron.tasks.classification.trainer.ClassificationTrainer.test",
        classmethod(lambda *_: {"classification": {"top1_error": next(found)}}),
    )
    run_here("--config", TOY, *arguments, *TINY, "OUTPUT_DIR", str(folder))


@pytest.mark.slow
def test_the_best_stays_the_best_when_a_run_is_resumed(tmp_path, monkeypatch):
    run = lambda errors, *arguments: classify(  # noqa: E731
        tmp_path, errors, *arguments, monkeypatch=monkeypatch
    )
    run([20.0])  # the only evaluation is the last one, after the last checkpoint
    first = best(tmp_path)
    assert first["best"] == {"metric": "classification/top1_error", "value": 20.0, "iteration": 3}
    assert first["iteration"] == 2
    run([40.0], "--resume")  # finished, and evaluated again
    same(best(tmp_path), first)
    monkeypatch.setattr("helpers.classification.TINY", TINY)
    longer = [*TINY]
    longer[longer.index("SOLVER.MAX_ITER") + 1] = "5"
    monkeypatch.setitem(globals(), "TINY", longer)
    run([30.0], "--resume")
    same(best(tmp_path), first)
    longer[longer.index("SOLVER.MAX_ITER") + 1] = "6"
    run([10.0], "--resume")
    assert best(tmp_path)["best"]["value"] == 10.0
    assert best(tmp_path)["iteration"] == 5
    run([float("nan")], "--resume")
    assert best(tmp_path)["best"]["value"] == 10.0
    run([50.0])  # not resumed: another run
    assert best(tmp_path)["best"]["value"] == 50.0


@pytest.mark.parametrize("iteration, stays", [(3, True), (4, True), (5, False)])
def test_a_best_value_of_iterations_that_are_done_again_is_void(tmp_path, iteration, stays):
    value = {"metric": "bbox/AP", "value": 40.0, "iteration": iteration}
    torch.save({"model": {}, "best": value}, tmp_path / "model_best.pth")
    checkpointer = Checkpointer(nn.Linear(1, 1), str(tmp_path))
    hook = BestCheckpointer(10, checkpointer, "bbox/AP")
    hook.trainer = SimpleNamespace(start_iter=4)
    hook.before_train()
    assert hook.best_metric == (40.0 if stays else None)
    assert hook.best_iter == (iteration if stays else None)
