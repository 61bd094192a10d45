"""Annotation files of COCO's format, valid and not: refused in a line, or read without what is
unusable, by the data set's check and by the evaluator alike."""

import copy
import json
import math

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data import transforms as T
from helpers.coco import HEIGHT, WIDTH, register_small, small_coco, write_images
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sw_detectron.data.annotations import mend_coco, usable_mask
from sw_detectron.data.check import Classes, Wanted, check_contents, check_dataset
from sw_detectron.errors import UserError
from sw_detectron.tasks.detection.check import check_objects

CHECKS = {"thing_classes": check_objects}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coco")
    write_images(folder)
    return folder


def wanted(number=2, mask_format="polygon", filter_empty=True):
    classes = {"thing_classes": Classes("MODEL.ROI_HEADS.NUM_CLASSES", number)}
    return Wanted(classes, mask_format, filter_empty=filter_empty)


def check(name, training=True, **kwargs):
    check_dataset(name)
    train, test = ([name], []) if training else ([], [name])
    check_contents(train, test, wanted(**kwargs), CHECKS)
    return DatasetCatalog.get(name)


def refused(name, **kwargs):
    with pytest.raises(UserError) as caught:
        check(name, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert name in message
    return message


def changed(change):
    content = small_coco()
    change(content)
    return content


def test_a_valid_file_is_read_as_detectron2_reads_it(folder, caplog):
    name = register_small(folder, small_coco())
    expected = copy.deepcopy(DatasetCatalog.get(name))
    assert check(name) == expected
    assert DatasetCatalog.get(name) == expected  # the second time it is loaded anew
    assert not [r for r in caplog.records if "sw_detectron" in r.name]


# What contradicts itself is refused


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.pop("categories"), ["categories"]),
        (lambda c: c.update(categories=[]), ["no categories"]),
        (lambda c: c["categories"][0].pop("name"), ["no name"]),
        (lambda c: c["categories"][1].update(id=3), ["2 categories", "id 3"]),
        (lambda c: c["categories"][1].update(id="7"), ["categories", "whole numbers"]),
        (lambda c: c.pop("images"), ["images"]),
        (lambda c: c.update(images={i["id"]: i for i in c["images"]}), ["'images'", "format"]),
        (lambda c: c.update(images=[]), ["no images"]),
        (lambda c: c["images"][1].update(id=1), ["2 images", "id 1"]),
        (lambda c: c["images"][1].update(id=None), ["images", "whole numbers"]),
        (lambda c: c["images"][1].pop("file_name"), ["file_name", "id 2"]),
        (lambda c: c["images"][1].update(file_name="9.png"), ["1 of 3 images", "9.png"]),
        (lambda c: c["images"][1].pop("height"), ["'2.png'", "height None"]),
        (lambda c: c["images"][1].update(width="32"), ["'2.png'", "width '32'"]),
        (lambda c: c["images"][1].update(width=24, height=32), ["2.png", "32 x 24", "24 x 32"]),
        (lambda c: c["images"][1].update(width=math.nan), ["width nan"]),
        (lambda c: c.update(annotations={}), ["'annotations'"]),
        (lambda c: c.update(annotations=[]), ["no object to train on"]),
        (lambda c: c.pop("annotations"), ["no object to train on"]),
        (lambda c: c["annotations"][1].update(id=1), ["2 annotations", "id 1"]),
        (lambda c: c["annotations"][1].update(category_id=4), ["1 annotations", "category_id 4"]),
        (lambda c: c["annotations"][1].pop("category_id"), ["category_id None"]),
        (lambda c: [a.update(iscrowd=1) for a in c["annotations"]], ["no object to train on"]),
        (lambda c: [a.update(bbox=[40, 4, 5, 5]) for a in c["annotations"]], ["no object"]),
        (lambda c: [a.update(bbox=[]) for a in c["annotations"]], ["no object to train on"]),
        (lambda c: [a.update(image_id="1") for a in c["annotations"]], ["no object to train on"]),
        (lambda c: [a.update(segmentation=[]) for a in c["annotations"]], ["MODEL.MASK_ON"]),
    ],
)
def test_contradictions_are_one_line(folder, change, words):
    message = refused(register_small(folder, changed(change)))
    assert all(word in message for word in words), message


def test_coco_2014s_minival_may_have_ids_twice():
    content = changed(lambda c: c["annotations"][1].update(id=1))
    with pytest.raises(UserError, match="2 annotations with the id 1"):
        mend_coco(copy.deepcopy(content), "instances_train2014.json")
    mend_coco(content, "instances_minival2014.json")
    assert [a["id"] for a in content["annotations"]] == [1, 2, 3, 4, 5, 6]


CUT_OFF = json.dumps(small_coco())[:700]


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '"x"', CUT_OFF, "\ufeff{}", "{}", "[" * 10**5], ids=range(9)
)
def test_no_annotation_file_at_all_is_one_line(folder, text):
    assert ".json" in refused(register_small(folder, text))


def test_ones_own_file_in_the_place_of_coco(folder):
    declared = {"thing_classes": ["person", "bicycle"]}
    message = refused(register_small(folder, small_coco(), **declared))
    assert "register_coco_instances" in message
    same = {"thing_classes": ["circle", "star"]}
    assert len(check(register_small(folder, small_coco(), **same))) == 3


# What cannot be used of it is left out


def left_out(folder, caplog, change, **kwargs):
    """The annotations that remain of six, and the warning."""
    caplog.clear()
    records = check(register_small(folder, changed(change)), **kwargs)
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("sw_detectron")]
    assert len(warnings) == 1 and "\n" not in warnings[0], warnings
    return [a for record in records for a in record["annotations"]], warnings[0]


@pytest.mark.parametrize(
    "entries, reason",
    [
        ({"bbox": []}, "no box"),
        ({"bbox": None}, "no box"),
        ({"bbox": [1, 2, 3]}, "no box"),
        ({"bbox": [1, 2, 3, math.nan]}, "no box"),
        ({"bbox": [1, 2, math.inf, 4]}, "no box"),
        ({"bbox": ["1", "2", "3", "4"]}, "no box"),
        ({"image_id": 9}, "none of its images"),
        ({"image_id": None}, "none of its images"),
        ({"iscrowd": "no"}, "iscrowd"),
        ({"segmentation": [[1, 2, 3, 4]]}, "no mask"),
        ({"segmentation": [1, 2, 3, 4, 5, 6]}, "no mask"),
        ({"segmentation": [[1, 2, 3, 4, 5, 6, 7]]}, "no mask"),
        ({"segmentation": [[1, 2, 3, 4, 5, math.nan]]}, "no mask"),
        ({"segmentation": [[1, 2, 3, 4, 5, 1e12]]}, "no mask"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": [3, 4]}}, "no mask"),
        ({"segmentation": {"size": [WIDTH, HEIGHT], "counts": [WIDTH * HEIGHT]}}, "no mask"),
        ({"segmentation": {"size": [HEIGHT, WIDTH], "counts": "zzz"}}, "no mask"),
        ({"segmentation": []}, "no mask"),
        ({"segmentation": "polygon"}, "no mask"),
    ],
    ids=str,
)
def test_single_annotations_are_left_out_with_a_count(folder, caplog, entries, reason):
    kept, warning = left_out(folder, caplog, lambda c: c["annotations"][2].update(entries))
    assert len(kept) == 5
    assert "1 " in warning and reason in warning


def test_a_box_without_a_usable_mask_trains_a_detector_of_boxes(folder):
    content = changed(lambda c: c["annotations"][2].update(segmentation=[[1, 2, 3, 4]]))
    records = check(register_small(folder, content), mask_format="")
    assert [len(record["annotations"]) for record in records] == [2, 2, 2]


def test_polygons_that_can_be_drawn_remain(folder):
    good = [2, 4, 12, 4, 12, 16]
    content = changed(lambda c: c["annotations"][2].update(segmentation=[[1, 2], good]))
    records = check(register_small(folder, content))
    assert records[1]["annotations"][0]["segmentation"] == [good]


@pytest.mark.parametrize(
    "segmentation, area",
    [
        (None, 10 * 12),  # of the box
        ([[2, 4, 12, 4, 12, 16, 2, 16], [14, 4, 16, 4, 16, 8, 14, 8]], 10 * 12 + 2 * 4),
        ({"size": [HEIGHT, WIDTH], "counts": [100, 50, WIDTH * HEIGHT - 150]}, 50),
    ],
)
def test_areas_that_are_missing_are_those_of_the_masks_or_the_boxes(segmentation, area):
    content = small_coco()
    for annotation in content["annotations"]:
        del annotation["area"]
        annotation["segmentation"] = segmentation
    assert not mend_coco(content, "here")
    assert {annotation["area"] for annotation in content["annotations"]} == {area}


@pytest.mark.parametrize(
    "box",
    [
        *([1, 2, 0, 3], [1, 2, 3, -1]),  # without area
        *([-9, 2, 8, 3], [WIDTH, 2, 3, 3], [2, -9, 3, 9], [2, HEIGHT + 1, 3, 3]),  # outside
    ],
    ids=str,
)
def test_boxes_that_training_leaves_out_are_counted(folder, caplog, box):
    kept, warning = left_out(folder, caplog, lambda c: c["annotations"][2].update(bbox=box))
    assert len(kept) == 6  # as Detectron2's own mapper leaves them out
    assert "1 of 6" in warning


@pytest.mark.parametrize("box", [[-9, 2, 10, 3], [WIDTH - 1, -3, 9, 4]], ids=str)
def test_boxes_that_reach_into_the_image_are_trained_on(folder, caplog, box):
    check(register_small(folder, changed(lambda c: c["annotations"][2].update(bbox=box))))
    assert "take no part" not in caplog.text


@pytest.mark.parametrize("training, filter_empty", [(True, True), (True, False), (False, True)])
def test_images_without_annotations_are_there_unless_they_are_left_out(
    folder, training, filter_empty
):
    image = {"id": 4, "file_name": "nowhere.png", "width": WIDTH, "height": HEIGHT}
    name = register_small(folder, changed(lambda content: content["images"].append(image)))
    if training and filter_empty:
        check(name)
    else:
        assert "nowhere.png" in refused(name, training=training, filter_empty=filter_empty)


def test_masks_that_are_no_polygons_want_another_format(folder):
    rle = {"size": [HEIGHT, WIDTH], "counts": [100, 50, WIDTH * HEIGHT - 150]}
    content = changed(lambda c: c["annotations"][2].update(segmentation=rle))
    assert "INPUT.MASK_FORMAT" in refused(register_small(folder, content))
    records = check(register_small(folder, content), mask_format="bitmask")
    assert mask_util.area(records[1]["annotations"][0]["segmentation"]) == 50


@pytest.mark.parametrize("seed", range(20))
def test_compressed_masks_are_known_by_their_runs(seed):
    generator = np.random.default_rng(seed)
    threshold = generator.uniform(0, 1) ** 4
    mask = np.asfortranarray(generator.random((37, 53)) < threshold)
    if seed % 2:
        mask = np.asfortranarray(np.sort(mask, axis=None).reshape(37, 53))  # long runs
    rle = mask_util.encode(mask.astype(np.uint8))
    assert usable_mask(rle, 37, 53) is rle
    assert usable_mask(rle, None, None) is rle
    assert usable_mask(rle | {"size": [37, 54]}, 37, 54) is None
    assert usable_mask(rle | {"counts": rle["counts"][:-1]}, 37, 53) is None


@pytest.mark.parametrize("place", range(6))
def test_polygons_far_from_their_image_are_no_masks(place):
    points = [1.0, 2.0, 30.0, 2.0, 30.0, 20.0]
    for value, usable in ((1e6, True), (-1e6, True), (1.1e6, False), (-1.1e6, False)):
        polygon = points[:place] + [value] + points[place + 1 :]
        assert usable_mask([polygon], 37, 53) == ([polygon] if usable else None)


# Any change of a valid file

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 3, 1e300, 10**400, math.nan, math.inf, "", "3", "ä\n", [], {}]),
    st.lists(st.sampled_from([0, 1.5, -7, math.nan, "x", None, []]), max_size=8),
    st.builds(lambda x: [x], st.lists(st.sampled_from([0, 5.5, -7e9, math.nan]), max_size=8)),
    st.builds(
        lambda size, counts: {"size": size, "counts": counts},
        st.sampled_from([[HEIGHT, WIDTH], [WIDTH, HEIGHT], [24], None]),
        st.one_of(st.text(max_size=8), st.lists(st.integers(-2, 768), max_size=4), st.none()),
    ),
)


@st.composite
def mutated(draw):
    """A valid file after one to three deletions, replacements and repetitions at any depth."""
    content = small_coco()
    for _ in range(draw(st.integers(1, 3))):
        place, depth = content, draw(st.integers(1, 5))
        for level in range(depth):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if level < depth - 1 and isinstance(inner, (dict, list)) and inner:
                place = inner
                continue
            action = draw(st.sampled_from(["delete", "replace", "repeat"]))
            if action == "delete":
                del place[key]
            elif action == "repeat" and isinstance(place, list):
                place.append(copy.deepcopy(inner))
            else:
                place[key] = copy.deepcopy(draw(VALUES))  # a later change must not reach VALUES
            break
    return content


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mutated(), st.booleans())
def test_any_change_of_a_file_is_refused_in_a_line_or_leaves_usable_records(folder, content, masks):
    name = register_small(folder, json.dumps(content))
    try:
        records = check(name, mask_format="bitmask" if masks else "")
    except UserError as error:
        message = str(error)
        assert name in message or str(folder) in message
        assert "\n" not in message
        return
    finally:
        DatasetCatalog.remove(name)
        (folder / f"{name}.json").unlink()
    classes = MetadataCatalog.get(name).thing_classes
    mapper = DatasetMapper(
        is_train=True,
        augmentations=[T.RandomFlip(1.0)],
        image_format="RGB",
        use_instance_mask=masks,
        instance_mask_format="bitmask",
    )
    found = 0
    for record in records:
        instances = mapper(copy.deepcopy(record))["instances"]
        found += len(instances)
        assert instances.gt_boxes.tensor.isfinite().all()
        assert all(0 <= label < len(classes) for label in instances.gt_classes)
        assert not masks or not len(instances) or instances.has("gt_masks")
    MetadataCatalog.remove(name)
