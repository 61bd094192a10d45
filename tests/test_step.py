"""A step of a task's own: several optimizers and sources of data in one run."""

import itertools
import json
import random
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from detectron2.engine import HookBase, SimpleTrainer, TrainerBase
from detectron2.utils.events import EventStorage, get_event_storage
from helpers.runs import same
from torch import nn
from torch.optim.lr_scheduler import StepLR

from sw_detectron import SwitchWhiten2d, UserError
from sw_detectron.engine.hooks import ImagesPerSecond, ImportanceWriter, SeedIterations
from sw_detectron.engine.loop import Loop, RunSettings

ITERATIONS, STOP = 6, 4


class AdversarialStep(TrainerBase):
    """A network on one source of images, and a critic that tells it from another source."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 16, 3), SwitchWhiten2d(16)).double()
        self.critic = nn.Linear(16, 1).double()
        self.optimizers = {
            "network": torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9),
            "critic": torch.optim.Adam(self.critic.parameters(), lr=0.01),
        }

    def continue_from(self, iteration):
        self._skipped = iteration

    def batch(self, source):
        generator = torch.Generator().manual_seed(100 * source + self.iter)
        return torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)

    def run_step(self):
        network, critic = self.optimizers.values()
        network.zero_grad()
        judged = self.critic(self.model(self.batch(0)).amax(dim=(2, 3)))
        judged.square().mean().backward()
        self.after_backward()
        network.step()
        critic.zero_grad()
        fake = self.critic(self.model(self.batch(1)).amax(dim=(2, 3)).detach())
        (fake - 1).square().mean().backward()
        critic.step()
        get_event_storage().put_scalar("loss_critic", fake.mean().item())

    def state_dict(self):
        optimizers = {name: o.state_dict() for name, o in self.optimizers.items()}
        return super().state_dict() | {"weights": self.critic.state_dict(), **optimizers}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.critic.load_state_dict(state["weights"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


def make_loop(folder, stop=STOP, eval_period=0):
    torch.manual_seed(0)
    step = AdversarialStep()
    schedules = {name: StepLR(o, step_size=2, gamma=0.5) for name, o in step.optimizers.items()}
    settings = RunSettings(
        str(folder), "", ITERATIONS, {"period": 1}, eval_period, importance_stop_iter=stop
    )
    return Loop(step, schedules, settings, OrderedDict, list, dict), step


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    loop, whole = make_loop(tmp_path)
    loop.resume_or_load(resume=False)
    loop.train()
    for done in (2, STOP, 5):
        (tmp_path / "last_checkpoint").write_text(f"model_{done - 1:07d}.pth")
        again, resumed = make_loop(tmp_path)
        again.resume_or_load(resume=True)
        assert resumed._skipped == again.start_iter == done
        again.train()
        same(resumed.model.state_dict(), whole.model.state_dict())
        same(again.state_dict(), loop.state_dict())


def test_every_optimizer_follows_its_schedule_and_is_recorded(tmp_path):
    loop, step = make_loop(tmp_path)
    loop.train()
    rates = [o.param_groups[0]["lr"] for o in step.optimizers.values()]
    assert rates == [0.1 / 8, 0.01 / 8]  # halved after iterations 2, 4 and 6
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert record["lr_critic"] == 0.01 / 4  # of the last iteration
    assert "loss_critic" in record
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_importance_stops_in_a_step_of_ones_own(tmp_path):
    layers = []
    for stop in (STOP, 1, 0):
        loop, step = make_loop(tmp_path, stop)
        loop.train()
        layers.append(step.model[1].sw_mean_weight.detach())
    start = torch.ones(2, dtype=torch.float64)
    assert not torch.equal(layers[0], start)
    assert len({tuple(weight.tolist()) for weight in layers}) == 3  # each stop elsewhere


def test_results_know_how_many_iterations_the_model_was_trained_for(tmp_path):
    loop, _ = make_loop(tmp_path, eval_period=4)
    known = []
    seen = HookBase()
    seen.after_step = lambda: known.append(loop.results_iterations)
    loop.register_hooks([seen])
    loop.train()
    assert known == [0, 0, 0, 4, 4, 4]
    assert loop.results_iterations == ITERATIONS


def test_a_page_that_cannot_be_drawn_is_a_warning(tmp_path, caplog, monkeypatch):
    loop, _ = make_loop(tmp_path)
    monkeypatch.setattr(loop, "_page_sections", lambda: {}["no such key"])
    loop.train()
    assert "No page of the run: KeyError" in caplog.text


def test_a_loss_that_is_not_finite_is_one_line_and_is_not_evaluated(tmp_path, monkeypatch):
    """In the last iteration, which Detectron2's hooks would take for the end."""
    for last in (1, ITERATIONS - 1):
        loop, step = make_loop(tmp_path / str(last))
        monkeypatch.setattr(loop, "_evaluate", lambda: {}["evaluated"])
        run_step = step.run_step

        def fail(step=step, run_step=run_step, last=last):
            run_step()
            if step.iter == last:
                SimpleTrainer.write_metrics({"loss_a": torch.tensor(torch.nan)}, 0.0, step.iter)

        step.run_step = fail
        with pytest.raises(UserError, match=rf"^iteration {last}: .*'loss_a': nan.*rate") as caught:
            loop.train()
        assert "\n" not in str(caught.value)
        assert (tmp_path / str(last) / f"model_{last - 1:07d}.pth").is_file()
        assert (tmp_path / str(last) / "report.html").is_file()


def test_an_input_that_is_not_finite_names_its_layer(tmp_path):
    loop, step = make_loop(tmp_path)
    step.model[1].whitening = "eigh"
    nn.init.constant_(step.model[0].weight, float("inf"))
    with pytest.raises(UserError, match="iteration 0: the input of 1 is not finite"):
        loop.train()


def test_every_iteration_of_every_process_draws_numbers_of_its_own():
    drawn = {}
    for _ in range(2):  # and the same ones again
        for iteration, rank in itertools.product(range(5), range(3)):
            hook = SeedIterations(7, rank, 3)
            hook.trainer = SimpleNamespace(iter=iteration)
            hook.before_step()
            number = (torch.rand(()).item(), random.random())
            assert drawn.setdefault((iteration, rank), number) == number
    assert len({first for first, _ in drawn.values()}) == 15


def test_the_last_ratios_are_recorded_whatever_the_period():
    writer = ImportanceWriter(nn.Sequential(SwitchWhiten2d(16)), period=4)
    with EventStorage() as storage:
        for storage.iter in range(6):
            writer.trainer = SimpleNamespace(storage=storage, iter=storage.iter, max_iter=6)
            writer.after_step()
    histories = storage.histories().values()
    assert len(histories) == 4  # of two statistics, for mean and covariance
    assert {tuple(step for _, step in history.values()) for history in histories} == {(3, 5)}


def test_images_per_second_are_those_of_a_step_in_its_time():
    hook = ImagesPerSecond(64)
    with EventStorage(7) as storage:
        hook.trainer = SimpleNamespace(storage=storage, iter=7)
        hook.after_step()
        assert not storage.latest()  # the first iterations are not timed
        storage.put_scalar("time", 0.5)
        hook.after_step()
    assert storage.latest()["[metric]images_per_second"] == (128, 7)
