"""The nuclei's download becomes a folder that a detector trains on."""

import json
import subprocess
import sys

import numpy as np
import pycocotools.mask as mask_util
import pytest
from helpers.runs import ROOT
from PIL import Image

from sw_detectron import UserError
from sw_detectron.config import config_folder
from sw_detectron.data.nuclei import NAME_LENGTH, modality_of, prepare_nuclei
from sw_detectron.engine.setup import load_config

IDS = [f"{letter}{'0' * NAME_LENGTH}1" for letter in "abcd"]
VAL = [IDS[3][:NAME_LENGTH]]


@pytest.fixture
def download(tmp_path):
    """Four images of 40 x 30 with two nuclei each: dark, coloured, bright, dark."""
    for number, (name, colour) in enumerate(
        zip(IDS, [(9, 9, 9), (200, 90, 220), (230, 230, 230), (9, 9, 9)])
    ):
        (tmp_path / name / "images").mkdir(parents=True)
        (tmp_path / name / "masks").mkdir()
        picture = Image.new("RGBA", (40, 30), (*colour, 255))
        picture.save(tmp_path / name / f"images/{name}.png")
        for nucleus in range(2):
            mask = np.zeros((30, 40), np.uint8)
            mask[4 + number : 14, 3 + 20 * nucleus : 13 + 20 * nucleus] = 255
            Image.fromarray(mask).save(tmp_path / name / f"masks/{nucleus}.png")
    return tmp_path


def test_images_masks_and_kinds_of_microscopy(download, tmp_path):
    folder = tmp_path / "out"
    assert prepare_nuclei(download, folder, VAL) == {
        **{"train": 3, "train_fluorescence": 1, "train_stained": 1, "train_brightfield": 1},
        **{"val": 1, "val_fluorescence": 1},
    }
    content = json.loads((folder / "annotations/train.json").read_text())
    assert [image["file_name"] for image in content["images"]] == [
        f"{name[:NAME_LENGTH]}.png" for name in IDS[:3]
    ]
    assert [a["id"] for a in content["annotations"]] == [1, 2, 3, 4, 5, 6]
    for number, annotation in enumerate(content["annotations"]):
        image, nucleus = divmod(number, 2)
        expected = np.zeros((30, 40), np.uint8)
        expected[4 + image : 14, 3 + 20 * nucleus : 13 + 20 * nucleus] = 1
        assert (mask_util.decode(annotation["segmentation"]) == expected).all()
        assert annotation["bbox"] == [3 + 20 * nucleus, 4 + image, 10, 10 - image]
        assert annotation["area"] == 10 * (10 - image)
        assert annotation["image_id"] == image + 1
    with Image.open(folder / "train" / content["images"][1]["file_name"]) as image:
        assert (image.mode, image.getpixel((0, 0))) == ("RGB", (200, 90, 220))
    cfg = load_config("nuclei_mask_rcnn_R18_FPN_SW.yaml", ["DATASETS.COCO_FOLDER", str(folder)])
    assert cfg.INPUT.MASK_FORMAT == "bitmask"


def test_a_mask_without_a_pixel_is_no_nucleus(download, tmp_path):
    Image.new("L", (40, 30)).save(download / IDS[0] / "masks/0.png")
    prepare_nuclei(download, tmp_path / "out", VAL)
    content = json.loads((tmp_path / "out/annotations/train.json").read_text())
    assert [a["image_id"] for a in content["annotations"]] == [1, 2, 2, 3, 3]
    assert all(a["area"] > 0 for a in content["annotations"])


@pytest.mark.slow
def test_the_command_splits_as_the_figures_were_made(download, tmp_path):
    val = (config_folder() / "nuclei/val_images.txt").read_text().split()
    assert len(val) == len(set(val)) == 117
    command = [sys.executable, str(ROOT / "tools/prepare_nuclei.py"), str(download)]
    done = subprocess.run([*command, str(tmp_path / "new")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train.json: 4 images" in done.stdout  # none of the list is among them


def test_the_real_images_are_split_and_told_apart_alike(shared_data):
    folder = shared_data / "data/nuclei"
    val = json.loads((folder / "annotations/val.json").read_text())["images"]
    listed = (config_folder() / "nuclei/val_images.txt").read_text().split()
    assert sorted(image["file_name"] for image in val) == [f"{name}.png" for name in listed]
    for image in val:
        picture = np.asarray(Image.open(folder / "val" / image["file_name"]).convert("RGB"))
        assert modality_of(picture) == image["modality"]


def test_what_is_no_download_is_one_line_and_leaves_nothing(download, tmp_path):
    with pytest.raises(UserError, match="nowhere' is no folder"):
        prepare_nuclei(tmp_path / "nowhere", tmp_path / "out", VAL)
    with pytest.raises(UserError, match=r"images' has no folders ID/images"):
        prepare_nuclei(download / IDS[0] / "images", tmp_path / "out", VAL)
    (download / IDS[1] / "masks/0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"0\.png' cannot be read"):
        prepare_nuclei(download, tmp_path / "out", VAL)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out' exists already"):
        prepare_nuclei(download, tmp_path / "out", VAL)
