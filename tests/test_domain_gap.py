"""The maximum mean discrepancy, and the gap between two sets of images in each layer."""

import csv
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from helpers.figures import check_texts
from PIL import Image

from sw_detectron.analysis import (
    domain_gap,
    domain_gap_figure,
    layer_features,
    median_distance,
    squared_mmd,
)
from sw_detectron.cli import names_of_networks
from sw_detectron.engine import load_config
from sw_detectron.errors import UserError

SCRIPT = Path(__file__).resolve().parents[1] / "tools/domain_gap.py"
SHAPES = "shapes_mask_rcnn_R18_FPN_SW.yaml"
BANDWIDTHS = (0.5, 1.0, 3.0)


def direct_squared_mmd(x, y, bandwidths):
    """Gretton et al., 2012, Eq. 3, pair by pair."""

    def kernel(a, b):
        square = sum((p - q) ** 2 for p, q in zip(a, b))
        return sum(math.exp(-square / (2 * s * s)) for s in bandwidths) / len(bandwidths)

    m, n = len(x), len(y)
    within_x = sum(kernel(x[i], x[j]) for i in range(m) for j in range(m) if i != j)
    within_y = sum(kernel(y[i], y[j]) for i in range(n) for j in range(n) if i != j)
    between = sum(kernel(a, b) for a in x for b in y)
    return within_x / (m * (m - 1)) + within_y / (n * (n - 1)) - 2 * between / (m * n)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_it_is_the_estimate_pair_by_pair(offset):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64) + offset
    y = torch.randn(5, 3, generator=generator, dtype=torch.float64) * 2 + offset + 0.5
    expected = direct_squared_mmd(x.tolist(), y.tolist(), BANDWIDTHS)
    # float64; the squares of differences of values of 1e4 keep 11 digits
    assert squared_mmd(x, y, BANDWIDTHS) == pytest.approx(expected, rel=0, abs=1e-10)


def test_it_is_zero_on_average_for_one_distribution():
    """The estimate is unbiased: the mean of 200 lies within 3 standard errors of 0."""
    generator = torch.Generator().manual_seed(0)
    values = np.array(
        [
            squared_mmd(
                torch.randn(20, 4, generator=generator),
                torch.randn(12, 4, generator=generator),
                BANDWIDTHS,
            )
            for _ in range(200)
        ]
    )
    assert values.min() < 0 < values.max()
    assert abs(values.mean()) < 3 * values.std() / math.sqrt(len(values))


def test_it_grows_with_the_distance_of_the_means():
    """Two normal distributions of covariance I in D dimensions, δ apart, have, for one kernel,
    MMD² = 2 (σ² / (σ² + 2))^(D/2) (1 - exp(-δ² / (2 (σ² + 2))))."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator)
    y = torch.randn(400, 4, generator=generator)
    shifts = (0, 0.25, 0.5, 1, 2, 4)
    gaps = [squared_mmd(x, y + shift, BANDWIDTHS) for shift in shifts]
    assert gaps == sorted(gaps)
    for gap, shift in zip(gaps, shifts):
        expected = 0
        for sigma in BANDWIDTHS:
            width = sigma**2 + 2
            overlap = math.exp(-4 * shift**2 / (2 * width))
            expected += 2 * (sigma**2 / width) ** 2 * (1 - overlap) / len(BANDWIDTHS)
        assert gap == pytest.approx(expected, rel=0, abs=0.02)  # of 400 samples


def test_it_needs_two_samples_of_each():
    with pytest.raises(ValueError, match="got 1 and 3"):
        squared_mmd(torch.zeros(1, 2), torch.zeros(3, 2), BANDWIDTHS)


def test_the_median_distance_is_of_all_pairs():
    x, y = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0]])
    distances = sorted([5.0, 1.0, math.hypot(3, 3)])
    assert median_distance(x, y) == pytest.approx(distances[1], rel=1e-12)
    assert median_distance(torch.zeros(3, 2), torch.zeros(2, 2)) == 1
    # Of ten pairs, six are of equal samples: then it is the mean.
    assert median_distance(torch.zeros(4, 2), torch.tensor([[3.0, 4.0]])) == 4 * 5 / 10


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model(load_config(SHAPES, ["MODEL.DEVICE", "cpu"]))


def test_features_are_those_after_the_norm_of_every_convolution(model):
    resnet = model.backbone.bottom_up
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    features = layer_features(model, [images[:2], images[2:]])
    assert model.training
    assert resnet.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(features) == 17  # the convolutions of a ResNet-18
    assert list(features)[:2] == ["stem.conv1", "res2.0.conv1"]
    model.eval()
    with torch.no_grad():
        stem = resnet.stem.conv1(images)  # with its norm; 3 x 64 x 32 x 32
        block = resnet.res2[0]
        second = block.conv1(resnet.stem(images))  # 3 x 64 x 16 x 16
    for name, values in (("stem.conv1", stem), ("res2.0.conv1", second)):
        size = values.shape[-1] // 4
        cells = values.numpy().reshape(3, 64, 4, size, 4, size).mean(axis=(3, 5)).reshape(3, -1)
        # float32, batches of other sizes
        np.testing.assert_allclose(features[name].numpy(), cells, rtol=1e-4, atol=1e-5)


def test_a_gap_is_seen_where_there_is_one(model):
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(24, 3, 64, 64, generator=generator)
    one = layer_features(model, [images[:12]])
    same = domain_gap(one, layer_features(model, [images[12:]]))
    other = domain_gap(one, layer_features(model, [images[12:] * 3 + 2]))
    assert list(same) == list(other) == list(one)
    assert all(abs(value) < 0.05 for value in same.values())
    assert other["stem.conv1"] > 0.2
    assert max(other.values()) > 10 * max(same.values())


@pytest.mark.parametrize("networks, layers", [(1, 1), (1, 50), (3, 7), (5, 17)])
def test_the_figure_shows_the_numbers(networks, layers):
    gaps = {
        f"mask_rcnn_R50_FPN_SW_2x_number_{n}": {
            f"res2.{i}.conv2": 0.1 * n + 0.01 * i for i in range(layers)
        }
        for n in range(networks)
    }
    figure = domain_gap_figure(gaps)
    lines = [line for line in figure.axes[0].lines if line.get_label() in gaps]
    for line, (name, by_layer) in zip(lines, gaps.items(), strict=True):
        assert line.get_label() == name
        assert list(line.get_ydata()) == list(by_layer.values())
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == list(by_layer)
    assert check_texts(figure) > layers


def test_networks_of_one_config_are_told_apart():
    configs = ["a/sw.yaml", "bn.yaml", "sw.yaml", "sw.yaml", "sw.yaml"]
    assert names_of_networks(configs, ["1", "2", "3", "4", "4"]) == [
        *("sw, 1", "bn", "sw, 3", "sw, 4 (1)", "sw, 4 (2)")
    ]


def test_the_tool_compares_networks(model, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("domain_gap_tool", SCRIPT)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    generator = np.random.default_rng(0)
    for folder, high in (("source", 256), ("target", 60)):
        (tmp_path / folder).mkdir()
        for i in range(3):
            pixels = generator.integers(0, high, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{i}.png")
    weights = tmp_path / "model.pth"
    torch.save({"model": model.state_dict()}, weights)
    folders = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    network = ["--config", SHAPES, "--weights", str(weights)]
    arguments = [*folders, "--output", str(tmp_path / "out"), "--size", "64", *network]
    tool.main(tool.parser().parse_args([*arguments, *network]))
    with open(tmp_path / "out/domain_gap.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 17
    first, second = ([float(row["squared_mmd"]) for row in rows[i : i + 17]] for i in (0, 17))
    assert first == second
    assert "stem.conv1" in capsys.readouterr().out
    tool.main(tool.parser().parse_args([*arguments, *network, *network]))
    with open(tmp_path / "out/domain_gap.csv", newline="") as file:
        networks = [row["network"] for row in csv.DictReader(file)]
    assert [networks.count(name) for name in dict.fromkeys(networks)] == [17, 17, 17]
    assert (tmp_path / "out/domain_gap.svg").stat().st_size > 0
    with pytest.raises(UserError, match="given 2 and --weights 1 times"):
        tool.main(tool.parser().parse_args([*arguments, "--config", SHAPES]))
    one = tmp_path / "one"
    one.mkdir()
    (tmp_path / "target/0.png").rename(one / "0.png")
    with pytest.raises(UserError, match="at least two"):
        tool.main(tool.parser().parse_args([*arguments, "--target", str(one)]))
