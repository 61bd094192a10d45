"""Label maps: reading them, augmenting them, the data sets, the recipe, and pictures of classes."""

import zlib

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data import transforms as T
from fvcore.transforms.transform import NoOpTransform
from PIL import Image
from torch import nn

from sw_detectron import UserError
from sw_detectron.config import find_config
from sw_detectron.data import shapes
from sw_detectron.data.slices import register_slice
from sw_detectron.engine import load_config
from sw_detectron.engine.optimizer import build_lr_scheduler, build_optimizer
from sw_detectron.tasks.detection import DetectionTrainer
from sw_detectron.tasks.segmentation import register_folders, register_shapes_segmentation
from sw_detectron.tasks.segmentation.data import check_classes, read_labels
from sw_detectron.tasks.segmentation.drawing import overlay_class_map
from sw_detectron.tasks.segmentation.mapper import (
    PadToSize,
    RandomRotation,
    RotateTransform,
    SegmentationMapper,
    build_augmentations,
)
from sw_detectron.tasks.segmentation.shapes import generate_labels

CONFIG = "ade20k_semantic_R50_BN.yaml"
SHAPES = "shapes_semantic_R18_SW.yaml"
MEAN = (124, 116, 104)  # of the config, in whole numbers


def save(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array, mode).save(path)
    return str(path)


# Reading


def test_labels_are_the_values_of_the_file(tmp_path):
    labels = np.array([[0, 1, 2], [255, 2, 1]], dtype=np.uint8)
    plain = save(tmp_path / "plain.png", labels)
    palette = Image.fromarray(labels, "P")
    palette.putpalette(np.random.default_rng(0).integers(256, size=768).tolist())
    palette.save(tmp_path / "palette.png")
    wide = save(tmp_path / "wide.png", labels.astype(np.uint16))
    for path in (plain, str(tmp_path / "palette.png"), wide):
        read = read_labels(path, 3, 255)
        assert read.dtype == np.uint8
        np.testing.assert_array_equal(read, labels)


def test_files_that_are_no_label_maps_are_named(tmp_path):
    labels = np.array([[0, 3], [255, 2]], dtype=np.uint8)
    with pytest.raises(UserError, match=r"a\.png' have the value 3, but there are 3 classes"):
        read_labels(save(tmp_path / "a.png", labels), 3, 255)
    with pytest.raises(UserError, match=r"value 255.*ignore is 0"):
        read_labels(str(tmp_path / "a.png"), 4, 0)
    with pytest.raises(UserError, match=r"rgb\.png' have 3 channels"):
        read_labels(save(tmp_path / "rgb.png", np.zeros((2, 2, 3), np.uint8)), 3, 255)
    (tmp_path / "cut.png").write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match=r"cut\.png' cannot be read"):
        read_labels(str(tmp_path / "cut.png"), 3, 255)


@pytest.mark.parametrize("ignore", [255, 65535, -1, 1000])
def test_labels_of_more_than_a_byte_are_what_they_are(tmp_path, ignore):
    labels = np.array([[0, 299, 43, 299]])
    path = save(tmp_path / "labels.png", labels.astype(np.uint16))
    for dtype in (None, int):
        assert read_labels(path, 300, ignore, dtype).tolist() == labels.tolist()
    if ignore > 300:
        ignored = save(
            tmp_path / "ignored.png", np.where(labels == 43, ignore, labels).astype("<u2")
        )
        assert read_labels(ignored, 300, ignore).tolist() == [[0, 299, ignore, 299]]


@pytest.mark.parametrize(
    ("values", "dtype", "named"),
    [
        ([0, 300], np.uint16, "value 300"),
        ([0, 65535], np.uint16, "value 65535"),
        ([0, -1], np.int32, "value -1"),
        ([0, 2**30], np.int32, f"value {2**30}"),
        ([0, 1.5], np.float32, "value 1.5"),
        ([0, np.nan], np.float32, "value nan"),
    ],
)
def test_values_that_are_no_label_are_named(tmp_path, values, dtype, named):
    Image.fromarray(np.array([values], dtype=dtype)).save(tmp_path / "labels.tif")
    with pytest.raises(UserError, match=f"{named}, but there are 300 classes"):
        read_labels(str(tmp_path / "labels.tif"), 300, 255)


# Augmentation

PALETTE = np.array([[250, 10, 10], [10, 250, 10], [10, 10, 250], [250, 250, 10]], dtype=np.uint8)


def mosaic(height, width, block):
    """Labels in large blocks, a quarter of the image of class 0 to 3 each, in their colours."""
    rows, columns = np.arange(height)[:, None] // block, np.arange(width) // block
    labels = ((rows * 3 + columns) % 4).astype(np.uint8)
    return PALETTE[labels], labels


@pytest.mark.parametrize("size", [(120, 150), (40, 30)], ids=["larger", "smaller"])
def test_augmented_labels_lie_where_their_pixels_do(size):
    """Away from edges, a pixel has the colour of its class, or the mean colour and no class."""
    options = "INPUT.CROP.SIZE (81,89) MODEL.SEM_SEG_HEAD.NUM_CLASSES 4".split()
    augment = T.AugmentationList(build_augmentations(load_config(CONFIG, options), is_train=True))
    colors = np.concatenate([PALETTE, [MEAN]]).astype(float)
    np.random.seed(0)  # noqa: NPY002  Detectron2's augmentations draw from it
    ignored, blurred = 0, 0
    for _ in range(40):
        image, labels = mosaic(*size, block=18)
        inputs = T.AugInput(image, sem_seg=labels)
        augment(inputs)
        image, labels = inputs.image, inputs.sem_seg
        assert image.shape == (81, 89, 3) and labels.shape == (81, 89)
        assert image.dtype == labels.dtype == np.uint8
        assert set(np.unique(labels)) <= {0, 1, 2, 3, 255}
        reach = 5
        around = np.lib.stride_tricks.sliding_window_view(labels, (2 * reach + 1,) * 2)
        inside = around.min((2, 3)) == around.max((2, 3))
        centre = np.s_[reach:-reach, reach:-reach]
        expected = colors[np.where(labels == 255, 4, labels)][centre]
        assert np.abs(image[centre] - expected)[inside].max(initial=0) <= 2
        ignored += np.count_nonzero(labels == 255)
        blurred += np.abs(image - colors[np.where(labels == 255, 4, labels)]).max() > 100
    assert blurred
    assert ignored


def test_padding_is_the_mean_colour_without_label():
    image, labels = mosaic(5, 6, block=2)
    inputs = T.AugInput(image, sem_seg=labels)
    PadToSize((8, 6), MEAN, 255)(inputs)
    np.testing.assert_array_equal(inputs.sem_seg[1:6], labels)
    np.testing.assert_array_equal(inputs.image[1:6], image)
    for rows in (slice(0, 1), slice(6, 8)):
        assert (inputs.sem_seg[rows] == 255).all()
        assert (inputs.image[rows] == MEAN).all()


def test_padding_moves_coordinates_with_their_pixels():
    image, _ = mosaic(5, 6, block=2)
    image[3, 2] = 7
    transform = PadToSize((8, 16), MEAN, 255).get_transform(image)
    ((x, y),) = transform.apply_coords(np.array([[2.0, 3.0]]))
    assert (transform.apply_image(image)[int(y), int(x)] == 7).all()


def test_half_of_the_images_are_rotated_either_way_and_half_are_blurred():
    augmentations = build_augmentations(load_config(CONFIG, []), is_train=True)
    (rotation,) = (a for a in augmentations if isinstance(a, RandomRotation))
    (blur,) = (a for a in augmentations if isinstance(a, T.RandomApply))
    image = np.zeros((2, 2, 3), np.uint8)
    np.random.seed(0)  # noqa: NPY002  Detectron2's augmentations draw from it
    drawn = [[a.get_transform(image) for _ in range(400)] for a in (rotation, blur)]
    angles = [t.angle for t in drawn[0] if isinstance(t, RotateTransform)]
    # Four standard deviations around a half of 400, and around a half of these.
    assert 160 < len(angles) < 240
    assert 70 < sum(angle > 0 for angle in angles) < 130
    assert 9 < max(map(abs, angles)) <= 10
    assert 160 < sum(not isinstance(t, NoOpTransform) for t in drawn[1]) < 240


def test_rotation_turns_pixels_labels_and_coordinates_alike():
    image = np.zeros((41, 61, 3), dtype=np.uint8)
    image[8:11, 50:53] = 255
    labels = (image[..., 0] > 0).astype(np.uint8)
    rotation = RotateTransform(41, 61, 10.0, MEAN, 255)
    rows, columns = np.nonzero(rotation.apply_segmentation(labels) == 1)
    x, y = rotation.apply_coords(np.array([[51.5, 9.5]]))[0]
    assert (columns.mean() + 0.5, rows.mean() + 0.5) == pytest.approx((x, y), abs=0.5)
    # 21 right and 11 above the centre; counterclockwise, it comes nearer to the upper edge.
    assert x - 30.5 == pytest.approx(21 * np.cos(np.pi / 18) - 11 * np.sin(np.pi / 18))
    assert 20.5 - y == pytest.approx(21 * np.sin(np.pi / 18) + 11 * np.cos(np.pi / 18))
    turned = rotation.apply_image(image)
    outside = rotation.apply_segmentation(labels) == 255
    assert 0 < outside.sum() < outside.size / 4
    assert (turned[outside] == MEAN).all()


def test_mapper_reads_and_refuses(tmp_path):
    image, labels = mosaic(30, 40, block=10)
    record = {
        "file_name": save(tmp_path / "image.png", image),
        "sem_seg_file_name": save(tmp_path / "labels.png", labels),
    }
    options = "MODEL.SEM_SEG_HEAD.NUM_CLASSES 4 INPUT.MIN_SIZE_TEST 0".split()
    cfg = load_config(CONFIG, options)
    tested = SegmentationMapper(cfg, is_train=False)(record)
    assert (tested["height"], tested["width"]) == (30, 40)
    assert "sem_seg" not in tested
    np.testing.assert_array_equal(tested["image"].permute(1, 2, 0), image)
    trained = SegmentationMapper(cfg, is_train=True)(record)
    assert trained["image"].shape == (3, 473, 473) and trained["image"].dtype == torch.uint8
    assert trained["sem_seg"].shape == (473, 473) and trained["sem_seg"].dtype == torch.int64
    save(tmp_path / "labels.png", labels[:, :-1])
    for is_train in (False, True):
        with pytest.raises(UserError, match=r"40 x 30 pixels, its labels .* 39 x 30"):
            SegmentationMapper(cfg, is_train)(record)


@pytest.mark.parametrize(("classes", "ignore"), [(300, 65535), (300, -1), (70_000, 255), (4, -1)])
def test_labels_of_any_width_are_augmented_like_bytes(tmp_path, classes, ignore):
    """The same random choices for the same labels, moved to the highest classes."""
    image, labels = mosaic(120, 150, block=18)
    files = {name: str(tmp_path / f"{name}.tif") for name in ("image", "bytes", "wide")}
    Image.fromarray(image).save(files["image"])
    Image.fromarray(labels).save(files["bytes"])
    Image.fromarray(labels + np.int32(classes - 4)).save(files["wide"])
    augmented = {}
    for name, number, ignored in (("bytes", 4, 255), ("wide", classes, ignore)):
        options = (
            f"MODEL.SEM_SEG_HEAD.NUM_CLASSES {number} MODEL.SEM_SEG_HEAD.IGNORE_VALUE {ignored}"
        )
        mapper = SegmentationMapper(load_config(CONFIG, options.split()), is_train=True)
        np.random.seed(3)  # noqa: NPY002  Detectron2's augmentations draw from it
        record = {"file_name": files["image"], "sem_seg_file_name": files[name]}
        augmented[name] = mapper(record)["sem_seg"].numpy()
    expected = augmented["bytes"] + (classes - 4)
    expected[augmented["bytes"] == 255] = ignore
    assert augmented["wide"].dtype == np.int64
    assert {ignore, classes - 1} < set(np.unique(expected))
    np.testing.assert_array_equal(augmented["wide"], expected)


def test_detectors_refuse_label_maps_that_they_would_change(tmp_path):
    image, labels = mosaic(30, 40, block=10)
    record = {
        "file_name": save(tmp_path / "image.png", image),
        "sem_seg_file_name": save(tmp_path / "labels.png", labels),
    }
    cfg = load_config("shapes_mask_rcnn_R18_FPN_SW.yaml", ["INPUT.MIN_SIZE_TRAIN", "(0,)"])
    mapper = DetectionTrainer.build_mapper(cfg, is_train=True)
    assert set(np.unique(mapper(record | {"annotations": []})["sem_seg"])) == {0, 1, 2, 3}
    palette = Image.fromarray(labels, "P")
    palette.putpalette(PALETTE.ravel().tolist())
    palette.save(tmp_path / "palette.png")
    wide = save(tmp_path / "wide.png", labels.astype(np.uint16) + 299)
    for path, mode in ((str(tmp_path / "palette.png"), "'P'"), (wide, "'I;16'")):
        with pytest.raises(UserError, match=f"labels '{path}' are of Pillow's mode {mode}"):
            mapper(record | {"annotations": [], "sem_seg_file_name": path})


# Data sets


def test_shapes_labels_are_the_shapes(tmp_path):
    """Against the masks the images were drawn by; outlines may differ at edges."""
    shapes.generate_shapes(tmp_path, "tiny", 4)
    generate_labels(tmp_path, "tiny")
    files = sorted((tmp_path / "labels/tiny").iterdir())
    assert [f.name for f in files] == [f"{i:06d}.png" for i in range(4)]
    for index, file in enumerate(files):
        labels = np.array(Image.open(file))
        expected = np.zeros((128, 128), dtype=int)
        rng = np.random.default_rng([0, zlib.crc32(b"tiny"), index])
        for shape in shapes._draw_scene(rng, 128)[1]:
            share = shape.visible.reshape(128, 4, 128, 4).mean((1, 3))
            expected[share > 0.5] = shape.class_index + 1
        assert len(np.unique(expected)) > 1
        assert np.mean(labels != expected) < 0.01
    before = {f: f.stat().st_mtime_ns for f in files}
    generate_labels(tmp_path, "tiny")
    assert before == {f: f.stat().st_mtime_ns for f in files}


def test_shapes_data_sets_are_registered(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SPLIT_SIZES, "val", 2)
    try:
        register_shapes_segmentation(tmp_path)
        records = DatasetCatalog.get("shapes_sem_seg_val")
        assert len(records) == 2
        assert read_labels(records[0]["sem_seg_file_name"], 5, 255).shape == (128, 128)
        check_classes(["shapes_sem_seg_val", "shapes_sem_seg_train"], 5, 255)
    finally:
        register_shapes_segmentation()


def test_folders_become_data_sets_by_config(tmp_path):
    image, labels = mosaic(12, 16, block=4)
    for name in ("b/2", "1", "c"):
        save(tmp_path / f"images/{name}.png", image)
        save(tmp_path / f"labels/{name}.png", labels)
    base = f"_BASE_: {find_config(CONFIG)}\n"
    rooms = f"IMAGES: {tmp_path}/images, LABELS: {tmp_path}/labels"
    (tmp_path / "rooms.yaml").write_text(
        base + f"DATASETS: {{SEM_SEG_FOLDERS: {{rooms: {{{rooms}, CLASSES: [a, b, c, d]}},"
        f" numbers: {{{rooms}, CLASSES: 4, IGNORE_LABEL: 0}}}}}}"
    )
    load_config(str(tmp_path / "rooms.yaml"), ["DATASETS.SEM_SEG_FOLDERS.numbers.CLASSES", "5"])
    records = DatasetCatalog.get("rooms")
    stems = [r["file_name"].removeprefix(f"{tmp_path}/images/") for r in records]
    assert stems == ["1.png", "b/2.png", "c.png"]
    assert records[1]["sem_seg_file_name"] == f"{tmp_path}/labels/b/2.png"
    rooms, numbers = MetadataCatalog.get("rooms"), MetadataCatalog.get("numbers")
    assert (rooms.stuff_classes, rooms.ignore_label) == (["a", "b", "c", "d"], 255)
    assert (numbers.stuff_classes, numbers.ignore_label) == (list("01234"), 0)

    (tmp_path / "labels/c.png").unlink()
    with pytest.raises(UserError, match=r"c\.png', but no labels .*labels/c\.png"):
        DatasetCatalog.get("rooms")
    (tmp_path / "wrong.yaml").write_text(
        base + "DATASETS: {SEM_SEG_FOLDERS: {x: {IMAGES: a, LABEL: b}}}"
    )
    with pytest.raises(UserError, match="x has the keys IMAGES, LABEL; it takes"):
        load_config(str(tmp_path / "wrong.yaml"), [])


def test_classes_must_be_those_of_the_data_set():
    register_folders("doors", "images", "labels", ["door", "wall"], 7)
    check_classes(["doors"], 2, 7)
    with pytest.raises(UserError, match="'doors' has 2 classes; set MODEL.SEM_SEG_HEAD.NUM_CLA"):
        check_classes(["doors"], 3, 7)
    with pytest.raises(UserError, match="'doors' ignores the label 7; set .*IGNORE_VALUE"):
        check_classes(["doors"], 2, 255)
    with pytest.raises(UserError, match="'coco_2017_val' has no label maps"):
        check_classes(["coco_2017_val"], 2, 255)


# The recipe


def test_learning_rates_of_head_and_schedule():
    """lr = base (1 - i / n)^0.9, ten times that in the head."""
    cfg = load_config(CONFIG, ["SOLVER.MAX_ITER", "10"])
    model = nn.Module()
    model.backbone, model.sem_seg_head = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = build_optimizer(cfg, model)
    scheduler = build_lr_scheduler(cfg, optimizer)
    for i in range(10):
        rates = {p: g["lr"] for g in optimizer.param_groups for p in g["params"]}
        for part, factor in ((model.backbone, 1), (model.sem_seg_head, 10)):
            for p in part.parameters():
                assert rates[p] == pytest.approx(0.01 * factor * (1 - i / 10) ** 0.9, rel=1e-12)
        optimizer.step()
        scheduler.step()


def rates_of(overrides):
    """The rate of each iteration, of a base rate of 1."""
    cfg = load_config(CONFIG, overrides.split())
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(cfg, optimizer)
    rates = []
    for _ in range(cfg.SOLVER.MAX_ITER):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_leads_into_the_schedule():
    rates = rates_of("SOLVER.MAX_ITER 100 SOLVER.WARMUP_ITERS 20")
    start, end = 0.001, 0.8**0.9
    expected = [start + (end - start) * i / 20 for i in range(20)]
    expected += [(1 - i / 100) ** 0.9 for i in range(20, 100)]
    assert rates == pytest.approx(expected, rel=1e-9)


def test_a_warm_up_that_is_longer_than_the_run_leads_to_its_end():
    rates = rates_of("SOLVER.MAX_ITER 10 SOLVER.WARMUP_ITERS 25")
    assert rates == pytest.approx([0.001 * (1 - i / 10) for i in range(10)], rel=1e-9)


# Pictures


def test_class_maps_have_a_colour_for_each_class_and_list_it():
    register_folders("pictured", "images", "labels", ["sky", "road", "an extremely long name " * 9])
    metadata = MetadataCatalog.get("pictured")
    labels = np.full((200, 400), 255)
    labels[:, :100], labels[:50, 100:] = 0, 2
    pixels = np.full((200, 400, 3), 100, dtype=np.uint8)
    picture = overlay_class_map(pixels, labels, metadata)
    assert picture.shape == (200, 400 + 160, 3) and picture.dtype == np.uint8
    tints = {tuple(c) for c in picture[labels.astype(bool).nonzero()]}
    assert (picture[:, :400][labels == 255] == 100).all()
    sky, long = picture[0, 0], picture[0, 399]
    assert len({tuple(sky), tuple(long), (100,) * 3}) == 3
    assert tuple(long) in tints
    # The swatches are the colours themselves, of which the image has 60 percent.
    legend = picture[:, 400:].reshape(-1, 3).astype(float)
    for color in (sky, long):
        assert np.abs(legend * 0.6 + 40 - color).max(1).min() <= 1.5
    # The same classes elsewhere have the same colours; small images are enlarged.
    small = overlay_class_map(pixels[:2, :100], labels[:2, :100], metadata)
    assert small.shape == (6, 300 + 160, 3)
    assert (small[0, 0] == sky).all()
    with pytest.raises(ValueError, match="no class number 3"):
        overlay_class_map(pixels, labels * 0 + 3, metadata)


def test_slices_keep_classes_and_label_to_ignore():
    register_slice("shapes_sem_seg_val[:3]")
    check_classes(["shapes_sem_seg_val[:3]"], 5, 255)
