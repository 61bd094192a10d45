"""Importance ratios from runs and checkpoints, and their figures."""

import csv
import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.figures import check_texts
from matplotlib.colors import to_hex
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from sw_detectron.analysis import (
    average_ratios,
    average_ratios_figure,
    final_ratios_figure,
    importance_curves_figure,
    importance_ratios,
    read_importance,
    save_figure,
)
from sw_detectron.analysis.drawing import STATISTIC_COLORS
from sw_detectron.analysis.importance import guess_statistics
from sw_detectron.analysis.importance_results import short_names
from sw_detectron.errors import UserError
from sw_detectron.layers import STATISTICS, SwitchWhiten2d

SCRIPT = Path(__file__).resolve().parents[1] / "tools/plot_importance.py"
ITERATIONS = np.arange(19, 200, 20)
SWA = ("bw", "iw")


def load_tool():
    spec = importlib.util.spec_from_file_location("plot_importance", SCRIPT)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def layer_names(count):
    return ["stem.conv1", *(f"res{2 + i // 12}.{i % 12}.conv2" for i in range(count - 1))]


def make_curves(layers, statistics=STATISTICS, seed=0):
    """Ratios that move from equal to random ones: key of the record -> (iterations, ratios)."""
    generator = np.random.default_rng(seed)
    curves = {}
    for layer in layers:
        for moment in ("mean", "cov"):
            final = generator.normal(size=(len(statistics), 1)) * 2
            ratios = np.exp(final * ITERATIONS / ITERATIONS[-1])
            for name, values in zip(statistics, ratios / ratios.sum(axis=0)):
                curves[f"sw/{layer}/{moment}/{name}"] = values
    return curves


def write_run(folder, curves, tail=""):
    """As Detectron2 writes them: keys sorted, so that "stem" comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        {"iteration": int(iteration), "total_loss": 1.0} | {k: v[i] for k, v in curves.items()}
        for i, iteration in enumerate(ITERATIONS)
    ]
    lines = [json.dumps(record, sort_keys=True) for record in records]
    (folder / "metrics.json").write_text("\n".join(lines) + "\n" + tail)
    return folder


def as_nested(curves, pick):
    nested = {}
    for key, values in curves.items():
        _, layer, moment, statistic = key.split("/")
        nested.setdefault(layer, {}).setdefault(moment, {})[statistic] = pick(values)
    return nested


def final(curves):
    return as_nested(curves, lambda values: float(values[-1]))


@pytest.fixture
def network():
    """Three layers with random importance weights, one of them tied."""
    torch.manual_seed(0)
    model = nn.Sequential(
        SwitchWhiten2d(16), SwitchWhiten2d(16, statistics=STATISTICS), SwitchWhiten2d(16)
    )
    model[2] = SwitchWhiten2d(16, tie_weight=True)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("source", ["folder", "metrics.json", "events", "event file"])
def test_a_run_gives_its_curves_in_the_order_of_the_network(tmp_path, source):
    layers = ["stem.conv1", "res2.1.conv2", "res3.2.conv2", "res3.10.conv2", "backbone.top.norm"]
    curves = make_curves(layers)
    path = tmp_path / "run"
    if source.startswith("event"):
        writer = SummaryWriter(path)
        for i, iteration in enumerate(ITERATIONS):
            for key, values in curves.items():
                writer.add_scalar(key, values[i], iteration)
        writer.close()
        if source == "event file":
            (path,) = path.iterdir()
    else:
        path = write_run(path, curves)
        path = path / "metrics.json" if source == "metrics.json" else path
    importance = read_importance(path)
    assert importance.name == str(tmp_path / "run")
    assert list(importance.curves) == list(importance.ratios) == layers
    for key, expected in curves.items():
        _, layer, moment, statistic = key.split("/")
        iterations, values = importance.curves[layer][moment][statistic]
        assert list(iterations) == list(ITERATIONS)
        # events are float32
        assert values == pytest.approx(expected, rel=0, abs=1e-7 if "event" in source else 0)
        ratio = importance.ratios[layer][moment][statistic]
        assert ratio == pytest.approx(expected[-1], rel=0, abs=1e-7 if "event" in source else 0)
    assert list(importance.ratios["stem.conv1"]["cov"]) == list(STATISTICS)


def test_given_statistics_stand_for_the_weights_in_the_layers_order(tmp_path):
    """A layer keeps its weights in the order of `STATISTICS`, however the user lists them."""
    weights = torch.tensor([0.0, 1.0])  # of bn, ln
    state = {"stem.norm.sw_mean_weight": weights, "stem.norm.sw_var_weight": 2 * weights}
    torch.save({"model": state}, tmp_path / "model.pth")
    bn, ln = 1 / (1 + np.e), np.e / (1 + np.e)
    for given in (["ln", "bn"], ["bn", "ln"]):
        (layer,) = read_importance(tmp_path / "model.pth", given).ratios.values()
        assert layer["mean"] == pytest.approx({"bn": bn, "ln": ln}, rel=1e-6)
        assert layer["cov"]["ln"] == pytest.approx(1 / (1 + np.exp(-2)), rel=1e-6)


def test_a_checkpoint_gives_what_the_model_has(network, tmp_path):
    torch.save({"model": network.state_dict(), "iteration": 3}, tmp_path / "model.pth")
    # The wide layer makes the network; its neighbours are of two weights.
    ratios = read_importance(tmp_path / "model.pth").ratios
    expected = importance_ratios(network)
    assert list(ratios) == list(expected) == ["0", "1", "2"]
    for layer, module in zip(("0", "1", "2"), network):
        tied = module.sw_var_weight is None
        weights = {
            "mean": module.sw_mean_weight,
            "cov": module.sw_mean_weight if tied else module.sw_var_weight,
        }
        for moment, weight in weights.items():
            exponentials = np.exp(weight.detach().double().numpy())
            softmax = dict(zip(module.statistics, exponentials / exponentials.sum()))
            assert ratios[layer][moment] == pytest.approx(softmax, rel=1e-12)
            assert expected[layer][moment] == pytest.approx(softmax, rel=1e-6)  # float32


@pytest.mark.parametrize(
    "key, layer",
    [
        ("backbone.bottom_up.res2.1.conv2.norm", "res2.1.conv2"),
        ("module.backbone.stem.conv1.norm", "stem.conv1"),
        ("stem.conv1.norm", "stem.conv1"),
        ("module.layer1.1.sw2", "layer1.1.sw2"),
        ("sw1", "sw1"),
        ("backbone.fpn_lateral2.norm", "backbone.fpn_lateral2.norm"),
        ("roi_heads.box_head.conv1.norm", "roi_heads.box_head.conv1.norm"),
    ],
)
@pytest.mark.parametrize("kind", ["pth", "pkl"])
def test_layers_of_a_checkpoint_have_the_names_of_the_records(tmp_path, key, layer, kind):
    weights = {f"{key}.sw_mean_weight": torch.tensor([0.0, np.log(3)])}
    weights[f"{key}.sw_var_weight"] = torch.zeros(2)
    path = tmp_path / f"model.{kind}"
    if kind == "pth":
        torch.save(weights, path)
    else:
        arrays = {name: weight.numpy() for name, weight in weights.items()}
        path.write_bytes(pickle.dumps({"model": arrays, "__author__": "x"}))
    ratios = read_importance(path).ratios
    assert ratios == {
        layer: {
            "mean": pytest.approx({"bw": 0.25, "iw": 0.75}),
            "cov": pytest.approx({"bw": 0.5, "iw": 0.5}),
        }
    }


def test_sets_are_guessed_by_the_stated_rule():
    initial = torch.eye(4).expand(2, 4, 4)
    diagonal = initial * torch.arange(1.0, 5)
    full = initial + 0.1
    expected = {
        (2, None): SWA,
        (5, None): STATISTICS,
        (3, "diagonal"): ("bn", "in", "ln"),
        (3, "full"): ("bw", "iw", "ln"),
        (1, "full"): ("bw",),
        (1, "diagonal"): ("bn",),
        (1, "initial"): ("iw",),
        (4, "full"): None,
        (3, None): None,
        (6, "full"): None,
    }
    covs = {None: None, "initial": initial, "diagonal": diagonal, "full": full}
    assert {key: guess_statistics(key[0], covs[key[1]]) for key in expected} == expected


def test_a_given_set_overrides_the_guess(tmp_path):
    torch.save({"sw1.sw_mean_weight": torch.zeros(2)}, tmp_path / "model.pth")
    ratios = read_importance(tmp_path / "model.pth", ["ln", "bn"]).ratios
    assert ratios["sw1"]["cov"] == {"bn": 0.5, "ln": 0.5}


@pytest.mark.parametrize(
    "weights, statistics, words",
    [
        ({"sw1.sw_mean_weight": torch.zeros(4)}, None, ["4 importance weights", "--statistics"]),
        ({"sw1.sw_mean_weight": torch.zeros(2)}, ["bw"], ["not the 1 of bw"]),
        ({"bn1.weight": torch.zeros(4)}, None, ["no SW layer"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, weights, statistics, words):
    torch.save(weights, tmp_path / "model.pth")
    with pytest.raises(UserError) as error:
        read_importance(tmp_path / "model.pth", statistics)
    assert all(word in str(error.value) for word in ["model.pth", *words])
    assert "\n" not in str(error.value)


def test_a_run_without_records_of_sw_is_named(tmp_path):
    with pytest.raises(UserError, match="run has no records of SW layers"):
        read_importance(write_run(tmp_path / "run", {}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="Cannot read metrics from .*empty"):
        read_importance(tmp_path / "empty")


def test_a_line_cut_short_is_skipped(tmp_path):
    curves = make_curves(["stem.conv1"])
    run = write_run(tmp_path / "run", curves, tail='{"iteration": 219, "sw/stem.conv1/mean/bw": 0.')
    assert read_importance(run).ratios == {
        layer: {moment: pytest.approx(ratios, rel=1e-12) for moment, ratios in moments.items()}
        for layer, moments in final(curves).items()
    }


def test_averages_are_over_layers_and_sum_to_one():
    ratios = {
        "a": {"mean": {"bw": 0.2, "iw": 0.8}, "cov": {"bw": 1.0, "iw": 0.0}},
        "b": {"mean": {"bn": 0.5, "in": 0.3, "ln": 0.2}, "cov": {"bn": 0.1, "in": 0.1, "ln": 0.8}},
    }
    assert average_ratios(ratios) == {
        "mean": pytest.approx({"bw": 0.1, "iw": 0.4, "bn": 0.25, "in": 0.15, "ln": 0.1}),
        "cov": pytest.approx({"bw": 0.5, "iw": 0.0, "bn": 0.05, "in": 0.05, "ln": 0.4}),
    }


def by_color(artists):
    """The artists by statistic; each has its colour."""
    names = {color.lower(): name for name, color in STATISTIC_COLORS.items()}
    found = {}
    for artist in artists:
        found.setdefault(names[to_hex(artist.get_facecolor())], []).append(artist)
    return found


@pytest.mark.parametrize("count", [1, 7, 50])
def test_curves_show_the_ratios(count):
    layers = layer_names(count)
    curves = make_curves(layers)
    figure = importance_curves_figure(as_nested(curves, lambda values: (ITERATIONS, values)))
    assert [axes.get_title() for axes in figure.axes] == layers
    for axes, layer in zip(figure.axes, layers):
        assert len(axes.lines) == 2 * len(STATISTICS)
        for line in axes.lines:
            name = {v.lower(): k for k, v in STATISTIC_COLORS.items()}[to_hex(line.get_color())]
            moment = {"-": "cov", "--": "mean"}[line.get_linestyle()]
            assert list(line.get_xdata()) == list(ITERATIONS)
            assert list(line.get_ydata()) == list(curves[f"sw/{layer}/{moment}/{name}"])
    assert check_texts(figure) > count


@pytest.mark.parametrize("count", [1, 7, 50])
def test_bars_of_layers_have_the_height_of_the_ratios(count):
    layers = layer_names(count)
    ratios = final(make_curves(layers))
    figure = final_ratios_figure(ratios)
    for axes, moment in zip(figure.axes, ("mean", "cov"), strict=True):
        bottoms = np.zeros(count)
        bars = by_color(axes.patches)
        assert list(bars) == list(STATISTICS)
        for name in STATISTICS:
            heights = [bar.get_height() for bar in bars[name]]
            expected = [ratios[layer][moment][name] for layer in layers]
            assert heights == pytest.approx(expected, rel=0, abs=1e-12)  # float64
            assert [bar.get_y() for bar in bars[name]] == pytest.approx(bottoms, abs=1e-12)
            bottoms += heights
    assert [t.get_text() for t in figure.axes[-1].get_xticklabels()] == layers
    assert check_texts(figure) > count


@pytest.mark.parametrize("count", [1, 3, 20])
def test_bars_of_runs_have_the_length_of_the_averages(count):
    averages = {
        f"experiments/{i}/a_run_with_a_long_name_{i}": average_ratios(
            final(make_curves(layer_names(3), STATISTICS if i % 2 else SWA, seed=i))
        )
        for i in range(count)
    }
    figure = average_ratios_figure(averages)
    used = STATISTICS if count > 1 else SWA
    for axes, moment in zip(figure.axes, ("mean", "cov"), strict=True):
        bars = by_color(axes.patches)
        assert list(bars) == list(used)
        for name in used:
            widths = [bar.get_width() for bar in bars[name]]
            expected = [run[moment].get(name, 0) for run in averages.values()]
            assert widths == pytest.approx(expected, rel=0, abs=1e-12)  # float64
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert all(name.endswith(label.lstrip("…")) for name, label in zip(averages, labels))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(used)
    assert check_texts(figure) > count


def test_the_same_figure_gives_the_same_file(tmp_path):
    for name in ("a", "b"):
        figure = final_ratios_figure(final(make_curves(["stem.conv1"])))
        save_figure(figure, tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_tool_writes_figures_and_numbers_of_different_networks(network, tmp_path, capsys):
    curves = {
        "first": make_curves(layer_names(3)),
        "second": make_curves(["stem.conv1", "res4.1.conv1"], SWA, seed=1),
    }
    runs = [write_run(tmp_path / name / "output", values) for name, values in curves.items()]
    torch.save(network.state_dict(), tmp_path / "model.pth")
    tool = load_tool()
    arguments = [*map(str, runs), str(tmp_path / "model.pth"), "--output", str(tmp_path / "out")]
    tool.main(tool.parser().parse_args(arguments))

    names = ["average", "first_output_curves", "first_output_layers", "second_output_curves"]
    names += ["second_output_layers", f"{tmp_path.name}_model_layers"]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "svg", "csv")}
    with open(tmp_path / "out/average.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name, values in curves.items():
        ratios = final(values)
        for moment in ("mean", "cov"):
            written = {
                row["statistic"]: float(row["ratio"])
                for row in rows
                if row["run"] == f"{name}/output" and row["moment"] == moment
            }
            layers = [by_moment[moment] for by_moment in ratios.values()]
            means = {k: np.mean([layer[k] for layer in layers]) for k in layers[0]}
            assert written == pytest.approx(means, rel=1e-12)
    with open(tmp_path / "out/second_output_curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(curves["second"]) * len(ITERATIONS)
    for row in rows:
        values = curves["second"]["sw/{layer}/{moment}/{statistic}".format(**row)]
        assert float(row["ratio"]) == values[list(ITERATIONS).index(int(row["iteration"]))]
    assert f"{tmp_path}/out/average.png: 3 networks" in capsys.readouterr().out


def test_names_of_runs_are_as_short_as_they_can_be():
    assert short_names(["/a/run"]) == ["run"]
    assert short_names(["/a/x/run", "/a/y/run"]) == ["x/run", "y/run"]
    assert short_names(["/a/run", "/a/run"]) == ["run (1)", "run (2)"]
    assert short_names(["/a/one run", "/a/one_run"]) == ["one run (1)", "one_run (2)"]


@pytest.mark.slow
def test_mistakes_are_one_clear_line(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "nowhere.pth")]
    failed = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    (line,) = [line for line in failed.stderr.splitlines() if "error" in line]
    assert "nowhere.pth" in line
    assert "Traceback" not in failed.stderr
