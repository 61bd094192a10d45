"""One's own data by DATASETS.COCO_FOLDER, in the layouts that annotation tools write."""

import json
import logging

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from helpers.coco import HEIGHT, WIDTH, small_coco, write_images
from helpers.runs import TINY, refuse

from sw_detectron.engine import argument_parser, launch, train_or_evaluate
from sw_detectron.engine.setup import load_config
from sw_detectron.errors import UserError

CONFIG = "mask_rcnn_R50_FPN_SW_2x.yaml"
NUM_CLASSES = "MODEL.ROI_HEADS.NUM_CLASSES"


def write(path, content, images=None):
    """An annotation file, and its images in a folder if one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    if images:
        images.mkdir(parents=True, exist_ok=True)
        write_images(images, [image["file_name"] for image in content["images"]])


def coco(folder):
    for year, images in (("train2017", 3), ("val2017", 2)):
        path = folder / f"annotations/instances_{year}.json"
        write(path, small_coco(images), folder / year)
        # What else COCO's own folder of annotations holds.
        for other in ("captions", "person_keypoints"):
            (folder / f"annotations/{other}_{year}.json").write_text("{}")
    return 3, 2


def plain(folder):
    write(folder / "annotations/train.json", small_coco(3), folder / "train")
    write(folder / "annotations/val.json", small_coco(2), folder / "val")
    return 3, 2


def in_images(folder):
    write(folder / "annotations/train.json", small_coco(3), folder / "images/train")
    write(folder / "annotations/val.json", small_coco(2), folder / "images/val")
    return 3, 2


def roboflow(folder):
    for split, images in (("train", 3), ("valid", 2), ("test", 1)):
        content = small_coco(images)
        for category in content["categories"]:
            category["supercategory"] = "my-project"
        heading = {"id": 0, "name": "my-project", "supercategory": "none"}
        content["categories"].insert(0, heading)
        write(folder / split / "_annotations.coco.json", content, folder / split)
    return 3, 2


def cvat(folder):
    path = folder / "annotations/instances_default.json"
    write(path, small_coco(5), folder / "images/default")
    return 4, 1


def label_studio(folder):
    content = small_coco(5)
    write(folder / "result.json", content, folder / "images")
    for image in content["images"]:
        image["file_name"] = f"images/{image['file_name']}"
    (folder / "result.json").write_text(json.dumps(content))
    return 4, 1


LAYOUTS = [coco, plain, in_images, roboflow, cvat, label_studio]


def configure(folder, *opts):
    return load_config(CONFIG, ["DATASETS.COCO_FOLDER", str(folder), *opts])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_the_data_sets_and_what_the_model_needs_follow_the_folder(tmp_path, layout):
    train, val = layout(tmp_path)
    cfg = configure(tmp_path)
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("own_train",), ("own_val",))
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 2
    assert cfg.INPUT.MASK_FORMAT == "polygon"
    assert MetadataCatalog.get("own_val").thing_classes == ["circle", "star"]
    records = {name: DatasetCatalog.get(name) for name in ("own_train", "own_val")}
    assert (len(records["own_train"]), len(records["own_val"])) == (train, val)
    assert [a["category_id"] for a in records["own_train"][0]["annotations"]] == [0, 1]
    assert ("own_test" in DatasetCatalog.list()) == (layout is roboflow)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_folder_trains_and_is_evaluated(tmp_path, layout):
    layout(tmp_path / "data")
    overrides = ["DATASETS.COCO_FOLDER", str(tmp_path / "data"), "SOLVER.MAX_ITER", "2"]
    overrides += ["OUTPUT_DIR", str(tmp_path / "out"), "MODEL.DEVICE", "cpu", *TINY]
    overrides += ["MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64"]
    overrides += ["MODEL.SW.PLACEMENT", "segmentation", "MODEL.WEIGHTS", ""]
    args = argument_parser("", "").parse_args(["--config", CONFIG, *overrides])
    launch(train_or_evaluate, args)
    last = json.loads((tmp_path / "out/metrics.json").read_text().splitlines()[-1])
    assert {"bbox/AP", "segm/AP", "bbox/AP-star"} <= last.keys()
    assert "own_train" in (tmp_path / "out/log.txt").read_text()


def test_the_parts_of_one_file_are_disjoint_and_always_the_same(tmp_path):
    cvat(tmp_path)
    drawn = []
    for _ in range(2):
        configure(tmp_path, "DATASETS.COCO_VAL_SHARE", "0.4")
        parts = [DatasetCatalog.get(name) for name in ("own_train", "own_val")]
        drawn.append([[r["image_id"] for r in part] for part in parts])
    assert drawn[0] == drawn[1]
    assert sorted(sum(drawn[0], [])) == [1, 2, 3, 4, 5]
    assert len(drawn[0][1]) == 2
    with pytest.raises(UserError, match=r"COCO_VAL_SHARE is 1\.0.* between 0 and 1"):
        configure(tmp_path, "DATASETS.COCO_VAL_SHARE", "1.0")


def test_a_file_of_a_part_is_a_data_set_of_its_own(tmp_path):
    plain(tmp_path)
    write(tmp_path / "annotations/val_stained.json", small_coco(1))
    cfg = configure(tmp_path, "DATASETS.TEST", "('own_val_stained', 'own_val[:1]')")
    assert cfg.DATASETS.TEST == ("own_val_stained", "own_val[:1]")
    (record,) = DatasetCatalog.get("own_val_stained")
    assert record["file_name"] == str(tmp_path / "val/1.png")


def test_what_the_user_sets_stays(tmp_path):
    plain(tmp_path)
    opts = [NUM_CLASSES, "5", "INPUT.MASK_FORMAT", "bitmask", "DATASETS.TRAIN", "('own_val',)"]
    cfg = configure(tmp_path, *opts)
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 5
    assert cfg.INPUT.MASK_FORMAT == "bitmask"
    assert cfg.DATASETS.TRAIN == ("own_val",)
    file = tmp_path / "mine.yaml"
    file.write_text(f"_BASE_: {CONFIG}\nMODEL:\n  ROI_HEADS:\n    NUM_CLASSES: 80\n")
    derived = tmp_path / "derived.yaml"
    derived.write_text("_BASE_: mine.yaml\nSEED: 3\n")
    for path in (file, derived):
        cfg = load_config(str(path), ["DATASETS.COCO_FOLDER", str(tmp_path)])
        assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 80
        assert cfg.DATASETS.TRAIN == ("own_train",)


def test_masks_as_run_lengths_want_bitmasks(tmp_path):
    content = small_coco(3)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
    mask[4:16, 2:12] = 1
    rle = mask_util.encode(mask)
    content["annotations"][3]["segmentation"] = rle | {"counts": rle["counts"].decode()}
    write(tmp_path / "annotations/train.json", content, tmp_path / "train")
    write(tmp_path / "annotations/val.json", small_coco(2), tmp_path / "val")
    assert configure(tmp_path).INPUT.MASK_FORMAT == "bitmask"


def test_retinanet_has_its_own_number_of_classes(tmp_path):
    plain(tmp_path)
    cfg = load_config("retinanet_R50_FPN_SW_1x.yaml", ["DATASETS.COCO_FOLDER", str(tmp_path)])
    assert cfg.MODEL.RETINANET.NUM_CLASSES == 2
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 80


def test_another_folder_takes_the_place_of_the_first(tmp_path):
    roboflow(tmp_path / "a")
    plain(tmp_path / "b")
    configure(tmp_path / "a")
    configure(tmp_path / "b")
    assert "own_test" not in DatasetCatalog.list()
    assert DatasetCatalog.get("own_train")[0]["file_name"].startswith(str(tmp_path / "b"))


def test_the_heading_of_a_project_stays_if_objects_have_it(tmp_path):
    roboflow(tmp_path)
    path = tmp_path / "train/_annotations.coco.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["category_id"] = 0
    path.write_text(json.dumps(content))
    configure(tmp_path)
    assert MetadataCatalog.get("own_train").thing_classes == ["my-project", "circle", "star"]


def nothing(folder):
    (folder / "train").mkdir()


def no_json(folder):
    plain(folder)
    (folder / "annotations/val.json").write_text('{"images": [')


def a_list(folder):
    plain(folder)
    (folder / "annotations/val.json").write_text("[]")


def images_elsewhere(folder):
    plain(folder)
    (folder / "train").rename(folder / "pictures")


def one_image(folder):
    write(folder / "result.json", small_coco(1), folder / "images")


def other_classes(folder):
    plain(folder)
    content = small_coco(2)
    content["categories"][0]["name"] = "disc"
    (folder / "annotations/val.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (nothing, ["has no annotations", "_annotations.coco.json", "result.json"]),
        (no_json, ["val.json", "cannot be read"]),
        (a_list, ["val.json", "not of COCO's format"]),
        (images_elsewhere, ["train.json", "first image '1.png' is not there", "/images"]),
        (one_image, ["result.json", "too few images"]),
        (other_classes, ["own_train", "own_val", "'circle' in one and 'disc' in the other"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path, capsys, break_it, words):
    break_it(tmp_path)
    line = refuse(capsys, "--config", CONFIG, "DATASETS.COCO_FOLDER", str(tmp_path), *WITHOUT)
    assert all(word in line for word in words), line


WITHOUT = ["MODEL.WEIGHTS", "", "OUTPUT_DIR", "unused", "MODEL.DEVICE", "cpu"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    missing = str(tmp_path / "nowhere")
    line = refuse(capsys, "--config", CONFIG, "DATASETS.COCO_FOLDER", missing, *WITHOUT)
    assert f"'own_train' is not there: DATASETS.COCO_FOLDER {missing!r} is no folder" in line
    line = refuse(capsys, "--config", "nuclei_mask_rcnn_R18_FPN_SW.yaml", *WITHOUT)
    assert "'own_train' is not there: DATASETS.COCO_FOLDER '' is no folder" in line


def test_it_is_said_how_one_file_was_split(tmp_path, caplog):
    cvat(tmp_path)
    with caplog.at_level(logging.INFO, "sw_detectron"):
        configure(tmp_path)
    assert "a share of 0.2 of its images" in caplog.text
    assert f"{NUM_CLASSES} 2" in caplog.text
