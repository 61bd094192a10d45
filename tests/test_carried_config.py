"""A checkpoint of a run is enough to use its model: it carries the config and the classes."""

import copy
import json
import shutil
from argparse import Namespace

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import build_model
from helpers.coco import small_coco, write_images
from helpers.runs import TINY, refuse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sw_detectron import SwitchWhiten2d, UserError
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.checkpoint.convert import convert_checkpoint
from sw_detectron.checkpoint.reading import read_file
from sw_detectron.checkpoint.run_record import run_record
from sw_detectron.checkpoint.writing import write_checkpoint
from sw_detectron.engine import argument_parser, launch, load_model, train_or_evaluate
from sw_detectron.engine.carried import carried_metadata
from sw_detectron.engine.prediction import predict
from sw_detectron.engine.setup import load_config

CONFIG = "nuclei_mask_rcnn_R18_FPN_SW.yaml"
SMALL = [*TINY, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0", "MODEL.DEVICE", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three images; category ids 3 and 7."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "annotations").mkdir()
    for split in ("train", "val"):
        (folder / split).mkdir()
        write_images(folder / split)
        (folder / f"annotations/{split}.json").write_text(json.dumps(small_coco(3)))
    return folder


@pytest.fixture(scope="module")
def weights(folder, tmp_path_factory):
    """Of a run with a config of its own, whose data set is gone."""
    output = tmp_path_factory.mktemp("a") / "run_7"
    output.mkdir()
    copied = shutil.copytree(folder, output / "data")
    overrides = [*SMALL, "DATASETS.COCO_FOLDER", str(copied), "MODEL.SW.NUM_PERGROUP", "32"]
    cfg = load_config(CONFIG, overrides)
    DatasetCatalog.get("own_val")
    torch.manual_seed(0)
    Checkpointer(build_model(cfg), str(output), cfg=cfg).save("model_final", iteration=9)
    shutil.rmtree(copied)
    load_config(CONFIG, [])  # another config: own_val is not there any more
    return str(output / "model_final.pth")


def run_predict(output, inputs, weights, config_file=""):
    predict(
        Namespace(
            config_file=config_file,
            weights=weights,
            inputs=[str(part) for part in inputs],
            output=str(output),
            confidence=0.0,
            batch=1,
        )
    )
    return json.loads((output / "predictions.json").read_text())


def test_predictions_are_those_with_the_config_and_the_data_set(folder, weights, tmp_path):
    alone = run_predict(tmp_path / "a", [folder / "val"], weights)
    overrides = [*SMALL, "DATASETS.COCO_FOLDER", folder, "MODEL.SW.NUM_PERGROUP", "32"]
    full = run_predict(tmp_path / "b", [folder / "val", *overrides], weights, CONFIG)
    assert len(alone) > 3
    assert alone == full
    assert {result["category_id"] for result in alone} <= {3, 7}


def test_the_classes_are_those_of_what_is_tested_on(folder, tmp_path):
    """Two data sets may have one class under two names."""
    overrides = [*SMALL, "DATASETS.COCO_FOLDER", str(folder)]
    cfg = load_config(CONFIG, overrides)
    MetadataCatalog.get("own_train").__dict__["thing_classes"] = ["one", "two"]
    names = DatasetCatalog.get("own_val") and MetadataCatalog.get("own_val").thing_classes
    assert names != ["one", "two"]
    assert run_record(cfg).metadata["thing_classes"] == names
    assert run_record(cfg).dataset == "own_val"
    cfg.DATASETS.TEST = ()
    assert run_record(cfg).metadata["thing_classes"] == ["one", "two"]


def test_the_command_line_wins(folder, weights, tmp_path):
    override = ["TEST.DETECTIONS_PER_IMAGE", "1"]
    assert len(run_predict(tmp_path, [folder / "val", *override], weights)) == 3
    cfg, _ = load_model("", weights, ["INPUT.MIN_SIZE_TEST", "96"])
    assert (cfg.INPUT.MIN_SIZE_TEST, cfg.MODEL.SW.NUM_PERGROUP) == (96, 32)
    assert cfg.OUTPUT_DIR == "output/run_7"


def test_evaluation_needs_the_data_alone(folder, weights, tmp_path, capsys):
    overrides = ["MODEL.WEIGHTS", weights, "OUTPUT_DIR", str(tmp_path)]
    line = refuse(capsys, "--eval-only", *overrides)
    assert "'own_val' is not there" in line
    assert "set DATASETS.COCO_FOLDER to the folder" in line
    arguments = ["--eval-only", *overrides, "DATASETS.COCO_FOLDER", str(folder)]
    launch(train_or_evaluate, argument_parser("", "").parse_args(arguments))
    assert "bbox" in json.loads((tmp_path / "results.json").read_text())["results"]


def test_without_a_config_nothing_is_trained(weights, capsys):
    assert "--config is missing" in refuse(capsys, "MODEL.WEIGHTS", weights)
    assert "--config is missing" in refuse(capsys, "--eval-only")


def test_other_checkpoints_want_a_config(tmp_path, capsys):
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "plain.pth")
    line = refuse(capsys, "--eval-only", "MODEL.WEIGHTS", str(tmp_path / "plain.pth"))
    assert "plain.pth' carry no config" in line
    assert "nowhere.pth" in refuse(capsys, "--eval-only", "MODEL.WEIGHTS", "nowhere.pth")


def test_a_classifiers_names_are_carried(tmp_path):
    cfg = load_config("classification_shapes_R18_SW.yaml", ["MODEL.DEVICE", "cpu"])
    Checkpointer(build_model(cfg), str(tmp_path), cfg=cfg).save("model_final")
    metadata = carried_metadata(str(tmp_path / "model_final.pth"))
    assert metadata.list_classes() == ("circle", "square", "star", "triangle")


def refusal(use):
    try:
        use()
    except UserError as error:
        return str(error)
    return ""


PLACES = [("config",), ("dataset",), ("metadata",), ("config", "MODEL"), ("config", "DATASETS")]
PLACES += [("config", "VERSION"), ("config", "DATASETS", "TEST"), ("config", "SEED")]
PLACES += [("metadata", "thing_classes"), ("metadata", "category_ids"), ()]
JUNK = [None, 3, float("nan"), "x", [], [1, "a"], {"A": 1}, {1: 2}, [[]], {"thing_classes": [1]}]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.sampled_from(PLACES), junk=st.sampled_from(JUNK))
def test_a_record_that_is_no_record_is_one_line(weights, tmp_path, place, junk):
    """Whatever stands in its place, it is used as far as it is plain data of the right kind."""
    changed = copy.copy(read_file(weights)) | {"model": {}}
    facts = changed["sw_detectron"] = copy.deepcopy(changed["sw_detectron"])
    *path, last = ("run", *place)
    for key in path:
        facts = facts[key]
    facts[last] = junk
    torch.save(changed, tmp_path / "changed.pth")
    path = str(tmp_path / "changed.pth")
    for use in (lambda: load_config("", ["MODEL.WEIGHTS", path]), lambda: carried_metadata(path)):
        message = refusal(use) or "changed.pth"
        assert "changed.pth" in message or message.startswith("DATASETS."), message
        assert "\n" not in message


def test_a_converted_detector_is_predicted_with_alone(folder, tmp_path):
    """From SyncBN to SW, with what SW needs in the place of what SyncBN had."""
    config = "nuclei_mask_rcnn_R18_FPN_SyncBN.yaml"
    cfg = load_config(config, [*SMALL, "DATASETS.COCO_FOLDER", str(folder)])
    torch.manual_seed(0)
    Checkpointer(build_model(cfg), str(tmp_path), cfg=cfg).save("bn")
    options = {"placement": "segmentation", "norm": "SWb", "num_pergroup": 32}
    conversion = convert_checkpoint(tmp_path / "bn.pth", **options)
    write_checkpoint(tmp_path / "sw.pth", conversion.model, "pth", False, conversion.carried)
    assert len(run_predict(tmp_path / "out", [folder / "val"], str(tmp_path / "sw.pth"))) > 3
    cfg, model = load_model("", str(tmp_path / "sw.pth"), [])
    assert (cfg.MODEL.SW.NORM, cfg.MODEL.SW.NUM_PERGROUP) == ("SWb", 32)
    layers = [m for m in model.modules() if isinstance(m, SwitchWhiten2d)]
    assert len(layers) == 5
    assert all(len(layer.statistics) == 5 for layer in layers)
