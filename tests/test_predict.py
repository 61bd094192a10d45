"""Predictions on images, folders and videos: pictures, results in COCO's format, and mistakes."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.data import Metadata, MetadataCatalog
from detectron2.data.detection_utils import read_image
from detectron2.engine import DefaultPredictor
from detectron2.modeling import GeneralizedRCNN, build_model
from detectron2.structures import Boxes, Instances
from PIL import Image
from pycocotools.coco import COCO

from sw_detectron import UserError
from sw_detectron.data import generate_shapes, media
from sw_detectron.engine import load_config
from sw_detectron.engine.prediction import Predictor, find_metadata, predict
from sw_detectron.tasks.classification.data import test_transform as transform
from sw_detectron.tasks.classification.results import classification_results
from sw_detectron.tasks.detection.results import detection_results

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


def run(weights, output, *inputs, confidence=0.0, batch=1) -> list[dict]:
    predict(
        Namespace(
            config_file=SHAPES,
            weights=str(weights) if weights else None,
            inputs=[*map(str, inputs), *TINY],
            output=str(output),
            confidence=confidence,
            batch=batch,
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


def test_a_score_that_equals_the_confidence_is_a_result():
    found = Instances((40, 60))
    found.pred_boxes = Boxes(torch.tensor([[1.0, 2, 30, 30]] * 3))
    found.scores = torch.tensor([0.75, 0.5, 0.25])
    found.pred_classes = torch.tensor([0, 1, 0])
    metadata = Metadata(name="two", thing_classes=["a", "b"])
    frame = np.zeros((40, 60, 3), np.uint8)
    results, _ = detection_results(found, frame, metadata, 0.5)
    assert [result["score"] for result in results] == [0.75, 0.5]


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


SEGMENTOR = """
    MODEL.SEM_SEG_HEAD.NUM_CLASSES 5 MODEL.SEM_SEG_HEAD.NORM BN MODEL.SEM_SEG_HEAD.CONVS_DIM 32
    DATASETS.TEST ('with_things_and_stuff',) MODEL.META_ARCHITECTURE
""".split()
KEYPOINTS = """
    MODEL.KEYPOINT_ON True MODEL.MASK_ON False MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS 3
    MODEL.ROI_HEADS.NUM_CLASSES 1 DATASETS.TEST ('with_keypoints',)
""".split()
FRAME = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)


@pytest.fixture
def _datasets():
    MetadataCatalog.get("with_things_and_stuff").set(
        thing_classes=list("abcd"),
        stuff_classes=list("stuvw"),
        thing_dataset_id_to_contiguous_id={5: 0, 6: 1, 7: 2, 8: 3},
    )
    MetadataCatalog.get("with_keypoints").set(thing_classes=["person"], keypoint_names=list("abc"))
    yield
    MetadataCatalog.remove("with_things_and_stuff")
    MetadataCatalog.remove("with_keypoints")


def predictor_of(config, *overrides, confidence=0.0):
    torch.manual_seed(0)
    cfg = load_config(config, [*TINY, *overrides])
    return Predictor(cfg, find_metadata(cfg), confidence)


@pytest.mark.usefixtures("_datasets")
def test_models_of_other_kinds_give_what_they_know():
    ((found, picture),) = predictor_of(SHAPES, *SEGMENTOR, "PanopticFPN")([FRAME])
    assert found and {r["category_id"] for r in found} <= {5, 6, 7, 8}
    assert all("segmentation" in r and "score" in r for r in found)
    assert picture.shape == (384, 512, 3)
    ((found, picture),) = predictor_of(SHAPES, *SEGMENTOR, "SemanticSegmentor")([FRAME])
    masks = sum(mask_util.decode(r["segmentation"]).astype(int) for r in found)
    assert (masks == np.ones((90, 120))).all()
    assert {r["category_id"] for r in found} <= set(range(5))
    ((found, _),) = predictor_of(SHAPES, *KEYPOINTS)([FRAME])
    assert found and all(len(r["keypoints"]) == 9 for r in found)


@pytest.mark.usefixtures("_datasets")
def test_what_cannot_be_shown_is_one_clear_line():
    proposals = predictor_of(SHAPES, "MODEL.META_ARCHITECTURE", "ProposalNetwork")
    with pytest.raises(UserError, match="gives proposals alone; what can be shown is .*instances"):
        proposals([FRAME])
    nameless = predictor_of(
        SHAPES, *SEGMENTOR, "SemanticSegmentor", "DATASETS.TEST", "('shapes_val',)"
    )
    with pytest.raises(UserError, match="'shapes_val' has no classes of segmentation"):
        nameless([FRAME])


@pytest.mark.parametrize("padding, calls", [("counted", [1, 1, 1, 2, 3]), ("zeroed", [3, 2, 3])])
def test_batches_give_what_single_pictures_give(
    dataset, weights, video, tmp_path, monkeypatch, padding, calls
):
    """Of five images, a file that is none, and a video of three frames."""
    pictures = tmp_path / "pictures"
    shutil.copytree(dataset / "val", pictures)
    (pictures / "000003.png").write_bytes(b"no picture")
    for i in (4, 5):
        image = cv2.imread(str(pictures / f"00000{i - 4}.png"))
        cv2.imwrite(str(pictures / f"00000{i}.png"), image[:, : -20 * i])
    numbers = []
    forward = GeneralizedRCNN.forward

    def counting(self, inputs):
        numbers.append(len(inputs))
        return forward(self, inputs)

    found = []
    for batch in (1, 3):
        numbers.clear()
        with pytest.raises(UserError, match="000003.png"):
            run(
                *(weights, tmp_path / f"by {batch}", pictures, video),
                *("MODEL.SW.PADDING", padding),
                batch=batch,
            )
        monkeypatch.setattr(GeneralizedRCNN, "forward", counting)
        found.append(json.loads((tmp_path / f"by {batch}/predictions.json").read_text()))
    assert numbers == calls
    one_by_one, batched = found
    assert len(one_by_one) == len(batched) == 40  # 5 of each picture
    for expected, actual in zip(one_by_one, batched):
        boxes = actual.pop("bbox"), expected.pop("bbox")
        assert boxes[0] == pytest.approx(boxes[1], abs=1e-2)
        assert actual.pop("score") == pytest.approx(expected.pop("score"), abs=1e-5)
        masks = [mask_util.decode(r.pop("segmentation")) for r in (actual, expected)]
        assert (masks[0] != masks[1]).mean() < 1e-3
        assert actual == expected


CLASSIFIER = "classification_shapes_R18_SW.yaml"


def test_a_classifier_says_its_best_classes_and_their_scores(dataset, tmp_path):
    """Against the model on the image as evaluation prepares it, and the pictures' pixels."""
    cfg = load_config(CLASSIFIER, ["MODEL.DEVICE", "cpu"])
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    torch.save({"model": model.state_dict()}, tmp_path / "model.pth")
    predict(
        Namespace(
            config_file=CLASSIFIER,
            weights=str(tmp_path / "model.pth"),
            inputs=[str(dataset / "val"), "MODEL.DEVICE", "cpu"],
            output=str(tmp_path / "out"),
            confidence=None,
            batch=1,
        )
    )
    found = json.loads((tmp_path / "out/predictions.json").read_text())
    classes = ["circle", "square", "star", "triangle"]
    for number, path in enumerate(sorted((dataset / "val").iterdir()), start=1):
        image = transform(cfg)(Image.open(path).convert("RGB"))
        with torch.no_grad():
            scores = model({"image": image[None]})[0].softmax(0)
        of_image = [r for r in found if r["image_id"] == number]
        assert [r["category_id"] for r in of_image] == scores.argsort(descending=True).tolist()
        assert [r["category_name"] for r in of_image] == [
            classes[r["category_id"]] for r in of_image
        ]
        assert sum(r["score"] for r in of_image) == pytest.approx(1, abs=1e-5)
        assert of_image[0]["score"] == pytest.approx(scores.max().item(), abs=1e-5)
        assert {r["file_name"] for r in of_image} == {str(path)}
        picture, plain = cv2.imread(str(tmp_path / "out" / path.name)), cv2.imread(str(path))
        zoom = picture.shape[0] // plain.shape[0]
        enlarged = plain.repeat(zoom, axis=0).repeat(zoom, axis=1)
        written = (picture != enlarged).any(axis=2)
        assert 0.01 < written.mean() < 0.3


def test_a_classifiers_results_are_at_most_five_of_the_confidence_that_is_asked_for():
    scores = torch.tensor([0.1, 0.3, 0.05, 0.35, 0.12, 0.08])
    classes = ["a", "b", "c", "d", "ä", "f"]
    picture = np.zeros((500, 20, 3), dtype=np.uint8)
    found, _ = classification_results(scores, picture, classes, "letters", 0.0)
    assert [r["category_name"] for r in found] == ["d", "b", "ä", "a", "f"]
    found, drawn = classification_results(scores, picture, classes, "letters", 0.3)
    assert [(r["category_id"], r["category_name"]) for r in found] == [(3, "d"), (1, "b")]
    assert drawn.shape == picture.shape
    with pytest.raises(UserError, match="model knows 6 classes, data set 'letters' has 5"):
        classification_results(scores, picture, classes[:5], "letters", 0.0)


@pytest.mark.slow
def test_standard_error_has_only_lines_for_the_user(dataset, weights, tmp_path):
    """Of a prediction, and of a run that trains, evaluates and knows a CUDA that does not run."""
    environment = os.environ | {"CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"DETECTRON2_DATASETS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    generate_shapes(tmp_path / "shapes", "train", 2)
    generate_shapes(tmp_path / "shapes", "val", 2)
    common = ["--config", SHAPES, *TINY]
    training = f"""
        SOLVER.IMS_PER_BATCH 2 SOLVER.MAX_ITER 1 SOLVER.STEPS () INPUT.MIN_SIZE_TRAIN (64,)
        DATASETS.TRAIN ('shapes_train[:2]',) DATASETS.TEST ('shapes_val[:2]',)
        MODEL.RPN.POST_NMS_TOPK_TRAIN 20 DATALOADER.NUM_WORKERS 1 OUTPUT_DIR {tmp_path}/run
    """.split()
    for command in (
        ["predict.py", str(dataset / "val"), "--output", str(tmp_path), "--weights", str(weights)],
        ["train_net.py", *training],
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / command[0]), *common[:2], *command[1:], *TINY],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        lines = [line.rpartition("\r")[2] for line in done.stderr.splitlines()]
        assert [line for line in lines if line and "frames/s]" not in line] == [], command[0]
        assert "Warning" not in done.stdout


@pytest.mark.slow
def test_the_command_explains_itself_and_fails_in_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "tools/predict.py"), "--config", SHAPES]
    failed = subprocess.run(
        [*command, "none.jpg", "--output", str(tmp_path), "MODEL.DEVICE", "cpu"],
        capture_output=True,
        text=True,
    )
    assert failed.returncode == 1
    assert failed.stderr == f"{command[1]}: error: input 'none.jpg' does not exist\n"
