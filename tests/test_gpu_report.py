"""The report of what SW costs on a GPU: budget, goals, what it writes. Nothing about speed."""

import inspect
import json
import logging
import os
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from detectron2.modeling import ResNet
from detectron2.modeling.backbone import BasicStem
from helpers.figures import check_texts
from torch.autograd import DeviceType

import sw_detectron
from sw_detectron.benchmark.gpu.budget import Outcome, run_parts
from sw_detectron.benchmark.gpu.chart import make_chart
from sw_detectron.benchmark.gpu.goals import find_goals
from sw_detectron.benchmark.gpu.parts import IMAGENET_COUNTS, PARTS, Part, rehearsal
from sw_detectron.benchmark.gpu.profiling import (
    MAPS,
    KernelTime,
    copy_time,
    kernel_times,
    sum_kernels,
)
from sw_detectron.benchmark.gpu.report import REHEARSAL, describe_gpu, write_report
from sw_detectron.benchmark.gpu.suite import SuiteRun, count_outcomes, run_suite
from sw_detectron.benchmark.results import Result
from sw_detectron.benchmark.timing import Timing
from sw_detectron.errors import UserError
from sw_detectron.layers import SwitchWhiten2d, triton
from sw_detectron.modeling import replace_norms

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
TOOL = str(ROOT / "tools/gpu_report.py")


# --- The tests that a GPU is needed for


def test_outcomes_of_one_process_and_of_several():
    one = """
tests/test_a.py::test_x[(1, 2)-a b] PASSED                    [ 25%]
tests/test_a.py::test_y FAILED                                [ 50%]
tests/test_a.py::test_z SKIPPED (no GPU)                      [ 75%]
tests/test_b.py::test_w ERROR                                 [100%]
=========== FAILURES ===========
tests/test_a.py:7: in test_y PASSED
tests/test_a.py::test_y
"""
    several = """
tests/test_a.py::test_x[(1, 2)-a b]
tests/test_a.py::test_y
[gw0] [ 25%] PASSED tests/test_a.py::test_x[(1, 2)-a b]
[gw1] [ 50%] FAILED tests/test_a.py::test_y
[gw0] [ 75%] SKIPPED tests/test_a.py::test_z
[gw1] [100%] ERROR tests/test_b.py::test_w
"""
    failed = ("tests/test_a.py::test_y", "tests/test_b.py::test_w")
    assert count_outcomes(one, 1) == count_outcomes(several, 1) == SuiteRun(1, failed, 1, 1)


def test_a_suite_is_run_and_counted(tmp_path):
    file = tmp_path / "test_of_three.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', [1, 2, 'a b'])\n"
        "def test_it(x):\n"
        "    assert x != 2\n"
    )
    run = run_suite([file], 120, tmp_path / "log")
    assert (run.passed, run.skipped, run.status) == (2, 0, 1)
    (name,) = run.failed
    assert name.endswith("test_of_three.py::test_it[2]")
    assert "assert 2 != 2" in (tmp_path / "log").read_text()
    assert run.row()["ran"] == "to the end"


def test_a_suite_that_hangs_ends_with_its_time(tmp_path):
    file = tmp_path / "test_hangs.py"
    file.write_text("import time\ntime.sleep(600)\n")
    begin = time.monotonic()
    run = run_suite([file], 1, tmp_path / "log")
    assert run.status is None and run.row()["ran"] == "time was up"
    assert time.monotonic() - begin < 60


# --- The budget


def _two(scale, seconds):
    yield "Things", 1
    yield "Things", "a thing is missing"
    warnings.warn_explicit("a kernel differs", UserWarning, sw_detectron.__file__, lineno=1)
    logging.getLogger("sw_detectron.layers").warning("%s is slow", "it")
    yield "Things", 2


def _mistake(scale, seconds):
    yield "Things", 3
    raise UserError("no such thing")


def _fault(scale, seconds):
    raise ZeroDivisionError("by zero\nat length")


def _death(scale, seconds):
    yield "Things", 4
    os._exit(7)


def _endless(scale, seconds):
    yield "Things", 5
    time.sleep(600)


def _memory(scale, seconds):
    raise torch.OutOfMemoryError("so many bytes")
    yield


@pytest.mark.slow
def test_parts_that_fail_leave_the_others_and_what_they_measured():
    parts = [Part(f.__name__, 1.0, f) for f in (_two, _mistake, _fault, _death, _memory)]
    calls = []
    outcomes = run_parts(
        parts,
        None,
        time.monotonic() + 1000,
        lambda outcomes: calls.append([outcome.state for outcome in outcomes]),
    )
    assert [outcome.part for outcome in outcomes] == [part.name for part in parts]
    first, mistake, fault, death, memory = outcomes
    assert first.state == "done"
    assert first.records == [("Things", 1), ("Things", 2)]
    assert first.notes == ["a thing is missing", "a kernel differs", "it is slow"]
    assert (mistake.state, mistake.records) == ("failed: no such thing", [("Things", 3)])
    assert fault.state == "failed: ZeroDivisionError: by zero"
    assert death.records == [("Things", 4)]
    assert death.state == "failed: its process ended with status 7"
    assert memory.state == "failed: the GPU's memory does not suffice"
    late = "left out: the time was up"
    assert [states.count(late) for states in calls] == [4, 3, 2, 1, 0]

    # The server of their processes is there now: a part takes no longer than it is given.
    parts = [Part("endless", 10.0, _endless), Part("late", 0.01, _two)]
    begin = time.monotonic()
    endless, late = run_parts(parts, None, begin + 8, shortest=0.1)
    assert 7 < time.monotonic() - begin < 20
    assert (endless.state, endless.records) == ("stopped after 8 s", [("Things", 5)])
    assert (late.state, late.seconds) == ("left out: the time was up", 0)


# --- Goals


def layer(shape, dtype, memory_format, contender, ratio, retained):
    timing = Timing(ratio, ratio, ratio, ratio)
    return f"Layers, {dtype}", Result(
        "x".join(map(str, shape)),
        memory_format,
        contender,
        {"forward": timing, "forward+backward": timing},
        {"retained_per_input": retained, "peak_per_input": 3.0},
    )


def step(case, contender, ratio, memory_format="contiguous"):
    timings = {"training step": Timing(30 * ratio, ratio, ratio - 0.02, ratio + 0.03)}
    return "Training steps", Result(case, memory_format, contender, timings, {"kept_gb": 5.0})


def kernel(name, launches, share, contender="SW{bw,iw} newton", case="64x64x112x112 float32 nchw"):
    return "Kernels", KernelTime(case, contender, name, launches, 100.0, 900.0, share)


def some_records():
    """Of every kind; worse than their goals are one layer, the compiled step, one pass."""
    records = [("Tests", SuiteRun(30, ("tests/test_cuda.py::test_it",), 2, None))]
    records.append(("Kernels", KernelTime("1024 MB", "torch", "copy", 1, 700.0, 3000.0, 1.0)))
    for name, share in (
        ("_moments_kernel", 0.9),
        ("_whiten_kernel", 0.85),
        ("_cross_moments_kernel", 0.79),
        ("_input_gradient_kernel", 0.95),
    ):
        records.append(kernel(name, 1, share))
    records += [kernel("all kernels", 7, 0.6), kernel("all kernels", 9, 0.9, "BN")]
    ratios = [1.2, 1.3, 5.0, 1.9]  # no goal is for the third
    for memory_format in ("channels_last", "contiguous"):
        for shape, ratio in zip(IMAGENET_COUNTS, ratios):
            of = (shape, "bfloat16", memory_format)
            small = shape[-1] == 14
            records.append(layer(*of, "BN", 1.0, 1.0))
            records.append(layer(*of, "SW{bw,iw} newton", ratio, 1.3 if small else 1.02))
            records.append(layer(*of, "SW{bw,iw} newton plain", 9.0, 2.0))
    for case, ratio in (
        ("resnet50 64x3x224x224", 1.04),
        ("mask_rcnn 2x3x800x1216", 1.005),
        ("resnet50 compiled 64x3x224x224", 1.06),
    ):
        records += [step(case, "BN", 1.0), step(case, "7 x SW", ratio)]
    return records


def test_goals():
    tests, large, small, memory, resnet, mask_rcnn, passes, launches = find_goals(some_records())
    assert (tests.state, tests.worst.value) == ("MISSED by 1 of 1", 1)
    # Two shapes of 8 M values or more, in two formats; the second shape is too slow.
    assert large.state == "MISSED by 2 of 4"
    assert large.missed[0] == (1.3, "SW{bw,iw} newton, 64x64x56x56 bfloat16 contiguous")
    assert large.line().endswith("MISSED by 2 of 4, 1.30 for " + large.missed[0].of)
    assert (small.state, small.worst.value, len(small.values)) == ("met", 1.9, 2)
    # Values of the seven layers' maps, in units of the smallest.
    stem, res2, res3, res4 = 16, 4, 2 * 2, 3 * 1
    kept = (1.02 * (stem + res2 + res3) + 1.3 * res4) / (stem + res2 + res3 + res4)
    assert [value.value for value in memory.values] == pytest.approx([kept, kept])
    assert kept > 1.05 and memory.state == "MISSED by 2 of 2"
    assert (resnet.state, resnet.missed[0].of[:17]) == ("MISSED by 1 of 2", "resnet50 compiled")
    assert mask_rcnn.state == "met"
    assert (passes.state, passes.missed[0].value) == ("MISSED by 1 of 4", 0.79)
    assert (launches.state, launches.worst.value) == ("met", 7)


def test_what_was_not_measured_is_no_goal_met():
    assert {goal.state for goal in find_goals([])} == {"not measured"}
    none_to_run = find_goals([("Tests", SuiteRun(0, (), 0, 5))])
    assert none_to_run[0].state == "not measured"
    without_one_shape = [r for r in some_records() if "x14x14" not in getattr(r[1], "case", "")]
    assert find_goals(without_one_shape)[3].state == "not measured"


def test_the_shapes_are_those_of_the_seven_layers():
    assert sum(IMAGENET_COUNTS.values()) == 7
    stages = ResNet.make_default_stages(50, norm="BN", stride_in_1x1=False)
    with torch.device("meta"):
        network = ResNet(BasicStem(norm="BN"), stages, num_classes=10)
    replace_norms(network, "imagenet")
    network.to("meta").eval()
    shapes = []
    for module in network.modules():
        if isinstance(module, SwitchWhiten2d):
            module.forward = lambda x: shapes.append(tuple(x.shape)) or x
    network(torch.empty(64, 3, 224, 224, device="meta"))
    assert {shape: shapes.count(shape) for shape in shapes} == IMAGENET_COUNTS


# --- Kernels


def test_kernels_are_summed_by_name_for_one_call():
    def event(name, us, kind=DeviceType.CUDA):
        return SimpleNamespace(
            name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: us)
        )

    events = [event("a", 10), event("b", 90), event("a", 30), event("b", 110)]
    events += [event("b", 50), event("b", 50), event("aten::a", 5, DeviceType.CPU)]
    kernels = sum_kernels(events, torch.device("cuda"), calls=2)
    assert kernels == {"b": (2, 150), "a": (1, 20)}
    assert list(kernels) == ["b", "a"]


def test_the_passes_are_kernels_of_the_layer():
    modules = [value for value in vars(triton).values() if inspect.ismodule(value)]
    assert all(any(hasattr(module, name) for module in modules) for name in MAPS)


def test_a_copy_reads_and_writes():
    copy = copy_time(CPU, 4000, rounds=3, warmup=1)
    assert copy.gb_per_s == pytest.approx(2 * 4000 / copy.us / 1e3)
    assert copy.share == 1


def test_the_layer_moves_eight_feature_maps():
    copy = KernelTime("", "torch", "copy", 1, 1.0, 10.0, 1.0)
    shape = (2, 16, 5, 5)
    rows = kernel_times(shape, CPU, torch.float32, "contiguous", [("bw",)], "torch", copy, 2, 1)
    totals = [row for row in rows if row.kernel == "all kernels"]
    assert [row.contender for row in totals] == ["BN", "SW{bw} newton"]
    for row in totals:
        assert row.gb_per_s == pytest.approx(8 * 4 * 2 * 16 * 25 / row.us / 1e3)
        assert row.share == pytest.approx(row.gb_per_s / 10)
        assert row.launches >= 2
    assert all(row.share is None for row in rows if row not in totals)


# --- What is written


def test_the_report_holds_everything(tmp_path):
    outcomes = [
        Outcome("layers", "stopped after 70 s", 70.2, some_records(), ["the kernels differ"]),
        Outcome("late"),
    ]
    machine = describe_gpu(CPU) | {"gpu": "NVIDIA H100", "driver": "580.1"}
    write_report(tmp_path, machine, outcomes, rehearsal=False)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Switchable Whitening on NVIDIA H100\n")
    assert f"- torch: {torch.__version__}\n" in text and "- driver: 580.1\n" in text
    for part in (
        "- layers: the kernels differ",
        "left out: the time was up",
        "- failed: `tests/test_cuda.py::test_it`",
        "(chart.png)",
        "## Layers, bfloat16",
        "_cross_moments_kernel",
        "MISSED by 2 of 4",
    ):
        assert part in text
    assert REHEARSAL not in text
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["machine"]["gpu"] == "NVIDIA H100"
    assert [part["state"] for part in content["parts"]] == [o.state for o in outcomes]
    assert len(content["results"]) == len(some_records())
    assert content["goals"][1]["missed"][0]["value"] == 1.3
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    write_report(tmp_path, machine, outcomes, rehearsal=True)
    assert f"({REHEARSAL})" in (tmp_path / "report.md").read_text().splitlines()[0]


def test_the_chart_draws_what_was_measured():
    records = some_records()
    figure = make_chart(records, "title")
    titles = [axes.get_title().split(";")[0] for axes in figure.axes]
    assert titles == [
        "Layers, bfloat16, channels_last: forward+backward",
        "Layers, bfloat16, contiguous: forward+backward",
        "Training steps",
        "Feature maps read and written in the time of a kernel",
    ]
    check_texts(figure)
    steps, passes = figure.axes[2:]
    (bars,) = steps.containers
    assert [b.get_y() + b.get_height() for b in bars] == pytest.approx([1.04, 1.005, 1.06])
    heights = [patch.get_height() for patch in passes.patches]
    assert heights == [0.9, 0.85, 0.79, 0.95, 0.6, 0.9]
    assert make_chart([records[0]], "title") is None


# --- The command


def test_without_a_gpu_it_takes_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [TOOL, "--output", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(TOOL, run_name="__main__")
    assert "finds no GPU" in stop.value.code and "--rehearse" in stop.value.code
    assert "\n" not in stop.value.code


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "six"])
def test_minutes_are_a_positive_number(minutes, monkeypatch, capsys, tmp_path):
    arguments = [TOOL, "--minutes", minutes, "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        runpy.run_path(TOOL, run_name="__main__")
    assert f"'{minutes}'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path):
    command = [sys.executable, TOOL, "--rehearse", "--minutes", "20", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == REHEARSAL
    assert "Traceback" not in done.stderr
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["rehearsal"]
    assert {part["part"]: part["state"] for part in content["parts"]} == {
        part.name: "done" for part in PARTS
    }
    results = content["results"]
    kernels = {r["kernel"] for r in results if r["heading"] == "Kernels"}
    assert {"copy", "all kernels", "FusedSwitchWhiten"} <= kernels
    steps = {r["case"] for r in results if r["heading"] == "Training steps"}
    assert steps == {f"{name} 1x3x64x64" for name in ("resnet50", "mask_rcnn", "resnet50 compiled")}
    scale = rehearsal(tmp_path)
    layers = {(r["heading"], r["memory_format"]) for r in results if "Layers" in r["heading"]}
    assert layers == {(f"Layers, {d}", f) for d in scale.dtypes for f in scale.formats}
    for name in ("report.md", "chart.png", "tests.log"):
        assert (tmp_path / name).stat().st_size > 100
