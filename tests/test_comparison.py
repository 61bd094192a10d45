"""Several runs in one figure."""

import numpy as np
import pytest

from sw_detectron import UserError
from sw_detectron.analysis import comparison_figure
from sw_detectron.analysis.drawing import STATISTIC_COLORS

ITERATIONS = np.array([19.0, 39.0, 59.0])


def run(loss, **ratios):
    """What a run recorded: its loss, and the ratio bw of single layers."""
    series = {"total_loss": (ITERATIONS, np.array(loss))}
    for layer, bw in ratios.items():
        for moment in ("mean", "cov"):
            series[f"sw/{layer}/{moment}/bw"] = (ITERATIONS, np.array(bw))
            series[f"sw/{layer}/{moment}/iw"] = (ITERATIONS, 1 - np.array(bw))
    return series


def lines(axes):
    return {line.get_color(): (line.get_xdata(), line.get_ydata()) for line in axes.lines}


def test_curves_are_the_recorded_values_and_the_mean_over_layers():
    runs = {
        "bn": run([3.0, 2.0, 1.5]),
        "sw": run([3.0, 1.0, 0.5], stem=[0.5, 0.6, 0.8], res2=[0.5, 0.4, 0.2]),
    }
    figure = comparison_figure(runs, ["total_loss"])
    loss, mean, cov = figure.axes
    values = [line.get_ydata().tolist() for line in loss.lines]
    assert values == [[3.0, 2.0, 1.5], [3.0, 1.0, 0.5]]
    for axes in (mean, cov):
        assert len(axes.lines) == 2
        x, bw = lines(axes)[STATISTIC_COLORS["bw"]]
        assert x.tolist() == ITERATIONS.tolist()
        np.testing.assert_allclose(bw, [0.5, 0.5, 0.5], rtol=1e-12)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["bn", "sw", "bw", "iw"]


def test_layers_that_a_resumed_run_has_no_more_are_averaged_while_they_are_there():
    series = run([3.0, 2.0, 1.0], stem=[0.5, 0.6, 0.8])
    for moment in ("mean", "cov"):
        series[f"sw/res2/{moment}/bw"] = (ITERATIONS[:1], np.array([0.1]))
        series[f"sw/res3/{moment}/iw"] = (ITERATIONS[1:], np.array([1.0, 1.0]))
    _, _, cov = comparison_figure({"sw": series}, ["total_loss"]).axes
    x, bw = lines(cov)[STATISTIC_COLORS["bw"]]
    assert x.tolist() == ITERATIONS.tolist()
    np.testing.assert_allclose(bw, [0.3, 0.3, 0.4], rtol=1e-12)
    np.testing.assert_allclose(lines(cov)[STATISTIC_COLORS["iw"]][1], [0.25, 0.7, 0.6], rtol=1e-12)


def test_runs_without_sw_have_no_panel_of_ratios():
    assert len(comparison_figure({"bn": run([1.0, 1.0, 1.0])}, ["total_loss"]).axes) == 1


def test_a_metric_that_no_run_recorded_is_one_clear_line():
    with pytest.raises(UserError, match="'bbox/AP'; there are total_loss$"):
        comparison_figure({"sw": run([1.0, 1.0, 1.0], stem=[0.5, 0.5, 0.5])}, ["bbox/AP"])
