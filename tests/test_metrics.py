"""Reading what runs recorded: of several runs in one folder, the last one counts."""

import json
import random

import pytest
from detectron2.utils.events import EventStorage, JSONWriter, TensorboardXWriter
from torch.utils.tensorboard import SummaryWriter

from sw_detectron.analysis import comparison_figure, read_metrics
from sw_detectron.analysis.metrics import START_ITERATION, START_TIME
from sw_detectron.errors import UserError


def points(path):
    return {key: dict(zip(*map(list, xy))) for key, xy in read_metrics(path).items()}


def write_lines(folder, *records):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    with open(folder / "metrics.json", "a") as file:
        file.write(text)
    return folder


def record(folder, value, start, stop, evaluations=(), extra=(), period=20, marked=None):
    """What Detectron2's writers leave of a run from iteration `start` on."""
    writers = [JSONWriter(str(folder / "metrics.json")), TensorboardXWriter(str(folder))]
    with EventStorage(start) as storage:
        for storage.iter in range(start, stop):
            storage.put_scalar("total_loss", value, smoothing_hint=False)
            if marked is not None:
                storage.put_scalar(START_TIME, marked, smoothing_hint=False)
                storage.put_scalar(START_ITERATION, start, smoothing_hint=False)
            if storage.iter in evaluations:
                storage.put_scalar("bbox/AP", value, smoothing_hint=False)
            if (storage.iter + 1) % period == 0 or storage.iter + 1 == stop:
                for name in extra:
                    storage.put_scalar(f"sw/{name}/cov/bw", value, smoothing_hint=False)
                for writer in writers:
                    writer.write()
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("source", ["metrics.json", "events"])
def test_the_last_of_two_runs_counts(tmp_path, source, marked):
    record(tmp_path, 1.0, 0, 400, [29, 59, 389], ["stem", "res2"], marked=1e9 if marked else None)
    record(tmp_path, 2.0, 0, 60, [29], ["stem"], marked=2e9 if marked else None)
    if source == "events":
        (tmp_path / "metrics.json").unlink()
    found = points(tmp_path)
    assert found["total_loss"] == {19: 2.0, 39: 2.0, 59: 2.0}
    assert found["bbox/AP"] == {29: 2.0}
    assert set(found) == {"total_loss", "bbox/AP", "sw/stem/cov/bw"}
    assert len(comparison_figure({"run": read_metrics(tmp_path)}, ["total_loss"]).axes) == 2


def test_a_resumed_run_keeps_what_came_before_and_what_it_repeats_counts(tmp_path):
    record(tmp_path, 1.0, 0, 50, [29], period=10)  # stopped at 50, with a checkpoint of 25
    record(tmp_path, 2.0, 25, 80, [29, 59], period=10, marked=5.0)
    found = points(tmp_path)
    assert found["total_loss"] == {9: 1.0, 19: 1.0, **dict.fromkeys(range(29, 80, 10), 2.0)}
    assert found["bbox/AP"] == {29: 2.0, 59: 2.0}


def test_a_run_that_begins_after_a_shorter_one_needs_no_step_back(tmp_path):
    record(tmp_path, 1.0, 0, 2, extra=["stem"], marked=1.0)
    record(tmp_path, 2.0, 0, 40, marked=2.0)
    assert points(tmp_path) == {"total_loss": {19: 2.0, 39: 2.0}}


def test_evaluations_that_are_written_late_void_nothing(tmp_path):
    """The writer puts what was evaluated in iteration 29 below the line of iteration 39."""
    record(tmp_path, 1.0, 0, 80, [9, 29, 49, 69])
    text = (tmp_path / "metrics.json").read_text()
    lines = [json.loads(line)["iteration"] for line in text.splitlines()]
    assert lines != sorted(lines)
    assert points(tmp_path)["bbox/AP"] == dict.fromkeys((9, 29, 49, 69), 1.0)
    assert list(points(tmp_path)["total_loss"]) == [19, 39, 59, 79]


def test_keys_that_only_the_first_run_has_are_void_though_the_second_shares_none(tmp_path):
    first = [{"iteration": i, "a": 1.0} for i in (9, 19, 29)]
    found = points(write_lines(tmp_path, *first, {"iteration": 19, "b": 2.0}))
    assert found == {"a": {9: 1.0}, "b": {19: 2.0}}


@pytest.mark.parametrize("seed", range(10))
def test_each_of_several_runs_voids_all_from_its_first_iteration_on(tmp_path, seed):
    generator = random.Random(seed)
    expected, stop = {}, 0
    for run in range(1, 5):
        start = generator.choice([0, generator.randint(0, stop)])
        stop = start + generator.randint(1, 90)
        record(tmp_path, float(run), start, stop, marked=run)
        expected = {i: value for i, value in expected.items() if i < start}
        expected |= {i: float(run) for i in range(start, stop) if i % 20 == 19 or i == stop - 1}
    assert points(tmp_path) == {"total_loss": expected}
    (tmp_path / "metrics.json").unlink()
    assert points(tmp_path) == {"total_loss": expected}  # of the event files


def test_two_runs_at_the_same_time_are_told_apart(tmp_path):
    lines = [
        {"iteration": i, "loss": loss, START_TIME: loss, START_ITERATION: 0}
        for i in (19, 39, 59)
        for loss in (1.0, 2.0)
    ]
    assert points(write_lines(tmp_path, *lines, lines[-2] | {"iteration": 79}))["loss"] == {
        19: 2.0,
        39: 2.0,
        59: 2.0,
    }


@pytest.mark.parametrize("source", ["metrics.json", "events"])
def test_of_what_one_run_recorded_twice_the_later_counts(tmp_path, source):
    records = [{START_TIME: 1e9, "iteration": i, "loss": loss} for i, loss in ((3, 1.0), (3, 2.0))]
    if source == "metrics.json":
        write_lines(tmp_path, *records)
    else:
        with SummaryWriter(str(tmp_path)) as writer:
            for line in records:
                writer.add_scalar("loss", line["loss"], line["iteration"])
    assert points(tmp_path)["loss"] == {3: 2.0}


def test_other_lines_are_passed_over(tmp_path):
    write_lines(tmp_path, {"loss": 1.0}, [1], {"iteration": "9"}, {"iteration": 9, "name": "x"})
    with pytest.raises(UserError, match="no record of an iteration"):
        read_metrics(tmp_path)
    writer = SummaryWriter(tmp_path / "events")
    writer.close()
    with pytest.raises(UserError, match="no record of an iteration"):
        read_metrics(tmp_path / "events")
