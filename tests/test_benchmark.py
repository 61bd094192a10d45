"""The benchmark: what it counts, how it compares, and its command line. Nothing about speed."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sw_detectron import benchmark
from sw_detectron.errors import UserError
from sw_detectron.layers import SwitchWhiten2d

CPU = torch.device("cpu")
TOOL = [sys.executable, str(Path(__file__).resolve().parents[1] / "tools/benchmark.py")]


def run_tool(*arguments):
    return subprocess.run([*TOOL, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "function, copies",
    [
        (lambda x: x * x, 1),  # both factors are the same storage
        (lambda x: x.exp() * x, 2),
        (lambda x: x + x, 0),
    ],
)
def test_retained_memory_of_known_functions(function, copies):
    x = torch.randn(100, 10, requires_grad=True)
    assert benchmark.retained_bytes(lambda: function(x)) == copies * x.numel() * 4


def test_retained_memory_leaves_out_what_is_excluded():
    x, weight = torch.randn(50, requires_grad=True), torch.randn(50, requires_grad=True)
    assert benchmark.retained_bytes(lambda: x * weight, exclude=[weight]) == 50 * 4


@pytest.mark.parametrize("memory_format", benchmark.MEMORY_FORMATS)
def test_sw_retains_its_input_and_little_else(memory_format):
    x = torch.randn(2, 32, 64, 64).contiguous(memory_format=benchmark.MEMORY_FORMATS[memory_format])
    x.requires_grad_()
    layer = SwitchWhiten2d(32)
    tensors = (*layer.parameters(), *layer.buffers())
    retained = benchmark.retained_bytes(lambda: layer(x), tensors) / (x.numel() * 4)
    assert 1 <= retained < 1.05
    composed = benchmark.ComposedSwitchWhiten2d(32)
    assert benchmark.retained_bytes(lambda: composed(x)) / (x.numel() * 4) > 2


def test_peak_memory_counts_what_is_alive_at_a_time():
    x = torch.randn(1000, 100)

    def two_and_then_one():
        (x + 1).add_(x + 2)
        return x + 3

    assert benchmark.peak_bytes(two_and_then_one, CPU) == pytest.approx(2 * x.numel() * 4, rel=0.01)


def test_composed_layer_is_the_layer():
    x = torch.randn(2, 32, 5, 7)
    layer, composed = SwitchWhiten2d(32), benchmark.ComposedSwitchWhiten2d(32)
    torch.testing.assert_close(composed(x), layer(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(composed.state_dict(), layer.state_dict(), atol=1e-5, rtol=1e-4)


def test_ratios_are_taken_round_by_round():
    # The machine is ten times slower in the last round; the ratio does not notice.
    timing = benchmark.summarize([2.0, 4.0, 6.0, 8.0, 50.0], baseline=[1.0, 1.0, 2.0, 2.0, 20.0])
    assert timing.ms == 6.0
    assert (timing.ratio_low, timing.ratio, timing.ratio_high) == (2.5, 3.0, 4.0)
    assert str(timing) == "3.00 (2.50 to 4.00)"


def test_every_round_runs_every_contender():
    calls = []
    runs = {
        name: lambda name=name: calls.append(name) or torch.ones(300, 300).exp() for name in "ab"
    }
    times = benchmark.time_rounds(runs, CPU, rounds=3, warmup=2, title="")
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    blocks = [name for name, before in zip(calls, [None, *calls]) if name != before]
    assert blocks == list("bababa")  # five rounds there and back, each with repeats
    assert all(value > 0 for values in times.values() for value in values)


def test_plain_path_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv("SW_DETECTRON_PLAIN", raising=False)
    with benchmark.plain_path(True):
        assert os.environ["SW_DETECTRON_PLAIN"] == "1"
    assert "SW_DETECTRON_PLAIN" not in os.environ
    monkeypatch.setenv("SW_DETECTRON_PLAIN", "0")
    with benchmark.plain_path(True):
        assert os.environ["SW_DETECTRON_PLAIN"] == "1"
    assert os.environ["SW_DETECTRON_PLAIN"] == "0"


def test_operations_grow_as_the_paper_says():
    growths = benchmark.measure_growth()
    assert {growth.variable for growth in growths} == {"N", "C", "G", "HW"}
    assert all(growth.agrees for growth in growths)
    assert not any(replace(g, expected=g.expected + 1).agrees for g in growths)
    assert not any(replace(g, expected=g.expected - 1).agrees for g in growths)


def test_matrix_products_are_all_counted():
    # The covariance and the whitening take N C G HW each; Newton's part is small here.
    operations = benchmark.count_operations(N=2, C=32, G=16, HW=128**2)
    assert operations == pytest.approx(2 * (2 * 32 * 16 * 128**2), rel=0.05)


def test_arguments():
    assert benchmark.parse_shapes("2x64x5x7,1x16x3x3", batch=8) == [(2, 64, 5, 7), (1, 16, 3, 3)]
    assert benchmark.parse_shapes("imagenet", batch=3)[0] == (3, 64, 112, 112)
    assert benchmark.parse_shapes("detection", batch=3)[0] == (2, 64, 400, 608)
    assert benchmark.parse_size("800x1216") == (800, 1216)
    assert benchmark.parse_size("224") == (224, 224)
    assert benchmark.parse_statistics("bw,ln") == ("bw", "ln")
    for parse, text in (
        (benchmark.parse_size, "0"),
        (benchmark.parse_size, "1x2x3"),
        (benchmark.parse_size, "800x32"),
        (benchmark.parse_statistics, "bw,bw"),
        (benchmark.find_device, "gpu"),
        (benchmark.find_device, "meta"),
    ):
        with pytest.raises(UserError, match=text):
            parse(text)


def test_figures_of_synthetic_results(tmp_path):
    timing = benchmark.Timing(1.0, 1.0, 1.0, 1.0)
    slow = benchmark.Timing(30.0, 30.0, 29.0, 33.0)
    results = [
        benchmark.Result("2x48x4x4", "contiguous", name, {"forward": t, "forward+backward": t})
        for name, t in (("BN", timing), ("GN", replace(timing, ratio=0.5)), ("SW{all} eigh", slow))
    ]
    figure = benchmark.ratio_figure(results)
    assert len(figure.axes) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["GN", "SW{all} eigh"]
    benchmark.write_results(tmp_path / "new", "layers", results, {}, {})
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "layers.png",
        "results.json",
    ]


def test_command_line(tmp_path):
    arguments = ["--device", "cpu", "--threads", "1", "--output", str(tmp_path)]
    arguments += ["--rounds", "2", "--warmup", "1", "--memory-format", "both"]
    done = run_tool("layers", "--shapes", "2x32x6x6", *arguments)
    assert done.returncode == 0, done.stderr
    assert "SW{all} eigh" in done.stdout and "Traceback" not in done.stderr
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["machine"].keys() >= {"cpu", "gpu", "threads", "torch", "command"}
    assert content["machine"]["threads"] == 1
    assert content["settings"]["dtype"] == "float32"
    names = {"BN", "SyncBN", "IN", "GN", "composed"}
    names |= {f"SW{{{s}}} {method}" for s in ("bw,iw", "all") for method in ("newton", "eigh")}
    expected = {(name, f) for name in names for f in benchmark.MEMORY_FORMATS}
    assert {(r["contender"], r["memory_format"]) for r in content["results"]} == expected
    for result in content["results"]:
        assert set(result["timings"]) == {"forward", "forward+backward"}
        assert set(result["memory"]) == {"retained_per_input", "peak_per_input"}
        for timing in result["timings"].values():
            assert timing["ms"] > 0
            assert 0 < timing["ratio_low"] <= timing["ratio"] <= timing["ratio_high"]
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("model", benchmark.MODELS)
def test_models(model):
    results = benchmark.benchmark_models(
        [model], CPU, batch=1, size=(65, 65), amp=True, rounds=1, warmup=1
    )
    placements = ["BN", "7 x SW"] + ["14 x SW"] * (model == "semantic")
    assert [result.contender for result in results] == placements
    assert all(result.memory["peak_gb"] > 0 for result in results)
    assert all(result.timings["training step"].ms > 0 for result in results)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "8x64x56"], "8x64x56"),
        (["--shapes", "2x24x5x5"], "num_features (24)"),
        (["--shapes", "2x32x5x5", "--statistics", "bw,xw"], "bw,xw"),
        (["--shapes", "2x32x1x1"], "2x32x1x1"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--output", __file__], __file__),
        (["--rounds", "0"], "'0'"),
    ],
)
def test_mistakes_take_one_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["benchmark.py", "layers", "--output", str(tmp_path), *arguments]
    )
    with pytest.raises(SystemExit) as stop:  # here, as importing PyTorch anew takes seconds
        runpy.run_path(TOOL[1], run_name="__main__")
    text = stop.value.code if isinstance(stop.value.code, str) else capsys.readouterr().err
    last_line = text.strip().splitlines()[-1]
    assert stop.value.code not in (None, 0)
    assert "error: " in last_line and message in last_line
    assert "Traceback" not in text
