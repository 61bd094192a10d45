"""The check of a run's data sets before its model is built, by task and meta-architecture."""

import itertools
import logging
import re

import numpy as np
import pytest
import torch
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_train_loader,
)
from detectron2.data.datasets import load_coco_json
from detectron2.structures import BoxMode
from detectron2.utils import comm
from helpers.coco import HEIGHT, WIDTH, register_small, small_coco, write_images
from helpers.runs import refuse
from PIL import Image

from sw_detectron.data.check import check_dataset, spread
from sw_detectron.data.sampler import ResumableTrainingSampler, build_resumable_train_loader
from sw_detectron.data.slices import register_slice
from sw_detectron.engine import argument_parser, launch, load_config, load_lazy_config, setup
from sw_detectron.engine.data_check import check_data, check_datasets, check_lazy_data
from sw_detectron.errors import UserError
from sw_detectron.tasks.classification import register_class_folders
from sw_detectron.tasks.segmentation import register_folders

MASK_RCNN = "shapes_mask_rcnn_R18_FPN_SW.yaml"
SEGMENTOR = "shapes_semantic_R18_SW.yaml"
CLASSIFIER = "classification_shapes_R18_SW.yaml"
names = map("set_{}".format, itertools.count())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coco")
    write_images(folder)
    return folder


@pytest.fixture
def warnings(caplog):
    """What the package has warned of so far."""
    own = lambda r: r.name.startswith("sw_detectron") and r.levelno >= logging.WARNING  # noqa: E731
    return lambda: [r.getMessage() for r in caplog.records if own(r)]


def check(config, train, test, *options, training=True):
    cfg = load_config(config, [*options, "DATASETS.TRAIN", str(train), "DATASETS.TEST", str(test)])
    check_datasets(cfg, training)
    check_data(cfg, training)


def refused(*arguments, **kwargs):
    with pytest.raises(UserError) as caught:
        check(*arguments, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def four_classes():
    content = small_coco()
    content["categories"] += [{"id": 8, "name": "square"}, {"id": 9, "name": "triangle"}]
    return content


# More classes in the data than in the model, and the other way round

DETECTORS = {
    "GeneralizedRCNN": ("mask_rcnn_R50_FPN_SW_2x.yaml", "MODEL.ROI_HEADS.NUM_CLASSES"),
    "Cascade": ("cascade_mask_rcnn_R50_FPN_SW_1x.yaml", "MODEL.ROI_HEADS.NUM_CLASSES"),
    "RetinaNet": ("retinanet_R50_FPN_SW_1x.yaml", "MODEL.RETINANET.NUM_CLASSES"),
}


@pytest.mark.parametrize("config, key", DETECTORS.values(), ids=DETECTORS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_detector_of_too_few_classes(folder, config, key, split):
    name, right = register_small(folder, four_classes()), register_small(folder, small_coco())
    sets = ((name,), ()) if split == "train" else ((right,), (name,))
    message = refused(config, *sets, key, "3")
    assert all(word in message for word in (name, "4 classes", key, "3"))
    check(config, (name,), (name,), key, "4")


def test_a_detector_of_more_classes_is_warned_of(folder, warnings):
    name = register_small(folder, small_coco())
    check(MASK_RCNN, (name,), (name,))
    (warning,) = warnings()
    assert all(word in warning for word in (name, "2 classes", "ROI_HEADS.NUM_CLASSES is 4"))


def test_images_without_annotations_are_looked_at_if_the_config_trains_on_them(folder):
    content, key = small_coco(), "DATALOADER.FILTER_EMPTY_ANNOTATIONS"
    content["images"].append({"id": 4, "file_name": "nowhere.png", "width": 32, "height": 24})
    name = register_small(folder, content)
    check(MASK_RCNN, (name,), (), key, "True")
    assert "nowhere.png" in refused(MASK_RCNN, (name,), (), key, "False")


def panoptic(folder, semantic_classes):
    """Records of objects and label maps, registered as COCO's panoptic sets are."""
    path = folder / f"{register_small(folder, small_coco())}.json"
    labels = folder / "labels.png"
    Image.fromarray(np.tile(np.arange(4, dtype=np.uint8), (HEIGHT, WIDTH // 4))).save(labels)
    name = next(names)
    label = {"sem_seg_file_name": str(labels)}
    DatasetCatalog.register(
        name, lambda: [r | label for r in load_coco_json(str(path), str(folder), name)]
    )
    MetadataCatalog.get(name).set(
        stuff_classes=[f"stuff {i}" for i in range(semantic_classes)],
        ignore_label=255,
        json_file=str(path),
        evaluator_type="coco_panoptic_seg",
    )
    return name


def test_a_panoptic_model_of_other_classes(folder):
    config, number = "panoptic_fpn_R50_SW_1x.yaml", "MODEL.SEM_SEG_HEAD.NUM_CLASSES"
    name = panoptic(folder, 4)
    objects = ["MODEL.ROI_HEADS.NUM_CLASSES", "2"]
    check(config, (name,), (name,), *objects, number, "4")
    for wrong in ("3", "5"):
        message = refused(config, (name,), (), *objects, number, wrong)
        assert all(word in message for word in (name, "4 classes", number, wrong))
    message = refused(config, (name,), (), "MODEL.ROI_HEADS.NUM_CLASSES", "1", number, "4")
    assert "MODEL.ROI_HEADS.NUM_CLASSES" in message
    message = refused(config, (name,), (f"{name}[:2]",), *objects, number, "4")
    assert "as a whole" in message and f"{name!r}" in message
    few = panoptic(folder, 3)
    assert "have the value 3" in refused(config, (few,), (), *objects, number, "3")


@pytest.mark.parametrize("architecture", ["SemanticSegmentor", "SlidingWindowSegmentor"])
def test_a_segmentor_of_other_classes(tmp_path, architecture):
    name = label_maps(tmp_path, [np.arange(3)])
    options = ["MODEL.META_ARCHITECTURE", architecture]
    for number in ("2", "4"):
        message = refused(
            SEGMENTOR, (name,), (), *options, "MODEL.SEM_SEG_HEAD.NUM_CLASSES", number
        )
        assert all(word in message for word in (name, "3 classes", "SEM_SEG_HEAD", number))
    check(SEGMENTOR, (name,), (name,), *options, "MODEL.SEM_SEG_HEAD.NUM_CLASSES", "3")


def test_a_classifier_of_other_classes(tmp_path):
    name = class_folders(tmp_path, ("cat", "dog"))
    key = "MODEL.CLASSIFIER.NUM_CLASSES"
    for number in ("1", "3"):
        message = refused(CLASSIFIER, (name,), (), key, number)
        assert all(word in message for word in (name, "2 classes", key, number))
    check(CLASSIFIER, (name,), (name,), key, "2")


LAZY = {
    "roi_heads": ("mask_rcnn_R50_FPN_SW_2x.py", "model.roi_heads.num_classes", "="),
    "the model": ("mask_rcnn_R50_FPN_SW_2x.py", "model.num_classes", "+"),
}


@pytest.mark.parametrize("where", LAZY)
def test_a_python_config_of_too_few_classes(folder, where):
    """RetinaNet and FCOS have the argument themselves."""
    config, key, plus = LAZY[where]
    name = register_small(folder, four_classes())
    options = [f"dataloader.train.dataset.names={name}", f"dataloader.test.dataset.names={name}"]
    plus = plus.strip("=")
    with pytest.raises(UserError, match=f"'{name}' has 4 classes; set {re.escape(key)} .* 3"):
        check_lazy_data(load_lazy_config(config, [*options, f"{plus}{key}=3"]), training=True)
    check_lazy_data(load_lazy_config(config, [*options, f"{plus}{key}=4"]), training=True)


# Other contradictions between data sets and model


@pytest.mark.parametrize("order", [("star", "circle"), ("circle", "moon")])
def test_one_number_means_one_class_in_all_data_sets(folder, order):
    content = small_coco()
    for category, name in zip(content["categories"], order):
        category["name"] = name
    first, second = register_small(folder, small_coco()), register_small(folder, content)
    for train, test in (((first, second), ()), ((first,), (second,))):
        message = refused(MASK_RCNN, train, test)
        assert first in message and second in message and repr(order[1]) in message


def python_records(**entries):
    annotation = {"bbox": [2, 4, 12, 16], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 1}
    annotation["segmentation"] = [[2, 4, 12, 4, 12, 16, 2, 16]]
    record = {"width": WIDTH, "height": HEIGHT, "annotations": [annotation | entries]}
    return record


def register_records(records, **metadata):
    name = next(names)
    DatasetCatalog.register(name, lambda: records)
    MetadataCatalog.get(name).set(
        **{"thing_classes": ["a", "b"], "evaluator_type": "coco"} | metadata
    )
    return name


@pytest.mark.parametrize(
    "entries, words",
    [
        ({"category_id": 2}, "category_id 2, but the data set has 2 classes"),
        ({"category_id": -1}, "category_id -1"),
        ({"category_id": "a"}, "category_id 'a'"),
        ({"bbox_mode": None}, "bbox_mode None"),
        ({"bbox_mode": BoxMode.XYWH_REL}, "bbox_mode"),
    ],
    ids=str,
)
def test_records_of_ones_own(folder, entries, words):
    record = python_records(**entries) | {"file_name": str(folder / "1.png"), "image_id": 1}
    assert words in refused(MASK_RCNN, (register_records([record]),), ())


@pytest.mark.parametrize(
    "records, metadata, words",
    [
        ([], {}, "no images"),
        ([3], {}, "dicts"),
        (None, {}, "TypeError"),
        ([{}], {}, "no annotations|annotations"),
        ([{"annotations": 3}], {}, "list of dicts"),
        ([{"annotations": [3]}], {}, "list of dicts"),
        ([python_records()], {}, "file_name"),
        ([python_records() | {"file_name": "gone.png"}], {}, "gone.png"),
    ],
    ids=str,
)
def test_records_that_are_none(records, metadata, words):
    assert re.search(words, refused(MASK_RCNN, (register_records(records, **metadata),), ()))


def test_records_that_cannot_be_evaluated(folder):
    record = python_records() | {"file_name": str(folder / "1.png"), "image_id": 1}
    good = register_records([record])
    check(MASK_RCNN, (good,), (good,))
    for records, metadata, words in (
        ([record, record], {}, "image_id"),
        ([{k: v for k, v in record.items() if k != "image_id"}], {}, "image_id"),
        ([record | {"width": "32"}], {}, "width '32'"),
        ([record], {"thing_classes": None}, "thing_classes"),
        ([record], {"evaluator_type": None}, "evaluator_type"),
        ([record], {"evaluator_type": "mine"}, "'mine'"),
    ):
        assert words in refused(MASK_RCNN, (good,), (register_records(records, **metadata),))


def test_an_error_of_ones_own_loader_says_where(folder):
    name = next(names)
    DatasetCatalog.register(name, lambda: {}["boxes"])
    message = refused(MASK_RCNN, (name,), ())
    assert "KeyError" in message and "boxes" in message and "test_data_check.py" in message


def test_records_of_ones_own_stay_as_they_are(folder):
    """What is left out is left out of a copy."""
    record = python_records() | {"file_name": str(folder / "1.png"), "image_id": 1}
    record["annotations"].append(python_records(bbox=[])["annotations"][0])
    name = register_records([record])
    check(MASK_RCNN, (name,), ())
    assert len(DatasetCatalog.get(name)[0]["annotations"]) == 1
    assert len(record["annotations"]) == 2


def test_a_test_set_without_annotations_says_so(folder, warnings):
    content = small_coco()
    del content["annotations"]
    name = register_small(folder, content)
    check(MASK_RCNN, (), (name,), "MODEL.ROI_HEADS.NUM_CLASSES", "2", training=False)
    (warning,) = warnings()
    assert name in warning and "nothing is measured" in warning


def test_a_name_given_twice_is_warned_of(folder, warnings):
    name = register_small(folder, small_coco())
    check(MASK_RCNN, (name, name), (), "MODEL.ROI_HEADS.NUM_CLASSES", "2")
    (warning,) = warnings()
    assert name in warning and "2 times" in warning
    assert len(DatasetCatalog.get(name)) == len(DatasetCatalog.get(name)) == 3


# Slices


def test_a_slice_of_a_slice(folder):
    name = register_small(folder, small_coco())
    check_dataset(f"{name}[1:][1:2]")
    (record,) = DatasetCatalog.get(f"{name}[1:][1:2]")
    assert record["image_id"] == 3
    metadata = MetadataCatalog.get(f"{name}[1:][1:2]")
    assert metadata.thing_classes == ["circle", "star"]
    assert metadata.sliced_from == name
    assert not hasattr(metadata, "json_file")


@pytest.mark.parametrize("part", ["[5:5]", "[3:]", "[2:1]", "[1:][2:]"])
def test_an_empty_slice(folder, part):
    name = register_small(folder, small_coco())
    message = refused(MASK_RCNN, (f"{name}{part}",), ())
    assert "is empty" in message and f"{name}{part}" in message


def test_slices_of_other_data_sets(folder, tmp_path):
    record = python_records() | {"file_name": str(folder / "1.png")}
    own = register_records([record | {"image_id": i} for i in range(4)])
    check(MASK_RCNN, (f"{own}[-3:]",), (f"{own}[:1]",), "MODEL.ROI_HEADS.NUM_CLASSES", "2")
    assert [r["image_id"] for r in DatasetCatalog.get(f"{own}[-3:]")] == [1, 2, 3]
    labels = label_maps(tmp_path, [np.arange(3)] * 3)
    check(SEGMENTOR, (f"{labels}[1:]",), (f"{labels}[:1]",), "MODEL.SEM_SEG_HEAD.NUM_CLASSES", "3")
    classes = class_folders(tmp_path, ("cat", "dog"))
    key = "MODEL.CLASSIFIER.NUM_CLASSES"
    check(CLASSIFIER, (f"{classes}[:1]",), (f"{classes}[1:]",), key, "2")
    missing = next(names)
    register_class_folders(missing, tmp_path / "nowhere")
    assert "nowhere" in refused(CLASSIFIER, (f"{missing}[:1]",), ())
    register_slice("nothing[:1][:2]")
    assert "nothing[:1][:2]" not in DatasetCatalog.list()


# Label maps


def label_maps(folder, maps, ignore_label=255, classes=("wall", "floor", "door")):
    name = next(names)
    for kind in ("images", "labels"):
        (folder / name / kind).mkdir(parents=True)
    for i, labels in enumerate(maps):
        labels = np.tile(np.asarray(labels, np.uint8), (4, 1))
        Image.fromarray(labels).save(folder / name / f"labels/{i}.png")
        Image.fromarray(np.zeros((*labels.shape, 3), np.uint8)).save(
            folder / name / f"images/{i}.png"
        )
    paths = (str(folder / name / kind) for kind in ("images", "labels"))
    register_folders(name, *paths, classes, ignore_label)
    return name


def look(name, number=3, *options):
    check(SEGMENTOR, (name,), (), "MODEL.SEM_SEG_HEAD.NUM_CLASSES", str(number), *options)


def test_masks_of_0_and_255(tmp_path, warnings):
    name = label_maps(tmp_path, [[0, 255, 255, 255]] * 2, classes=("background", "object"))
    look(name, 2)
    (warning,) = warnings()
    for word in (name, "class 1 'object'", "2 of 2", "75%", "255", "IGNORE_VALUE"):
        assert word in warning


def test_masks_with_all_classes_are_fine(tmp_path, warnings):
    look(label_maps(tmp_path, [[0, 255, 1], [2, 0, 0]]))
    look(
        label_maps(tmp_path, [[0, 200, 1], [2, 0, 0]], 200),
        3,
        "MODEL.SEM_SEG_HEAD.IGNORE_VALUE",
        "200",
    )
    assert warnings() == []


def test_a_sample_is_evenly_spread():
    assert spread(range(10), 10) == list(range(10))
    assert spread(range(1000), 8) == list(range(0, 1000, 125))
    assert spread("abcdefg", 3) == ["a", "c", "e"]


def test_many_label_maps_are_sampled(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr("sw_detectron.data.check.spread.__defaults__", (60,))
    look(label_maps(tmp_path, [[0, 1]] * 70))
    (warning,) = warnings()
    assert "class 2 'door'" in warning and "60 of 70" in warning
    # Too few to miss a class of many; but one alone is never enough.
    look(label_maps(tmp_path, [[0, 1]] * 70, classes="abcd"), 4)
    assert len(warnings()) == 1
    look(label_maps(tmp_path, [[255, 1]] * 70, classes="abcd"), 4)
    assert "classes 0 'a', 2 'c', 3 'd'" in warnings()[1]


def test_label_maps_that_do_not_fit(tmp_path):
    number = ["MODEL.SEM_SEG_HEAD.NUM_CLASSES", "3"]
    assert "value 3" in refused(SEGMENTOR, (label_maps(tmp_path, [[0, 3]]),), (), *number)
    name = label_maps(tmp_path, [[0, 1, 2]])
    Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(tmp_path / name / "images/0.png")
    assert "4 x 3" in refused(SEGMENTOR, (name,), (), *number)
    assert "0.png" in refused(SEGMENTOR, (label_maps(tmp_path, [[0, 3]]),), (), *number)


# Classification


def class_folders(folder, classes):
    name = next(names)
    for label in classes:
        (folder / name / label).mkdir(parents=True)
        write_images(folder / name / label, ("1.png",))
    register_class_folders(name, folder / name)
    return name


def test_classes_without_an_image_and_labels_out_of_range(tmp_path, warnings):
    name = class_folders(tmp_path, ("cat", "dog"))
    (tmp_path / name / "dog/1.png").unlink()
    check(CLASSIFIER, (name,), (), "MODEL.CLASSIFIER.NUM_CLASSES", "2")
    (warning,) = warnings()
    assert name in warning and "'dog'" in warning
    for label in (2, -1, None, "cat"):
        own = next(names)
        DatasetCatalog.register(own, lambda label=label: [{"file_name": "x.png", "label": label}])
        MetadataCatalog.get(own).set(
            list_classes=lambda: ("cat", "dog"), evaluator_type="classification"
        )
        message = refused(CLASSIFIER, (own,), (), "MODEL.CLASSIFIER.NUM_CLASSES", "2")
        assert own in message and f"label {label!r}" in message


# Within a run


def test_a_refused_run_leaves_nothing_and_prints_one_line(folder, tmp_path, capsys):
    content = small_coco()
    content["categories"][0]["id"] = 0  # Detectron2 warns of such ids
    for annotation in content["annotations"][::2]:
        annotation["category_id"] = 0
    name = register_small(folder, content)
    options = ["DATASETS.TRAIN", str((name,)), "MODEL.ROI_HEADS.NUM_CLASSES", "1"]
    message = refuse(capsys, "--config", MASK_RCNN, *options, "OUTPUT_DIR", str(tmp_path / "run"))
    assert name in message
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run").exists()


def test_warnings_of_the_check_are_in_the_runs_log(folder, tmp_path):
    content = small_coco()
    content["annotations"][0]["bbox"] = []
    name = register_small(folder, content)
    options = ["DATASETS.TRAIN", str((name,)), "DATASETS.TEST", "()", "OUTPUT_DIR", str(tmp_path)]
    setup(argument_parser("", "").parse_args(["--config", MASK_RCNN, *options]))
    log = (tmp_path / "log.txt").read_text()
    assert log.count("1 have no box") == 1
    assert log.count("Loaded 3 images") == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_size_that_only_training_finds_wrong_is_one_line(folder, workers):
    record = python_records() | {"file_name": str(folder / "1.png"), "height": 99}
    loader = build_detection_train_loader(
        [record],
        mapper=DatasetMapper(is_train=True, augmentations=[], image_format="RGB"),
        total_batch_size=1,
        num_workers=workers,
    )
    args = argument_parser("", "").parse_args(["--config", MASK_RCNN])
    with pytest.raises(SystemExit) as stop:
        launch(lambda args: list(loader), args)
    message = str(stop.value.code)
    assert "\n" not in message
    assert "1.png" in message and "(32, 24)" in message and "(32, 99)" in message


@pytest.mark.parametrize("start", [0, 1, 6, 57])
def test_the_processes_share_the_sequence_from_where_it_goes_on(start):
    """Taken in turn, the images of two processes are the tail of one process's sequence."""

    def sequence(rank, processes, start, length):
        sampler = ResumableTrainingSampler(20, seed=5)
        sampler._rank, sampler._world_size, sampler.start = rank, processes, start
        return list(itertools.islice(iter(sampler), length))

    whole = sequence(0, 1, 0, start + 40)
    parts = [sequence(rank, 2, start, 20) for rank in (0, 1)]
    assert [index for turn in zip(*parts) for index in turn] == whole[start:]


def test_the_workers_of_each_process_draw_numbers_of_their_own(monkeypatch):
    drawn = []
    for rank in (0, 1, 0):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        loader = build_resumable_train_loader(
            dataset=[{"width": 2, "height": 1}],
            mapper=lambda record: torch.rand(()).item(),
            total_batch_size=1,
            aspect_ratio_grouping=False,
            num_workers=1,
            seed=3,
        )
        drawn.append(next(iter(loader)))
    assert drawn[0] != drawn[1] and drawn[0] == drawn[2]
