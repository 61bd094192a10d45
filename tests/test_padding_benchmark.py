"""AP on larger canvases: what is evaluated, and what the tables say."""

import json
import runpy
import sys

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import ImageList
from helpers.detectors import SHAPES, SMALL, images, trained
from helpers.runs import ROOT

from sw_detectron import UserError
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.data import generate_shapes
from sw_detectron.engine import load_config
from sw_detectron.engine.padding_benchmark import enlarged
from sw_detectron.modeling.padding import set_padding

TOOL = str(ROOT / "tools/padding_benchmark.py")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return trained(build_model(load_config(SHAPES, SMALL))).eval()


@torch.no_grad()
def test_a_canvas_is_larger_and_images_stay(model):
    (single,) = images((96, 64))
    before = model.preprocess_image([single])
    with enlarged(model, 150):
        after = model.preprocess_image([single])
    assert isinstance(after, ImageList)
    assert before.image_sizes == after.image_sizes == [(96, 64)]
    assert (*after.tensor.shape[2:],) == (224, 160)  # of 240 and 160, in steps of 32
    assert torch.equal(after.tensor[..., :96, :64], before.tensor)
    assert after.tensor[..., 96:, :].abs().max() == after.tensor[..., 64:].abs().max() == 0
    assert model.preprocess_image([single]).tensor.shape == before.tensor.shape


@torch.no_grad()
def test_zeroed_padding_alone_makes_no_difference(model):
    inputs, same = images((96, 64)), {}
    for padding in ("counted", "ignored", "zeroed"):
        set_padding(model, padding)
        (alone,) = model(inputs)
        with enlarged(model, 150):
            (larger,) = model(inputs)
        scores = [result["instances"].scores for result in (alone, larger)]
        same[padding] = len(scores[0]) == len(scores[1]) and torch.allclose(*scores, atol=1e-5)
    assert same == {"counted": False, "ignored": False, "zeroed": True}
    set_padding(model, "counted")


def test_the_tool_has_a_row_for_each_model_and_treatment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    generate_shapes(tmp_path / "shapes", "val", 3)
    torch.manual_seed(0)
    cfg = load_config(SHAPES, SMALL)
    Checkpointer(trained(build_model(cfg)), str(tmp_path), cfg=cfg).save("model")
    arguments = ["--weights", str(tmp_path / "model.pth"), "--output", str(tmp_path / "out")]
    arguments += ["--config", SHAPES, "--larger", "0,100", "--paddings", "counted,zeroed"]
    monkeypatch.setattr(sys, "argv", ["padding_benchmark.py", *arguments, "--images", "2", *SMALL])
    runpy.run_path(TOOL, run_name="__main__")
    rows = json.loads((tmp_path / "out/results.json").read_text())
    assert [(row["padding"], row["larger"]) for row in rows] == [
        *(("counted", 0), ("counted", 100), ("zeroed", 0), ("zeroed", 100))
    ]
    assert all({"box AP", "mask AP"} <= row.keys() for row in rows)
    assert rows[2]["box AP"] == pytest.approx(rows[3]["box AP"], abs=0.05)
    table = (tmp_path / "out/results.md").read_text()
    assert table.splitlines()[0].split("|")[1:4] == [
        *(" model                       ", " padding   ", " box AP, +0 %   ")
    ]
    assert table in capsys.readouterr().out


@pytest.mark.parametrize("text", ["a", "-1", "2000", ""])
def test_canvases_are_percentages(text, monkeypatch, capsys):
    arguments = ["--weights", "model.pth", "--output", "out", f"--larger={text}"]
    monkeypatch.setattr(sys, "argv", ["padding_benchmark.py", *arguments])
    with pytest.raises(SystemExit):
        runpy.run_path(TOOL, run_name="__main__")
    assert "percentages from 0 to 1000" in capsys.readouterr().err


def test_a_model_without_images_of_its_own_is_refused():
    with pytest.raises(UserError, match="Identity"), enlarged(torch.nn.Identity(), 50):
        pass
