"""How white the output of SW layers is, against numpy and the reference implementation."""

import csv
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from helpers import reference
from helpers.figures import check_texts
from PIL import Image
from torch import nn

from sw_detectron.analysis import whiteness, whitening_figure, whitening_report, whitening_table
from sw_detectron.analysis.whitening import MOST_ITERATIONS
from sw_detectron.engine import load_config
from sw_detectron.errors import UserError
from sw_detectron.layers import SwitchWhiten2d

SCRIPT = Path(__file__).resolve().parents[1] / "tools/whitening_report.py"
SHAPES = "shapes_mask_rcnn_R18_FPN_SW.yaml"
G = 4


def make_layer(statistics=("bw", "iw"), **options):
    """A layer of 8 channels in two groups, with importance weights and running values."""
    generator = torch.Generator().manual_seed(3)
    layer = SwitchWhiten2d(8, num_pergroup=G, statistics=statistics, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        factor = torch.randn(2, G, G, generator=generator, dtype=torch.float64)
        layer.running_cov.copy_(factor @ factor.mT + 0.5 * torch.eye(G))
        layer.running_mean.copy_(torch.randn(2, G, 1, generator=generator))
    return layer.eval()


def make_input(num_samples=3):
    """Correlated channels, (N, 8, 9, 7), float64."""
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randn(num_samples, 8, 63, generator=generator, dtype=torch.float64)
    mixing = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return (mixing @ pixels).view(num_samples, 8, 9, 7)


def off_diagonal_rms(pixels):
    """Of the correlation of channels (C, L)."""
    correlation = np.corrcoef(pixels)
    rest = correlation[~np.eye(len(correlation), dtype=bool)]
    return math.sqrt((rest**2).mean())


def mixed_covariances(layer, x):
    """Σ̂ of every sample and group, as the paper's Eq. 6 has it, for {bw, iw}."""
    omega = np.exp(layer.sw_var_weight.detach().numpy())
    omega /= omega.sum()
    result = np.empty((len(x), 2, G, G))
    for n, sample in enumerate(x.flatten(2).numpy()):
        for j in range(2):
            own = np.cov(sample[j * G : (j + 1) * G], bias=True)
            result[n, j] = omega[0] * layer.running_cov[j].numpy() + omega[1] * own
            result[n, j] += layer.eps * np.eye(G)
    return result


@pytest.mark.parametrize("num_iterations", [1, 5, 9])
def test_the_inverse_square_root_is_judged_by_the_definitions(num_iterations):
    layer, x = make_layer(num_iterations=num_iterations), make_input()
    measured = whiteness(layer, x)
    covs = mixed_covariances(layer, x)
    # float64; the iteration amplifies rounding by the condition number, about 100
    close = {"rtol": 1e-8, "atol": 1e-10}
    np.testing.assert_allclose(measured.condition.numpy(), np.linalg.cond(covs), **close)
    for n in range(len(x)):
        for j in range(2):
            cov = torch.from_numpy(covs[n, j])
            root = reference.inverse_sqrt(cov, "newton", num_iterations).numpy()
            exact = reference.inverse_sqrt(cov, "eigh", None).numpy()
            residual = np.linalg.norm(root @ covs[n, j] @ root - np.eye(G)) / math.sqrt(G)
            deviation = np.linalg.norm(root - exact) / np.linalg.norm(exact)
            np.testing.assert_allclose(measured.residual[n, j], residual, **close)
            np.testing.assert_allclose(measured.deviation[n, j], deviation, **close)
    assert measured.num_iterations == num_iterations
    assert torch.equal(measured.residuals[num_iterations - 1], measured.residual)


@pytest.mark.parametrize("whitening", ["newton", "eigh"])
@pytest.mark.parametrize("statistics", [("bw", "iw"), ("bw", "iw", "bn", "in", "ln"), ("bn", "ln")])
def test_correlations_are_those_of_the_layers_output(statistics, whitening):
    layer, x = make_layer(statistics, whitening=whitening), make_input()
    measured = whiteness(layer, x)
    with torch.no_grad():
        # correlations know neither γ, but for its sign, nor β
        output = layer(x) * layer.weight.sign().view(-1, 1, 1)
    for n in range(len(x)):
        before, after = (t[n].flatten(1).numpy() for t in (x, output))
        groups = [off_diagonal_rms(after[j * G : (j + 1) * G]) for j in range(2)]
        # float64
        assert measured.input_correlation[n].item() == pytest.approx(off_diagonal_rms(before), 1e-9)
        assert measured.correlation[n].item() == pytest.approx(off_diagonal_rms(after), 1e-9)
        in_group = math.sqrt(np.mean(np.square(groups)))
        assert measured.group_correlation[n].item() == pytest.approx(in_group, 1e-9)


def test_exact_instance_whitening_leaves_no_correlation_in_a_group():
    measured = whiteness(make_layer(("iw",), whitening="eigh"), make_input())
    # ε = 1e-5 beside eigenvalues of 0.1 and more
    assert measured.group_correlation.max() < 1e-3
    assert measured.correlation.min() > 0.1  # between the groups it stays
    assert measured.residual.max() < 1e-10
    assert measured.deviation.max() == 0
    assert measured.num_iterations is None


def test_a_standardizing_set_has_no_iteration():
    layer, x = make_layer(("bn", "in")), make_input()
    measured = whiteness(layer, x)
    assert measured.num_iterations is None
    assert measured.iterations_needed is None
    assert measured.residual.max() < 1e-12
    omega = torch.softmax(layer.sw_var_weight.detach(), 0)
    running = layer.running_cov.diagonal(dim1=-2, dim2=-1)
    own = x.flatten(2).var(dim=-1, correction=0).view(len(x), 2, G)
    variance = omega[0] * running + omega[1] * own + layer.eps
    expected = variance.amax(dim=-1) / variance.amin(dim=-1)
    torch.testing.assert_close(measured.condition, expected)


def test_the_needed_iterations_are_the_first_that_converge():
    measured = whiteness(make_layer(), make_input())
    medians = [residual.median().item() for residual in measured.residuals]
    assert len(medians) == MOST_ITERATIONS
    above_rounding = [median for median in medians if median > 1e-12]
    assert above_rounding == sorted(above_rounding, reverse=True)
    needed = measured.iterations_needed
    assert medians[needed - 1] <= 0.01 < medians[needed - 2]
    # Some groups take longer, and most of them decide.
    measured.residuals[needed - 1, 0, 0] = 1.0
    assert measured.iterations_needed == needed


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model(load_config(SHAPES, ["MODEL.DEVICE", "cpu"]))


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_a_report_has_every_layer_in_order_and_every_image(model, images):
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = whitening_report(model, [images[:3], images[3:]])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    names = ["stem.conv1", "res2.0.conv2", "res3.0.conv1", "res3.1.conv2", "res4.1.conv1"]
    assert list(report) == names
    assert [layer.condition.shape for layer in report.values()] == [
        (4, groups) for groups in (4, 4, 8, 8, 16)
    ]
    whole = whitening_report(model, [images])
    for name in names:
        for field in ("condition", "correlation", "residuals", "deviation"):
            # float32 convolutions, of batches of other sizes
            torch.testing.assert_close(
                getattr(report[name], field), getattr(whole[name], field), rtol=2e-3, atol=1e-5
            )
    stem = model.backbone.bottom_up.stem.conv1
    with torch.no_grad():
        x = nn.functional.conv2d(images, stem.weight, stride=2, padding=3)
    direct = whiteness(stem.norm, x)
    torch.testing.assert_close(whole["stem.conv1"].condition, direct.condition, rtol=1e-3, atol=0)


def test_a_table_gives_the_medians(model, images):
    report = whitening_report(model, [images])
    lines = whitening_table(report).splitlines()
    row = next(line for line in lines if line.startswith("res3.1.conv2")).split()
    layer = report["res3.1.conv2"]
    assert row[1:3] == ["bw,iw", "16"]
    expected = [layer.condition.median(), layer.condition.max(), layer.input_correlation.median()]
    assert [float(value) for value in row[3:6]] == pytest.approx(
        [float(value) for value in expected], rel=0.005
    )
    assert row[8] == "5"
    assert float(row[9]) == pytest.approx(float(layer.residual.median()), rel=0.06)  # two digits
    assert row[11] == str(layer.iterations_needed)


@pytest.mark.parametrize("count", [1, 7, 50])
def test_the_figure_shows_the_medians(count):
    layers = [make_layer(), make_layer(("bn", "in")), make_layer(num_iterations=3)]
    measured = [whiteness(layer, make_input(2)) for layer in layers]
    report = {f"res{2 + i // 12}.{i % 12}.conv2": measured[i % 3] for i in range(count)}
    figure = whitening_figure(report)
    condition, correlation, convergence = figure.axes[:3]
    dots = [line.get_ydata()[0] for line in condition.lines]
    expected = [np.median(layer.condition.numpy()) for layer in report.values()]
    assert dots == pytest.approx(expected, rel=1e-12)
    shown = {line.get_label(): list(line.get_ydata()) for line in correlation.lines}
    assert shown["output, in groups"] == pytest.approx(
        [layer.group_correlation.median().item() for layer in report.values()], rel=1e-12
    )
    (mesh,) = convergence.collections
    corners = mesh.get_coordinates()
    assert corners[0, 0].tolist() == [-0.5, 0.5]
    assert corners[-1, -1].tolist() == [count - 0.5, MOST_ITERATIONS + 0.5]
    mesh = np.ma.getdata(mesh.get_array())
    for column, layer in zip(mesh.T, report.values(), strict=True):
        medians = layer.residuals.flatten(1).median(dim=1)[0].clamp(min=1e-3).numpy()
        np.testing.assert_array_equal(column, medians)
    (used,) = convergence.lines
    assert list(used.get_ydata()) == [w.num_iterations for w in report.values() if w.num_iterations]
    assert check_texts(figure) > count


def test_a_model_without_sw_has_no_report(images):
    backbone = nn.Conv2d(3, 4, 3)
    with pytest.raises(UserError, match="no SW layer"):
        whitening_report(backbone, [images])


def test_the_tool_writes_a_row_for_each_layer_and_image(model, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("whitening_report_tool", SCRIPT)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    generator = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(3):
        pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/{i}.png")
    torch.save({"model": model.state_dict()}, tmp_path / "model.pth")
    arguments = ["--config", SHAPES, "--weights", str(tmp_path / "model.pth"), "--size", "64"]
    arguments += ["--images", str(tmp_path / "images"), "--output", str(tmp_path / "out")]
    tool.main(tool.parser().parse_args([*arguments, "MODEL.SW.NUM_ITERATIONS", "9"]))
    with open(tmp_path / "out/whitening.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["layer"], row["image"]) for row in rows[:4]] == [
        ("stem.conv1", "0"),
        ("stem.conv1", "1"),
        ("stem.conv1", "2"),
        ("res2.0.conv2", "0"),
    ]
    assert len(rows) == 5 * 3
    table = capsys.readouterr().out.splitlines()
    assert next(line for line in table if line.startswith("stem.conv1")).split()[8] == "9"
    for size, words in (("50", "multiples of 32"), ("0", "positive")):
        with pytest.raises((UserError, SystemExit)) as error:
            tool.main(tool.parser().parse_args([*arguments, "--size", size]))
        assert words in str(error.value) + capsys.readouterr().err
