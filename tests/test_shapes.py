"""The data set of shapes: its files, its annotations, and its registration."""

import hashlib
import json
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image
from pycocotools.coco import COCO

from sw_detectron.data import generate_shapes, register_shapes, shapes

NUM_IMAGES = 80


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    generate_shapes(root, "train", NUM_IMAGES)
    return root


@pytest.fixture(scope="module")
def coco(dataset):
    return COCO(dataset / "annotations" / "train.json")


@pytest.fixture
def restored_catalogs():
    yield
    register_shapes()


def hashes(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def read_pixels(root: Path, coco: COCO, image_id: int) -> np.ndarray:
    return np.asarray(Image.open(root / "train" / coco.imgs[image_id]["file_name"]))


def test_the_same_arguments_give_the_same_bytes(dataset, tmp_path):
    generate_shapes(tmp_path, "train", NUM_IMAGES)
    assert len(hashes(tmp_path)) == NUM_IMAGES + 1
    assert hashes(tmp_path) == hashes(dataset)


def test_seeds_and_splits_give_other_images(tmp_path):
    generate_shapes(tmp_path / "a", "train", 2, seed=0)
    generate_shapes(tmp_path / "a", "val", 2, seed=0)
    generate_shapes(tmp_path / "b", "train", 2, seed=1)
    images = [*(tmp_path / "a").rglob("*.png"), *(tmp_path / "b").rglob("*.png")]
    assert len({path.read_bytes() for path in images}) == 6


def test_size_is_the_side_of_the_images(tmp_path):
    generate_shapes(tmp_path, "train", 2, size=96)
    assert Image.open(tmp_path / "train" / "000001.png").size == (96, 96)
    boxes = [a["bbox"] for a in COCO(tmp_path / "annotations" / "train.json").anns.values()]
    assert all(x >= 0 and y >= 0 and x + w <= 96 and y + h <= 96 for x, y, w, h in boxes)


def test_every_image_has_one_to_four_shapes_and_every_class_occurs(coco):
    counts = [len(coco.imgToAnns[image_id]) for image_id in coco.imgs]
    assert set(counts) == {1, 2, 3, 4}
    names = [coco.cats[a["category_id"]]["name"] for a in coco.anns.values()]
    for name in shapes.CLASS_NAMES:
        assert names.count(name) > len(names) / 8


def test_annotations_agree_with_their_masks(coco):
    annotations = coco.dataset["annotations"]
    assert len({a["id"] for a in annotations}) == len(annotations)
    assert {a["image_id"] for a in annotations} == set(coco.imgs)
    for annotation in annotations:
        (polygon,) = annotation["segmentation"]
        assert len(polygon) >= 6 and len(polygon) % 2 == 0
        mask = coco.annToMask(annotation)
        assert annotation["area"] == mask.sum()
        x, y, width, height = cv2.boundingRect(mask)
        assert annotation["bbox"] == [x, y, width, height]
        assert 12 <= max(width, height) <= 66  # twice the largest radius, and a pixel on each side
        assert annotation["iscrowd"] == 0


def test_polygons_follow_the_drawn_outlines():
    for index in range(20):
        _, scene = shapes._draw_scene(np.random.default_rng(index), 128)
        for shape in scene:
            polygon = np.array(shapes._annotate(shape, 128)["segmentation"][0]).reshape(-1, 2)
            area = cv2.contourArea(polygon.astype(np.float32))
            assert area == pytest.approx(shapes._to_pixels(shape.visible).sum(), rel=0.08)


def test_masks_hold_one_colour_that_stands_out(dataset, coco):
    """Fails if masks are shifted, transposed, or include hidden parts."""
    for annotation in coco.anns.values():
        pixels = read_pixels(dataset, coco, annotation["image_id"]).astype(float)
        mask = coco.annToMask(annotation)
        inside = pixels[cv2.erode(mask, np.ones((3, 3))) > 0]
        assert inside.std(axis=0).max() < 8  # the grain alone has 3.5
        background = np.ones_like(mask)
        for other in coco.imgToAnns[annotation["image_id"]]:
            background[coco.annToMask(other) > 0] = 0
        ring = (cv2.dilate(mask, np.ones((9, 9))) > 0) & (
            cv2.erode(background, np.ones((3, 3))) > 0
        )
        assert np.linalg.norm(inside.mean(axis=0) - pixels[ring].mean(axis=0)) > 60


def test_masks_of_one_image_do_not_overlap(coco):
    touching = 0
    for image_id in coco.imgs:
        masks = [coco.annToMask(a) for a in coco.imgToAnns[image_id]]
        for first, second in combinations(masks, 2):
            shared = np.count_nonzero(first & second)
            assert shared <= 0.05 * min(first.sum(), second.sum())
            touching += np.count_nonzero(cv2.dilate(first, np.ones((3, 3))) & second) > 10
    assert touching > 0  # some shapes do hide parts of others


def test_colour_does_not_tell_the_class(dataset, coco):
    hues = {category_id: [] for category_id in coco.cats}
    for annotation in coco.anns.values():
        pixels = read_pixels(dataset, coco, annotation["image_id"])
        mean = pixels[coco.annToMask(annotation) > 0].mean(axis=0).astype(np.uint8)
        hue = cv2.cvtColor(mean[None, None], cv2.COLOR_RGB2HSV)[0, 0, 0]
        hues[annotation["category_id"]].append(hue)
    histograms = [
        np.histogram(values, bins=6, range=(0, 180))[0] / len(values) for values in hues.values()
    ]
    for first, second in combinations(histograms, 2):
        assert np.minimum(first, second).sum() > 0.6


def test_an_interrupted_generation_leaves_nothing_and_can_be_repeated(
    dataset, tmp_path, monkeypatch
):
    draw_scene, calls = shapes._draw_scene, []

    def fail_at_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return draw_scene(*args)

    monkeypatch.setattr(shapes, "_draw_scene", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        generate_shapes(tmp_path, "train", NUM_IMAGES)
    assert hashes(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["annotations"]

    generate_shapes(tmp_path, "train", NUM_IMAGES)
    assert hashes(tmp_path) == hashes(dataset)


def test_a_complete_split_is_left_alone(tmp_path):
    generate_shapes(tmp_path, "train", 2)
    before = hashes(tmp_path)
    generate_shapes(tmp_path, "train", 5, seed=7)
    assert hashes(tmp_path) == before


def test_a_split_without_annotations_is_made_again(tmp_path):
    generate_shapes(tmp_path, "train", 3)
    before = hashes(tmp_path)
    (tmp_path / "annotations" / "train.json").unlink()
    (tmp_path / "train" / "000000.png").write_bytes(b"cut short")
    generate_shapes(tmp_path, "train", 3)
    assert hashes(tmp_path) == before


def test_the_files_of_a_quicker_process_are_kept(tmp_path, monkeypatch):
    write_split = shapes._write_split

    def be_overtaken(*args):
        monkeypatch.setattr(shapes, "_write_split", write_split)
        generate_shapes(tmp_path, "train", 2, seed=1)
        write_split(*args)

    monkeypatch.setattr(shapes, "_write_split", be_overtaken)
    generate_shapes(tmp_path, "train", 3, seed=0)
    assert len(list((tmp_path / "train").iterdir())) == 2
    content = json.loads((tmp_path / "annotations" / "train.json").read_text())
    assert len(content["images"]) == 2
    assert "seed 1" in content["info"]["description"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["annotations", "train"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_images": 0},
        {"num_images": 1, "seed": -1},
        {"num_images": 1, "size": 8},
        {"num_images": 1, "split": "../elsewhere"},
        {"num_images": 1, "split": "annotations"},
        {"num_images": 1, "split": ""},
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match="got"):
        generate_shapes(tmp_path / "shapes", **{"split": "train"} | arguments)
    assert not (tmp_path / "shapes").exists()


def test_loading_generates_what_is_missing(tmp_path, restored_catalogs):
    root = tmp_path / "deep" / "shapes"
    register_shapes(root)
    assert not root.exists()

    records = DatasetCatalog.get("shapes_val")
    assert len(records) == shapes.SPLIT_SIZES["val"]
    assert not (root / "train").exists()
    assert all(Path(record["file_name"]).is_file() for record in records)
    assert {a["category_id"] for r in records for a in r["annotations"]} == {0, 1, 2, 3}
    metadata = MetadataCatalog.get("shapes_val")
    assert metadata.evaluator_type == "coco"
    assert metadata.thing_classes == ["circle", "square", "triangle", "star"]
    assert Path(metadata.json_file).is_file()


def test_registering_again_is_harmless_and_can_move_the_data(tmp_path, restored_catalogs):
    register_shapes(tmp_path / "a")
    metadata = MetadataCatalog.get("shapes_train")
    register_shapes(tmp_path / "a")
    assert MetadataCatalog.get("shapes_train") is metadata
    register_shapes(tmp_path / "b")
    assert MetadataCatalog.get("shapes_train").image_root == str(tmp_path / "b" / "train")


def test_the_environment_names_the_default_folder(tmp_path, restored_catalogs, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_shapes()
    assert MetadataCatalog.get("shapes_val").image_root == str(tmp_path / "shapes" / "val")
    monkeypatch.delenv("DETECTRON2_DATASETS")
    register_shapes()
    assert MetadataCatalog.get("shapes_val").image_root == str(Path("datasets/shapes/val"))
