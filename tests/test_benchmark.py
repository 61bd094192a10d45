"""The benchmark: what it counts, how it compares, and its command line. Nothing about speed."""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.figures import check_texts

from sw_detectron.benchmark.arguments import (
    MEMORY_FORMATS,
    find_device,
    parse_shapes,
    parse_size,
)
from sw_detectron.benchmark.backends import ComposedSwitchWhiten2d, backend, get_backend
from sw_detectron.benchmark.drawing import growth_figure, ratio_figure
from sw_detectron.benchmark.host import benchmark_host, count_operators
from sw_detectron.benchmark.models import MODELS, benchmark_models
from sw_detectron.benchmark.operations import Growth, count_operations, measure_growth
from sw_detectron.benchmark.results import Result, results_table, write_results
from sw_detectron.benchmark.timing import (
    Timing,
    peak_bytes,
    retained_bytes,
    summarize,
    time_rounds,
)
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
    assert retained_bytes(lambda: function(x)) == copies * x.numel() * 4


def test_retained_memory_leaves_out_what_is_excluded():
    x, weight = torch.randn(50, requires_grad=True), torch.randn(50, requires_grad=True)
    assert retained_bytes(lambda: x * weight, exclude=[weight]) == 50 * 4


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
def test_sw_retains_its_input_and_little_else(memory_format):
    x = torch.randn(2, 32, 64, 64).contiguous(memory_format=MEMORY_FORMATS[memory_format])
    x.requires_grad_()
    layer = SwitchWhiten2d(32)
    tensors = (*layer.parameters(), *layer.buffers())
    retained = retained_bytes(lambda: layer(x), tensors) / (x.numel() * 4)
    assert 1 <= retained < 1.05
    composed = ComposedSwitchWhiten2d(32)
    assert retained_bytes(lambda: composed(x)) / (x.numel() * 4) > 2


def test_peak_memory_counts_what_is_alive_at_a_time():
    x = torch.randn(1000, 100)

    def two_and_then_one():
        (x + 1).add_(x + 2)
        return x + 3

    assert peak_bytes(two_and_then_one, CPU) == pytest.approx(2 * x.numel() * 4, rel=0.01)


def test_composed_layer_is_the_layer():
    x = torch.randn(2, 32, 5, 7)
    layer, composed = SwitchWhiten2d(32), ComposedSwitchWhiten2d(32)
    torch.testing.assert_close(composed(x), layer(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(composed.state_dict(), layer.state_dict(), atol=1e-5, rtol=1e-4)


def test_ratios_are_taken_round_by_round():
    # The machine is ten times slower in the last round; the ratio does not notice.
    timing = summarize([2.0, 4.0, 6.0, 8.0, 50.0], baseline=[1.0, 1.0, 2.0, 2.0, 20.0])
    assert timing.ms == 6.0
    assert (timing.ratio_low, timing.ratio, timing.ratio_high) == (2.5, 3.0, 4.0)
    assert str(timing) == "3.00 (2.50 to 4.00)"


def test_every_round_runs_every_contender():
    calls = []
    runs = {
        name: lambda name=name: calls.append(name) or torch.ones(300, 300).exp() for name in "ab"
    }
    times = time_rounds(runs, CPU, rounds=3, warmup=2, title="")
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    blocks = [name for name, before in zip(calls, [None, *calls]) if name != before]
    assert blocks == list("bababa")  # five rounds there and back, each with repeats
    assert all(value > 0 for values in times.values() for value in values)


def test_the_backend_is_left_as_it_was():
    before = get_backend()
    with backend("torch"):
        assert get_backend() == "torch"
    assert get_backend() == before
    with pytest.raises(ZeroDivisionError), backend("torch"):
        raise ZeroDivisionError
    assert get_backend() == before


def test_operations_grow_as_the_paper_says():
    growths = measure_growth()
    assert {growth.variable for growth in growths} == {"N", "C", "G", "HW"}
    assert all(growth.agrees for growth in growths)
    assert not any(replace(g, expected=g.expected + 1).agrees for g in growths)
    assert not any(replace(g, expected=g.expected - 1).agrees for g in growths)


def test_matrix_products_are_all_counted():
    # The covariance and the whitening take N C G HW each; Newton's part is small here.
    operations = count_operations(N=2, C=32, G=16, HW=128**2)
    assert operations == pytest.approx(2 * (2 * 32 * 16 * 128**2), rel=0.05)


def test_arguments():
    assert parse_shapes("2x64x5x7,1x16x3x3", batch=8) == [(2, 64, 5, 7), (1, 16, 3, 3)]
    assert parse_shapes("imagenet", batch=3)[0] == (3, 64, 112, 112)
    assert parse_shapes("detection", batch=3)[0] == (2, 64, 400, 608)
    assert parse_size("800x1216") == (800, 1216)
    assert parse_size("224") == (224, 224)
    for parse, text in (
        (parse_size, "0"),
        (parse_size, "1x2x3"),
        (parse_size, "800x32"),
        (find_device, "gpu"),
        (find_device, "meta"),
    ):
        with pytest.raises(UserError, match=text):
            parse(text)


def some_results(formats=tuple(MEMORY_FORMATS)):
    """Ratios that differ in every bar; GN does not fit the first shape."""
    ratios = {"BN": 1.0, "GN": 0.5, "SW{all} eigh": 30.0, "SW{all} eigh plain": 40.0}
    results = []
    for i, case in enumerate(("2x48x4x4", "2x64x4x4")):
        for memory_format in formats:
            for name, ratio in ratios.items():
                if (name, i) == ("GN", 0):
                    continue
                forward = ratio * (1 if name == "BN" else 1 + 0.1 * i)
                both = forward * (1 if name == "BN" else 1.01 + formats.index(memory_format) / 8)
                timings = {
                    what: Timing(7 * value, value, 0.9 * value, 1.2 * value)
                    for what, value in (("forward", forward), ("forward+backward", both))
                }
                results.append(Result(case, memory_format, name, timings))
    return results


def test_bars_show_the_ratios_and_their_quartiles():
    results = some_results()
    figure = ratio_figure(results)
    panels = [(f, what) for f in MEMORY_FORMATS for what in ("forward", "forward+backward")]
    assert [axes.get_title() for axes in figure.axes] == [f"{what}, {f}" for f, what in panels]
    for axes, (memory_format, what) in zip(figure.axes, panels):
        cases = [text.get_text() for text in axes.get_xticklabels()]
        assert cases == ["2x48x4x4", "2x64x4x4"]
        timings = {
            (r.contender, r.case): r.timings[what]
            for r in results
            if r.memory_format == memory_format and r.contender != "BN"
        }
        drawn = {}
        for bars, whiskers in zip(axes.containers, axes.collections, strict=True):
            for bar, whisker in zip(bars, whiskers.get_segments(), strict=True):
                place = bar.get_x() + bar.get_width() / 2
                # From 1 up or down to the ratio.
                top = bar.get_y() + bar.get_height()
                assert bar.get_y() == 1
                assert whisker[:, 0] == pytest.approx([place] * 2)
                (number,) = (t for t in axes.texts if t.xy[0] == pytest.approx(place))
                assert number.get_text() == f"{top:.2f}"
                drawn[bars.get_label(), cases[round(place)]] = (*sorted(whisker[:, 1]), top)
        assert drawn.keys() == timings.keys()
        for key, t in timings.items():
            assert drawn[key] == pytest.approx((t.ratio_low, t.ratio_high, t.ratio))
        low, high = axes.get_ylim()
        assert all(low < t.ratio_low and t.ratio_high < high for t in timings.values())
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["SW{all} eigh", "SW{all} eigh plain", "GN"]
    for name, patch in zip(names, legend.get_patches(), strict=True):
        (bars,) = (bars for bars in figure.axes[0].containers if bars.get_label() == name)
        for bar in bars:
            assert (bar.get_facecolor(), bar.get_hatch()) == (
                patch.get_facecolor(),
                patch.get_hatch(),
            )
    assert len({patch.get_facecolor() for patch in legend.get_patches()}) == 3
    check_texts(figure)


def test_bars_of_operations_stand_beside_the_papers_line():
    growths = [
        Growth("N", "HW >> G", (1, 2, 4), (10.0, 21.0, 39.0), expected=1),
        Growth("G", "HW << G", (16, 32), (5.0, 19.0), expected=2),
    ]
    figure = growth_figure(growths)
    for axes, counts, paper, sizes, variable in zip(
        figure.axes, ([1, 2.1, 3.9], [1, 3.8]), ([1, 2, 4], [1, 4]), ("124", ("16", "32")), "NG"
    ):
        (bars,), (line,) = axes.containers, axes.lines
        assert [bar.get_height() for bar in bars] == pytest.approx(counts)
        assert line.get_ydata() == pytest.approx(paper)
        places = [bar.get_x() + bar.get_width() / 2 for bar in bars]
        assert line.get_xdata() == pytest.approx(places)
        assert [text.get_text() for text in axes.get_xticklabels()] == list(sizes)
        assert axes.get_xticks() == pytest.approx(places)
        assert axes.get_xlabel() == variable
    assert figure.axes[1].get_title() == "HW << G: exponent 1.93"  # log2 3.8
    check_texts(figure)


def test_results_are_written_with_their_machine(tmp_path):
    results = some_results(("contiguous",))
    folder = tmp_path / "new"
    write_results(folder, "layers", results, ratio_figure(results), {"dtype": "float16"}, CPU)
    assert sorted(path.name for path in folder.iterdir()) == ["layers.png", "results.json"]
    content = json.loads((folder / "results.json").read_text())
    assert (content["benchmark"], content["settings"]) == ("layers", {"dtype": "float16"})
    assert content["machine"]["device"] == "cpu"
    assert len(content["results"]) == len(results)
    assert content["results"][1]["timings"]["forward"] == {
        "ms": 7 * 30.0,
        "ratio": 30.0,
        "ratio_low": 27.0,
        "ratio_high": 36.0,
    }


def test_the_table_has_two_decimals():
    timings = {"forward": Timing(1.284, 1.126, 0.994, 2.0)}
    result = Result("2x32x6x6", "contiguous", "GN", timings, {"kept_per_input": 1.076}, 17)
    row = results_table([result]).splitlines()[-1]
    assert row.split() == "2x32x6x6 contiguous GN 1.28 1.13 (0.99 to 2.00) 17 1.08".split()


@pytest.mark.slow
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
    expected = {(name, f) for name in names for f in MEMORY_FORMATS}
    assert {(r["contender"], r["memory_format"]) for r in content["results"]} == expected
    for result in content["results"]:
        assert set(result["timings"]) == {"forward", "forward+backward"}
        assert set(result["memory"]) == {"retained_per_input", "peak_per_input"}
        for timing in result["timings"].values():
            assert timing["ms"] > 0
            assert 0 < timing["ratio_low"] <= timing["ratio"] <= timing["ratio_high"]
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_operators_are_counted_in_both_passes_without_views():
    x = torch.randn(3, 4, requires_grad=True)
    assert count_operators(lambda: x.t()[1:].sin()) == 1
    assert count_operators(lambda: x.new_empty(3).fill_(1)) == 1
    # exp and sum; backward, a gradient of ones, which is expanded, and the product with exp(x).
    assert count_operators(lambda: x.exp().sum().backward()) == 4


def test_host_time_of_each_layer(tmp_path):
    results = benchmark_host(CPU, [("bw", "iw")], ["newton"], num_pergroup=8, rounds=2, warmup=1)
    operators = {result.contender: result.operators for result in results}
    by_kernels = "SW{bw,iw} newton, kernels"
    others = {"BN", "SyncBN", "IN", "GN", "composed", "SW{bw,iw} newton"}
    assert operators.keys() == others | {by_kernels}
    launches = {result.contender: result.launches for result in results}
    assert launches == dict.fromkeys(others) | {by_kernels: 7}
    assert operators["BN"] == 3  # forward, backward, and num_batches_tracked
    assert operators["SW{bw,iw} newton"] > operators["BN"]
    (axes,) = ratio_figure(results).axes
    assert axes.get_title() == "forward+backward, contiguous"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models(model):
    # Convolutions in bfloat16 take minutes on a CPU without instructions for them.
    options = {"batch": 1 + (model == "padded"), "size": (65, 65), "thin": True}
    options["amp"] = model == "resnet50"
    results = benchmark_models([model], CPU, **options, rounds=1, warmup=1)
    placements = {"resnet50": ["BN", "2 x SW"], "mask_rcnn": ["BN", "3 x SW"]}
    placements["padded"] = ["BN", *(f"3 x SW {p}" for p in ("counted", "ignored", "zeroed"))]
    placements = placements.get(model, ["BN", "7 x SW", "14 x SW"])
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
