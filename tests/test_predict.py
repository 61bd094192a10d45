"""Predictions on images, folders and videos: pictures, results in COCO's format, and mistakes."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.data.detection_utils import read_image
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_model
from pycocotools.coco import COCO

from sw_detectron import UserError
from sw_detectron.data import generate_shapes, media
from sw_detectron.engine import load_config
from sw_detectron.engine.prediction import predict

ROOT = Path(__file__).resolve().parents[1]
SHAPES = "shapes_mask_rcnn_R18_FPN_SW.yaml"
TINY = """
    MODEL.DEVICE cpu INPUT.MIN_SIZE_TEST 64 MODEL.RPN.POST_NMS_TOPK_TEST 10
    TEST.DETECTIONS_PER_IMAGE 5 MODEL.ROI_BOX_HEAD.FC_DIM 32 MODEL.ROI_MASK_HEAD.CONV_DIM 16
""".split()
RETINANET = """
    MODEL.META_ARCHITECTURE RetinaNet MODEL.BACKBONE.NAME build_sw_retinanet_resnet_fpn_backbone
    MODEL.RESNETS.OUT_FEATURES ['res3','res4','res5'] MODEL.FPN.IN_FEATURES ['res3','res4','res5']
    MODEL.RETINANET.NUM_CLASSES 4 MODEL.RETINANET.NUM_CONVS 1
""".split()
VARIANTS = {
    "Mask R-CNN": [],
    "Faster R-CNN": ["MODEL.MASK_ON", "False"],
    "RetinaNet": RETINANET,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Three images with their annotations."""
    root = tmp_path_factory.mktemp("shapes")
    generate_shapes(root, "val", 3)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of an untrained model: it finds something everywhere."""
    path = tmp_path_factory.mktemp("weights") / "model.pth"
    torch.manual_seed(0)
    torch.save({"model": build_model(load_config(SHAPES, TINY)).state_dict()}, path)
    return path


@pytest.fixture
def video(dataset, tmp_path):
    """The three images, each enlarged to 160 x 128, at 5 frames per second."""
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 5.0, (160, 128))
    for image in sorted((dataset / "val").iterdir()):
        writer.write(cv2.resize(cv2.imread(str(image)), (160, 128)))
    writer.release()
    return path


def run(weights, output, *inputs, confidence=0.0) -> list[dict]:
    predict(
        Namespace(
            config_file=SHAPES,
            weights=str(weights) if weights else None,
            inputs=[*map(str, inputs), *TINY],
            output=str(output),
            confidence=confidence,
        )
    )
    return json.loads((output / "predictions.json").read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_those_of_the_predictor_in_the_data_sets_terms(
    dataset, weights, tmp_path, variant
):
    """Against Detectron2's predictor, and pycocotools' view of the data set's annotations."""
    overrides = VARIANTS[variant]
    cfg = load_config(SHAPES, [*TINY, *overrides])
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.0
    if variant == "RetinaNet":
        torch.manual_seed(1)
        weights = tmp_path / "retinanet.pth"
        torch.save({"model": build_model(cfg).state_dict()}, weights)
    found = run(weights, tmp_path / "out", dataset / "val", *overrides)
    assert names(tmp_path / "out") == [
        *("000000.png", "000001.png", "000002.png", "predictions.json")
    ]

    # Predicting the folder in order numbers the images as the data set does.
    loaded = COCO(dataset / "annotations/val.json").loadRes(str(tmp_path / "out/predictions.json"))
    assert len(loaded.getAnnIds()) == len(found) > 0
    assert {r["category_id"] for r in found} <= {1, 2, 3, 4}
    cfg.MODEL.WEIGHTS = str(weights)
    predictor = DefaultPredictor(cfg)
    for image in loaded.imgs.values():
        path = dataset / "val" / image["file_name"]
        expected = predictor(read_image(str(path), "BGR"))["instances"]
        of_image = [r for r in found if r["image_id"] == image["id"]]
        assert all(r["file_name"] == str(path) for r in of_image)
        assert [r["category_id"] - 1 for r in of_image] == expected.pred_classes.tolist()
        boxes = np.array([r["bbox"] for r in of_image])
        boxes[:, 2:] += boxes[:, :2]  # to corners, in float32's precision of some 100 pixels
        np.testing.assert_allclose(boxes, expected.pred_boxes.tensor, atol=1e-4)
        if variant == "Mask R-CNN":
            masks = [mask_util.decode(r["segmentation"]) for r in of_image]
            np.testing.assert_array_equal(masks, expected.pred_masks)
            assert all(isinstance(r["segmentation"]["counts"], str) for r in of_image)
        else:
            assert not any("segmentation" in r for r in of_image)
        picture = cv2.imread(str(tmp_path / "out" / image["file_name"]))
        plain = cv2.resize(cv2.imread(str(path)), picture.shape[1::-1])
        assert np.abs(picture.astype(int) - plain).max() > 50


def test_confidence_is_the_lowest_score(dataset, weights, tmp_path):
    image = dataset / "val/000000.png"
    scores = sorted(r["score"] for r in run(weights, tmp_path / "all", image))
    between = (scores[-3] + scores[-2]) / 2
    confident = run(weights, tmp_path / "some", image, confidence=between)
    assert sorted(r["score"] for r in confident) == scores[-2:]
    assert run(weights, tmp_path / "none", image, confidence=1.0) == []
    untouched = cv2.imread(str(tmp_path / "none/000000.png"))
    assert not np.array_equal(cv2.imread(str(tmp_path / "some/000000.png")), untouched)


@pytest.mark.parametrize("has_encoder", [True, False])
def test_a_video_becomes_an_annotated_video_or_frames(
    dataset, weights, video, tmp_path, monkeypatch, has_encoder
):
    if not has_encoder:
        monkeypatch.setattr(media.cv2, "VideoWriter_fourcc", lambda *code: 0)
    found = run(weights, tmp_path / "out", dataset / "val/000000.png", video)
    assert {(r["image_id"], r["file_name"], r.get("frame")) for r in found} == {
        (1, str(dataset / "val/000000.png"), None),
        *((2 + i, str(video), i) for i in range(3)),
    }
    drawn = "clip.mp4" if has_encoder else "clip"
    assert names(tmp_path / "out") == ["000000.png", drawn, "predictions.json"]
    if has_encoder:
        frames = media.VideoFile(tmp_path / "out/clip.mp4")
        assert (frames.num_frames, frames.fps) == (3, 5.0)
        frames = list(frames)
    else:
        assert names(tmp_path / "out/clip") == ["000000.png", "000001.png", "000002.png"]
        frames = [cv2.imread(str(p)) for p in sorted((tmp_path / "out/clip").iterdir())]
    for frame, original in zip(frames, media.VideoFile(video), strict=True):
        resized = cv2.resize(original, frame.shape[1::-1])
        # Most pixels are under half-transparent masks at most: the picture is the same scene.
        assert np.corrcoef(frame.ravel(), resized.ravel())[0, 1] > 0.5
        assert np.abs(frame.astype(int) - resized).max() > 50


def test_inputs_of_one_name_have_different_pictures(dataset, weights, tmp_path):
    (tmp_path / "a").mkdir()
    copy = tmp_path / "a/000000.png"
    copy.write_bytes((dataset / "val/000001.png").read_bytes())
    run(weights, tmp_path / "out", dataset / "val/000000.png", copy)
    assert names(tmp_path / "out") == ["000000.png", "000000_2.png", "predictions.json"]


def refuse(*arguments, **options) -> str:
    with pytest.raises(UserError) as refused:
        run(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_mistakes_are_one_clear_line(dataset, weights, video, tmp_path):
    out = tmp_path / "out"
    image = dataset / "val/000000.png"
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.mp4").write_bytes(video.read_bytes()[:300])
    (tmp_path / "cut.png").write_bytes(image.read_bytes()[:1000])
    (tmp_path / "text.png").write_text("no image")
    assert "'nothing.png' does not exist" in refuse(weights, out, image, "nothing.png")
    assert "holds no images" in refuse(weights, out, tmp_path / "empty")
    assert "cut.mp4' is not a readable video" in refuse(weights, out, tmp_path / "cut.mp4")
    assert "text.png' is not a readable image" in refuse(weights, out, tmp_path / "text.png")
    assert "cut.png' is not a readable image" in refuse(weights, out, tmp_path / "cut.png")
    assert "INPUT" in refuse(weights, out)
    assert "--weights" in refuse(None, out, image)
    assert "'none.pth'" in refuse("none.pth", out, image)
    assert "--output" in refuse(weights, dataset / "val", image)
    assert "MODEL.SW.GROUPS" in refuse(weights, out, image, "MODEL.SW.GROUPS", "2")
    assert "'coco'" in refuse(weights, out, image, "DATASETS.TEST", "('coco',)")
    assert names(dataset / "val") == ["000000.png", "000001.png", "000002.png"]
    assert not list(out.glob("*"))


def test_a_model_of_more_classes_than_the_data_set_is_refused(dataset, tmp_path):
    overrides = ["MODEL.ROI_HEADS.NUM_CLASSES", "5"]
    cfg = load_config(SHAPES, [*TINY, *overrides])
    torch.manual_seed(0)
    model = build_model(cfg)
    model.roi_heads.box_predictor.cls_score.bias.data[4] = 9.0  # the fifth class, everywhere
    torch.save({"model": model.state_dict()}, tmp_path / "model.pth")
    message = refuse(tmp_path / "model.pth", tmp_path, dataset / "val/000000.png", *overrides)
    assert "more classes than data set 'shapes_val'" in message


def test_the_command_explains_itself_and_fails_in_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "tools/predict.py"), "--config", SHAPES]
    failed = subprocess.run(
        [*command, "none.jpg", "--output", str(tmp_path), "MODEL.DEVICE", "cpu"],
        capture_output=True,
        text=True,
    )
    assert failed.returncode == 1
    assert failed.stderr == f"{command[1]}: error: input 'none.jpg' does not exist\n"
