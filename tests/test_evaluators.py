"""Perfect predictions measure 100, whatever ids, slices and labels to ignore a data set has."""

import json

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Boxes, BoxMode, Instances
from helpers.coco import HEIGHT, WIDTH, register_small, small_coco, write_images
from PIL import Image

from sw_detectron.data.check import check_dataset
from sw_detectron.data.slices import register_slice
from sw_detectron.engine import Trainer
from sw_detectron.engine.evaluators import build_evaluator
from sw_detectron.tasks.segmentation import register_folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coco")
    write_images(folder)
    return folder


def perfect(record, masks=True, extra_class=None):
    """What a detector that makes no mistake says of an image."""
    annotations = record["annotations"]
    found = Instances((HEIGHT, WIDTH))
    boxes = [BoxMode.convert(a["bbox"], a["bbox_mode"], BoxMode.XYXY_ABS) for a in annotations]
    found.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))
    found.scores = torch.linspace(0.9, 0.8, len(boxes))
    found.pred_classes = torch.tensor([a["category_id"] for a in annotations], dtype=torch.int64)
    if extra_class is not None and len(boxes):
        found.pred_classes[0] = extra_class
    if masks:
        x0, y0, x1, y1 = (np.array(boxes).reshape(-1, 4).astype(int)).T
        drawn = np.zeros((len(boxes), HEIGHT, WIDTH), bool)
        for i in range(len(boxes)):
            drawn[i, y0[i] : y1[i], x0[i] : x1[i]] = True
        found.pred_masks = torch.from_numpy(drawn)
    return found


def evaluate(name, folder, **kwargs):
    evaluator = build_evaluator(name, str(folder))
    evaluator.reset()
    for record in DatasetCatalog.get(name):
        evaluator.process([record], [{"instances": perfect(record, **kwargs)}])
    return evaluator.evaluate()


@pytest.mark.parametrize("start", [0, 1, -1, 10**6])
@pytest.mark.parametrize("part", ["", "[:2]", "[:3][1:]"])
def test_perfect_predictions_measure_100(folder, tmp_path, start, part):
    content = small_coco()
    for number, annotation in enumerate(content["annotations"]):
        annotation["id"] = start + number
    name = register_small(folder, content) + part
    check_dataset(name)
    results = evaluate(name, tmp_path)
    assert results["bbox"]["AP"] == pytest.approx(100)
    assert results["segm"]["AP"] == pytest.approx(100)


def test_with_test_time_augmentation_too(folder, tmp_path):
    """It asks for an evaluator of its own."""
    content = small_coco()
    for number, annotation in enumerate(content["annotations"]):
        annotation["id"] = number
    name = register_small(folder, content)
    evaluator = Trainer.build_evaluator(None, name, str(tmp_path))
    evaluator.reset()
    for record in DatasetCatalog.get(name):
        evaluator.process([record], [{"instances": perfect(record)}])
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100)


@pytest.mark.parametrize("counted, recall", [(50, 100 / 120), (100, 100 / 120), (120, 1)])
def test_as_many_objects_of_an_image_count_as_the_config_says(folder, tmp_path, counted, recall):
    """COCO's 100 at least. All objects are found, 120 in one place."""
    content = small_coco(images=1)
    content["annotations"] = content["annotations"][:1] * 120
    content["annotations"] = [a | {"id": i} for i, a in enumerate(content["annotations"], start=1)]
    name = register_small(folder, content)
    evaluator = build_evaluator(name, str(tmp_path))
    evaluator.count_up_to(counted)
    evaluator.reset()
    (record,) = DatasetCatalog.get(name)
    evaluator.process([record], [{"instances": perfect(record)}])
    # Of the 101 recalls at which precision is taken, those that are reached have precision 1.
    expected = 100 * (int(recall * 100) + 1) / 101
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(expected)


def test_an_error_is_still_one(folder, tmp_path):
    """One of two objects of one class is missed in each image: half of the recall is reached."""
    content = small_coco()
    for number, annotation in enumerate(content["annotations"]):
        annotation.update(id=number, category_id=3)
    name = register_small(folder, content)
    evaluator = build_evaluator(name, str(tmp_path))
    evaluator.reset()
    for record in DatasetCatalog.get(name):
        evaluator.process([record], [{"instances": perfect(record)[:1]}])
    # The precision is 1 up to a recall of 1/2, and then 0: at 51 of 101 thresholds.
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100 * 51 / 101)


@pytest.mark.parametrize(
    "entries",
    [{"area": None}, {"iscrowd": None}, {"id": None}, {"ignore": 0}, {"bbox": [1, 2, 3, "4"]}],
    ids=str,
)
def test_files_that_lack_what_pycocotools_takes_for_granted(folder, tmp_path, entries):
    content = small_coco()
    del content["info"]
    for annotation in content["annotations"][:1]:
        annotation.update(entries)
    for annotation in content["annotations"][1:2]:
        for key in entries:
            annotation.pop(key, None)
    name = register_small(folder, content)
    check_dataset(name)
    assert evaluate(name, tmp_path)["bbox"]["AP"] == pytest.approx(100)


@pytest.mark.parametrize("found", [True, False])
def test_what_is_to_be_ignored_is_neither_right_when_found_nor_wrong_when_not(
    folder, tmp_path, found
):
    content = small_coco(images=2)
    content["annotations"][0]["ignore"] = 1
    name = register_small(folder, content)
    check_dataset(name)
    evaluator = build_evaluator(name, str(tmp_path))
    evaluator.reset()
    for record in DatasetCatalog.get(name):
        left_out = record["image_id"] == 1 and not found
        objects = record["annotations"][1:] if left_out else record["annotations"]
        evaluator.process([record], [{"instances": perfect({"annotations": objects})}])
    results = evaluator.evaluate()
    assert results["bbox"]["AP"] == results["segm"]["AP"] == pytest.approx(100)


def test_objects_without_masks_are_measured_by_their_boxes(folder, tmp_path, caplog):
    content = small_coco()
    for annotation in content["annotations"]:
        del annotation["segmentation"]
    name = register_small(folder, content)
    results = evaluate(name, tmp_path)
    assert list(results) == ["bbox"]
    assert results["bbox"]["AP"] == pytest.approx(100)
    assert "no masks" in caplog.text
    content["annotations"][0]["segmentation"] = small_coco()["annotations"][0]["segmentation"]
    name = register_small(folder, content)
    assert set(evaluate(name, tmp_path)) == {"bbox", "segm"}
    assert "5 objects without a mask" in caplog.text


def test_detections_of_classes_that_the_data_lack_are_not_counted(folder, tmp_path, caplog):
    name = register_small(folder, small_coco())
    results = evaluate(name, tmp_path, extra_class=2)
    assert results["bbox"]["AP-circle"] == pytest.approx(0)
    assert results["bbox"]["AP-star"] == pytest.approx(100)
    assert "3 detections" in caplog.text


@pytest.mark.parametrize("entries", [{}, {"annotations": []}], ids=str)
def test_without_annotations_nothing_is_measured(folder, tmp_path, caplog, entries):
    content = small_coco()
    del content["annotations"]
    name = register_small(folder, content | entries)
    check_dataset(name)
    assert evaluate(name, tmp_path) == {}
    assert "has no annotations" in caplog.text
    assert json.loads((tmp_path / "coco_instances_results.json").read_text()) == []


def test_a_data_set_of_python_records(folder, tmp_path):
    """Not in COCO's format; its annotations are converted, each time anew."""
    name = register_small(folder, small_coco())
    records = DatasetCatalog.get(name)
    DatasetCatalog.register(f"{name}_records", lambda: records)
    MetadataCatalog.get(f"{name}_records").set(
        thing_classes=["circle", "star"], evaluator_type="coco"
    )
    check_dataset(f"{name}_records")
    register_slice(f"{name}_records[1:]")
    assert evaluate(f"{name}_records[1:]", tmp_path)["bbox"]["AP"] == pytest.approx(100)
    assert evaluate(f"{name}_records", tmp_path)["bbox"]["AP"] == pytest.approx(100)
    del records[0]["annotations"][0]
    assert evaluate(f"{name}_records", tmp_path)["segm"]["AP"] == pytest.approx(100)
    assert not hasattr(MetadataCatalog.get(f"{name}_records"), "json_file")


def test_a_label_to_ignore_other_than_255(tmp_path):
    """Pixels of 200 are not measured, and others are: a quarter of them is wrong."""
    labels = np.array([[0, 0, 1, 1], [200, 200, 200, 200]], np.uint8)
    for kind, pixels in (("images", np.zeros((2, 4, 3), np.uint8)), ("labels", labels)):
        (tmp_path / kind).mkdir()
        Image.fromarray(pixels).save(tmp_path / kind / "a.png")
    register_folders(
        "ignoring", str(tmp_path / "images"), str(tmp_path / "labels"), ["a", "b"], 200
    )
    evaluator = build_evaluator("ignoring", str(tmp_path))
    evaluator.reset()
    predicted = torch.tensor([[0, 0, 0, 1], [1, 1, 0, 0]])
    scores = torch.nn.functional.one_hot(predicted, 2).permute(2, 0, 1).float()
    (record,) = DatasetCatalog.get("ignoring")
    evaluator.process([record], [{"sem_seg": scores}])
    results = evaluator.evaluate()["sem_seg"]
    assert results["pACC"] == pytest.approx(75)
    assert results["IoU-a"] == pytest.approx(100 * 2 / 3)
    assert results["IoU-b"] == pytest.approx(50)
