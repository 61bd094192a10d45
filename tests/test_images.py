"""One reader of images: the same pixels for training, calibration and prediction; which files."""

import io
import os

import numpy as np
import pytest
from detectron2.data import DatasetMapper, detection_utils
from PIL import Image, ImageOps
from torchvision.transforms import v2

from sw_detectron import UserError
from sw_detectron.data.check import image_size
from sw_detectron.data.images import ImageFolder, image_files, read_image
from sw_detectron.data.media import ImageFile
from sw_detectron.engine import load_config
from sw_detectron.tasks.classification.data import (
    LabelledImages,
    class_names,
    find_images,
    register_class_folders,
)
from sw_detectron.tasks.segmentation.mapper import SegmentationMapper

RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)
GREY = COLOR[..., 0]
WIDE = RNG.integers(0, 65536, (6, 8), dtype=np.uint16)
WIDE[0, :2] = 0, 65535


def grey(values):
    return np.repeat(np.asarray(values, dtype=np.uint8)[..., None], 3, axis=2)


def with_palette(transparent):
    image = Image.fromarray(GREY % 4, "P")
    image.putpalette(COLOR[0, :4].ravel().tolist())
    image.info["transparency"] = transparent
    return image


def turned():
    image = Image.fromarray(COLOR)
    image.getexif()[274] = 6  # to be shown rotated by 90 degrees clockwise
    return image


def cmyk():
    """Without black, a channel is 255 minus its ink."""
    inks = np.concatenate([255 - COLOR, np.zeros_like(COLOR[..., :1])], axis=2)
    return Image.frombytes("CMYK", (8, 6), inks.tobytes())


OTHERS = [Image.new("RGB", (8, 6), color) for color in ("red", "blue")]
ALPHA = Image.fromarray((GREY > 99).astype(np.uint8) * 255)
KINDS = {
    "colour.png": (Image.fromarray(COLOR), {}, COLOR),
    "turned.webp": (turned(), {"lossless": True, "exif": True}, np.rot90(COLOR, -1)),
    "turned.png": (turned(), {"exif": True}, np.rot90(COLOR, -1)),
    "grey.bmp": (Image.fromarray(GREY), {}, grey(GREY)),
    "one_bit.png": (Image.fromarray(GREY > 99), {}, grey((GREY > 99) * 255)),
    "wide.png": (Image.fromarray(WIDE), {}, grey(np.round(WIDE / 257))),
    "wide.tif": (Image.fromarray(WIDE), {}, grey(np.round(WIDE / 257))),
    "wide.pgm": (Image.fromarray(WIDE), {}, grey(np.round(WIDE / 257))),
    "dark.pgm": (Image.fromarray(WIDE // 1024), {}, grey(np.round(WIDE // 1024 / 257))),
    "float.tiff": (Image.fromarray((GREY / 255).astype(np.float32)), {}, grey(GREY)),
    "palette.png": (with_palette(b"\x00\x80"), {}, COLOR[0][GREY % 4]),
    "alpha.png": (Image.merge("RGBA", (*Image.fromarray(COLOR).split(), ALPHA)), {}, COLOR),
    "grey_alpha.png": (Image.merge("LA", (Image.fromarray(GREY), ALPHA)), {}, grey(GREY)),
    "cmyk.tif": (cmyk(), {}, COLOR),
    "animation.png": (
        Image.fromarray(COLOR),
        {"save_all": True, "append_images": OTHERS},
        COLOR,
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", KINDS)
def test_all_that_read_images_see_the_same_upright_pixels(tmp_path, name):
    image, options, expected = KINDS[name]
    path = tmp_path / "class" / name
    path.parent.mkdir()
    if options.get("exif"):
        options = options | {"exif": image.getexif()}
    image.save(path, **options)
    record = {"file_name": str(path), "label": 0}
    segmentation = load_config(
        "shapes_semantic_R18_SW.yaml", ["INPUT.MIN_SIZE_TEST", "0", "INPUT.FORMAT", "RGB"]
    )
    height, width = expected.shape[:2]
    labels = tmp_path / "labels.png"
    Image.new("L", (width, height)).save(labels)
    detection = load_config(
        "shapes_mask_rcnn_R18_FPN_SW.yaml", ["INPUT.MIN_SIZE_TEST", "0", "INPUT.FORMAT", "RGB"]
    )
    seen = {
        "calibration": next(iter(ImageFolder(tmp_path / "class"))),
        "prediction": next(iter(ImageFile(path)))[..., ::-1],
        "classification": LabelledImages([record], v2.PILToTensor(), size=1)[0]["image"].permute(
            1, 2, 0
        ),
        "segmentation": SegmentationMapper(segmentation, is_train=False)(
            record | {"sem_seg_file_name": str(labels)}
        )["image"].permute(1, 2, 0),
        "detection": DatasetMapper(detection, is_train=False)(record)["image"].permute(1, 2, 0),
    }
    for reader, pixels in seen.items():
        np.testing.assert_array_equal(np.asarray(pixels), expected, err_msg=reader)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 100, 255], np.int32, [0, 100, 255]),
        ([0, 257, 65535], np.int32, [0, 1, 255]),
        ([-100, 0, 410], np.int32, [0, 50, 255]),
        ([0, 2**29, 2**30], np.int32, [0, 128, 255]),
        ([-7, -7, -7], np.int32, [0, 0, 0]),
        ([0.0, 0.2, 1.0], np.float32, [0, 51, 255]),
        ([0.0, 1.5, 200.0], np.float32, [0, 2, 200]),
        ([-1.0, 0.0, 1.0], np.float32, [0, 128, 255]),
    ],
)
def test_numbers_of_32_bits_are_scaled_and_not_cut_off(tmp_path, values, dtype, expected):
    path = tmp_path / "image.tif"
    Image.fromarray(np.array([values], dtype=dtype)).save(path)
    assert read_image(path, "RGB")[0, :, 1].tolist() == expected


def refusal(path) -> str:
    with pytest.raises(UserError) as refused:
        detection_utils.read_image(str(path), "RGB")  # as Detectron2's mappers do
    assert "\n" not in str(refused.value)
    assert repr(str(path)) in str(refused.value)
    return str(refused.value)


def test_what_cannot_be_read_is_one_line_with_the_name(tmp_path, monkeypatch):
    whole = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole, "JPEG")
    for name, content, reason in (
        ("cut.jpg", whole.getvalue()[:1500], "truncated"),
        ("empty.jpg", b"", "it is empty, or of a format"),
        ("new\nline.jpg", b"no image", "it is empty, or of a format"),
        (os.fsdecode(b"b\xff.jpg"), b"no image", "it is empty, or of a format"),
    ):
        (tmp_path / name).write_bytes(content)
        assert reason in refusal(tmp_path / name)
    assert "No such file" in refusal(tmp_path / "none.jpg")
    assert "directory" in refusal(tmp_path)
    Image.fromarray(np.array([[np.nan, 1]], dtype=np.float32)).save(tmp_path / "nan.tif")
    assert "not all of its values are finite" in refusal(tmp_path / "nan.tif")
    (tmp_path / "large.jpg").write_bytes(whole.getvalue())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert "exceeds limit of 2000 pixels" in refusal(tmp_path / "large.jpg")


def make(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(COLOR).save(root / name, "PNG")


HIDDEN = (
    ".ipynb_checkpoints/1.jpg",
    "cat/.ipynb_checkpoints/1-checkpoint.jpg",
    "cat/._1.jpg",
    "__MACOSX/cat/._1.jpg",
    "__MACOSX/cat/1.jpg",
)


def test_hidden_files_and_folders_are_no_images_and_no_classes(tmp_path):
    make(tmp_path, *HIDDEN, "cat/1.jpg", "cat/b/2.TIF", "dog/3.webp")
    (tmp_path / "cat/notes.txt").write_text("no image")
    found = [str(path.relative_to(tmp_path)) for path in image_files(tmp_path)]
    assert found == ["cat/1.jpg", "cat/b/2.TIF", "dog/3.webp"]
    assert find_images(tmp_path) == [
        {"file_name": f"{tmp_path}/{name}", "label": label}
        for name, label in (("cat/1.jpg", 0), ("cat/b/2.TIF", 0), ("dog/3.webp", 1))
    ]
    register_class_folders("with_hidden", tmp_path)
    assert class_names("with_hidden") == ("cat", "dog")


def test_links_are_followed_once(tmp_path):
    make(tmp_path, "elsewhere/1.png", "root/cat/2.png")
    (tmp_path / "root/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/cat/circle").symlink_to(tmp_path / "root/cat")
    (tmp_path / "root/cat/dead.png").symlink_to("nowhere")
    found = [str(path.relative_to(tmp_path)) for path in image_files(tmp_path / "root")]
    # A link that leads nowhere is named when it is read.
    assert found == ["root/cat/2.png", "root/cat/dead.png", "root/dog/1.png"]
    assert [record["label"] for record in find_images(tmp_path / "root")] == [1, 0, 0]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def denied(folder):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match=r"folder '.*' cannot be read: Permission denied"):
        image_files(tmp_path)


def test_classes_of_a_folder_that_is_not_there_are_one_clear_line(tmp_path):
    register_class_folders("absent", tmp_path / "none")
    with pytest.raises(UserError, match="none' cannot be read: No such file.*DATASETS.FOLDER") as e:
        class_names("absent")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_the_size_that_is_checked_is_that_of_the_upright_image(tmp_path, orientation):
    image = Image.fromarray(COLOR)
    if orientation:
        image.getexif()[274] = orientation
    image.save(tmp_path / "a.jpg", exif=image.getexif())
    upright = ImageOps.exif_transpose(Image.open(tmp_path / "a.jpg"))
    assert image_size(str(tmp_path / "a.jpg")) == upright.size
