"""What predictions read and write: unreadable inputs, names, what is there already, the end."""

import json
import os
from argparse import Namespace

import cv2
import numpy as np
import pytest
from PIL import Image

from sw_detectron import UserError
from sw_detectron.data import media
from sw_detectron.engine import prediction
from sw_detectron.engine.prediction import predict

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


class Dark:
    """In the place of a model: finds one thing in each frame, and darkens it."""

    def __init__(self, cfg, metadata, confidence):
        self.frames = 0

    def load(self, weights):
        pass

    def check(self, frame, path):
        pass

    def __call__(self, frames):
        return [self.darken(frame) for frame in frames]

    def darken(self, frame):
        self.frames += 1
        return [{"category_id": self.frames}], frame // 2


@pytest.fixture(autouse=True)
def _dark(monkeypatch):
    monkeypatch.setattr(prediction, "Predictor", Dark)


def save(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS).save(path, "PNG")
    return paths[0]


def save_video(path, fps=5.0, sizes=((60, 40),) * 3):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), fps, sizes[0])
    for size in sizes:
        writer.write(cv2.resize(PIXELS, size))
    writer.release()
    return path


def run(output, *inputs) -> list[dict]:
    predict(
        Namespace(
            config_file="shapes_mask_rcnn_R18_FPN_SW.yaml",
            weights=None,
            inputs=list(map(str, inputs)),
            output=str(output),
            confidence=None,
            batch=1,
        )
    )
    return read(output)


def read(output) -> list[dict]:
    return json.loads((output / "predictions.json").read_text())


def refuse(output, *inputs) -> str:
    with pytest.raises(UserError) as refused:
        run(output, *inputs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def snapshot(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make_broken(folder):
    save(folder / "whole.png")
    content = (folder / "whole.png").read_bytes()
    (folder / "cut.png").write_bytes(content[:2000])
    (folder / "drawing.svg").write_text("<svg/>")
    (folder / "empty.jpg").touch()
    (folder / "empty.mp4").touch()
    (folder / "text.avi").write_text("no video")
    (folder / "link.jpg").symlink_to("nowhere")
    return ["cut.png", "drawing.svg", "empty.jpg", "empty.mp4", "link.jpg", "text.avi"]


def test_files_that_cannot_be_read_are_named_and_all_else_is_predicted(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(prediction, "setup_logger", lambda **options: None)  # caplog reads the root
    folder, out = tmp_path / "in", tmp_path / "out"
    broken = make_broken(folder)
    save(folder / "._whole.png", folder / ".ipynb_checkpoints/whole.png", folder / "z.jpg")
    save(folder / "new\nline.png", folder / os.fsdecode(b"b\xff.png"))
    message = refuse(out, folder)
    assert "is not a readable" in message and message.endswith(
        "5 other files, which are named above"
    )
    for name in broken:
        assert caplog.text.count(f"Skipped a file: {str(folder / name)!r} is not a readable") == 1
    whole = [os.fsdecode(b"b\xff"), "new\nline", "whole", "z"]
    assert names(out) == sorted([*(f"{name}.png" for name in whole), "predictions.json"])
    assert [r["file_name"] for r in read(out)] == sorted(
        str(folder / name) for name in (*(f"{name}.png" for name in whole[:3]), "z.jpg")
    )
    assert [r["image_id"] for r in read(out)] == [1, 2, 3, 4]
    for name in whole:
        picture = np.asarray(Image.open(out / f"{name}.png"))
        np.testing.assert_array_equal(picture, PIXELS // 2)


def test_one_unreadable_file_is_the_whole_message(tmp_path):
    make_broken(tmp_path / "in")
    whole, cut = tmp_path / "in/whole.png", tmp_path / "in/cut.png"
    assert refuse(tmp_path / "out", whole, cut) == (
        f"{str(cut)!r} is not a readable image: image file is truncated"
    )
    assert names(tmp_path / "out") == ["predictions.json", "whole.png"]
    whole.unlink()
    assert "5 other files" in refuse(tmp_path / "none", tmp_path / "in")
    assert not list((tmp_path / "none").glob("*"))


def test_images_above_pillows_limit_are_named_and_large_ones_are_read(tmp_path, monkeypatch):
    save(tmp_path / "in/large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 40 // 2 - 1)
    assert "large.png' is not a readable image: Image size" in refuse(
        tmp_path / "o", tmp_path / "in"
    )
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 40 // 2)
    assert len(run(tmp_path / "o", tmp_path / "in")) == 1


@pytest.mark.parametrize("fps", [211.222, 1e5, 1e300, 1e-7, -3.0, 0.0, float("nan"), float("inf")])
def test_a_video_of_any_rate_is_a_video_and_folders_beside_it_stay(tmp_path, monkeypatch, fps):
    save(tmp_path / "holiday/1.png", tmp_path / "holiday/deep/2.png")
    video = save_video(tmp_path / "holiday.avi")
    before = snapshot(tmp_path)
    monkeypatch.setattr(
        media.VideoFile, "fps", property(lambda self: fps, lambda self, _: None), False
    )
    assert len(run(tmp_path, video)) == 3
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"holiday.mp4", "predictions.json"}
    monkeypatch.undo()
    written = media.VideoFile(tmp_path / "holiday.mp4")
    assert len(list(written)) == written.num_frames == 3
    nearest = min(max(fps, 0.01), 65535) if 0 < fps < np.inf else 25
    assert written.fps == pytest.approx(nearest, rel=1e-3)


def test_rates_that_can_be_encoded_stay():
    for fps in (0.01, 0.5, 1, 5, 23.976, 24, 25, 29.97, 30, 59.94, 120, 240, 1000, 65535):
        assert media.encodable_rate(fps) == fps


def test_without_an_encoder_frames_go_to_a_folder_that_was_not_there(tmp_path, monkeypatch):
    save(tmp_path / "clip/1.png")
    (tmp_path / "clip_2").touch()
    before = snapshot(tmp_path)
    video = save_video(tmp_path / "in/clip.avi", sizes=((60, 40), (60, 40)))
    monkeypatch.setattr(media.cv2, "VideoWriter_fourcc", lambda *code: 0)
    run(tmp_path, video)
    assert names(tmp_path) == ["clip", "clip_2", "clip_3", "in", "predictions.json"]
    assert names(tmp_path / "clip_3") == ["000000.png", "000001.png"]
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before


def test_frames_of_another_size_are_part_of_the_video(tmp_path):
    frames = [cv2.resize(PIXELS, size) for size in ((60, 40), (30, 50), (61, 41))]
    media.write_video(iter(frames), tmp_path / "a.mp4", 5)
    written = list(media.VideoFile(tmp_path / "a.mp4"))
    assert [frame.shape for frame in written] == [(40, 60, 3)] * 3


def test_videos_of_names_that_are_no_text(tmp_path):
    """OpenCV would end the process."""
    save_video(tmp_path / "clip.avi").rename(tmp_path / os.fsdecode(b"v\xff.avi"))
    assert "rename it" in refuse(tmp_path / "out", tmp_path / os.fsdecode(b"v\xff.avi"))
    out = tmp_path / os.fsdecode(b"o\xff")
    run(out, save_video(tmp_path / "clip.avi"))
    assert names(out / "clip") == ["000000.png", "000001.png", "000002.png"]


def test_a_video_that_is_not_written_whole_is_an_error(tmp_path, monkeypatch):
    """As on a full disk, of which OpenCV says nothing."""
    video = save_video(tmp_path / "clip.avi")
    monkeypatch.setattr(media, "_resized", lambda frame, size: frame[:20])  # which is not written
    message = refuse(tmp_path / "out", video)
    assert "clip.mp4' cannot be written whole: is the disk full?" in message
    assert names(tmp_path / "out") == ["predictions.json"]


def test_only_what_an_earlier_run_has_written_is_replaced(tmp_path):
    image, video = save(tmp_path / "in/a.jpg"), save_video(tmp_path / "in/b.avi")
    out = tmp_path / "out"
    run(out, image, video)
    first = snapshot(out)
    run(out, video, image)
    assert snapshot(out).keys() == first.keys() == {"a.png", "b.mp4", "predictions.json"}
    # Files of others with these names, a link and a folder among them, stay.
    save(tmp_path / "mine/a.png", tmp_path / "mine/a_3.png/1.png")
    (tmp_path / "mine/a_2.png").symlink_to(tmp_path / "in/a.jpg")
    (tmp_path / "mine/b.mp4").write_bytes(b"no video")
    before = snapshot(tmp_path)
    (tmp_path / "other").mkdir()
    other = save(tmp_path / "other/a.jpg")
    run(tmp_path / "mine", other, video)
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        "other/a.jpg", "mine/a_4.png", "mine/b_2.mp4", "mine/predictions.json"
    }  # fmt: skip


def test_outputs_that_differ_in_case_alone_are_kept_apart(tmp_path):
    inputs = [save(tmp_path / folder / name) for folder, name in (("1", "a.jpg"), ("2", "A.jpg"))]
    run(tmp_path / "out", *inputs)
    assert names(tmp_path / "out") == ["A_2.png", "a.png", "predictions.json"]


def test_places_that_cannot_take_the_output_are_one_line(tmp_path, monkeypatch):
    image = save(tmp_path / "in/a.jpg")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/deeper"):
        assert refuse(place, image).startswith(f"--output {str(place)!r}: ")
    (tmp_path / "taken/predictions.json").mkdir(parents=True)
    assert "is not of an earlier prediction" in refuse(tmp_path / "taken", image)
    (tmp_path / "own").mkdir()
    for text in ('{"a": 1}', "[1, 2]", "", '[{"image_id": 1, "bbox": []}]'):
        (tmp_path / "own/predictions.json").write_text(text)
        assert "is not of an earlier prediction" in refuse(tmp_path / "own", image)
        assert snapshot(tmp_path / "own") == {"predictions.json": text.encode()}

    def read_only(**options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(prediction.tempfile, "TemporaryFile", read_only)
    assert "Read-only file system" in refuse(tmp_path / "out", image)


def test_inputs_that_are_no_files_are_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    assert "is neither a file nor a folder" in refuse(tmp_path / "out", tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to("nowhere")
    assert "does not exist" in refuse(tmp_path / "out", tmp_path / "link.jpg")
    (tmp_path / "hidden").mkdir()
    save(tmp_path / "hidden/.a.jpg")
    assert "holds no images" in refuse(tmp_path / "out", tmp_path / "hidden")


def test_a_file_may_have_the_name_of_a_section_of_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "MODEL.png")
    found = run(tmp_path / "out", "MODEL.png", "MODEL.DEVICE", "cpu")
    assert [result["file_name"] for result in found] == ["MODEL.png"]


@pytest.mark.parametrize("stem", ["n" * 251, "é" * 125 + "n", "n" * 250 + "\udcff"], ids=len)
def test_names_as_long_as_names_can_be(tmp_path, stem):
    image, twin = (
        save(tmp_path / "1" / f"{stem}.jpg", tmp_path / "2" / f"{stem}.jpg"),
        tmp_path / "2",
    )
    video = save_video(tmp_path / "v.avi").rename(tmp_path / f"{'v' * 252}.ts")
    paths = media.output_paths(
        [media.ImageFile(image), media.ImageFile(twin / f"{stem}.jpg")], tmp_path
    )
    paths += media.output_paths([media.VideoFile(video)], tmp_path)
    lengths = [len(os.fsencode(path.name)) for path in paths]
    assert all(250 <= length <= 255 for length in lengths)
    assert len(set(paths)) == 3
    assert [path.suffix for path in paths] == [".png", ".png", ".mp4"]
    for path in paths:
        path.touch()


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_what_is_done_stays_however_the_run_ends(tmp_path, monkeypatch, end):
    for name in "abcd":
        save(tmp_path / f"in/{name}.png")
    find = Dark.__call__

    def stop_at_the_third(self, frames):
        if self.frames == 2:
            raise end("stopped")
        return find(self, frames)

    monkeypatch.setattr(Dark, "__call__", stop_at_the_third)
    with pytest.raises(end):
        run(tmp_path / "out", tmp_path / "in")
    assert names(tmp_path / "out") == ["a.png", "b.png", "predictions.json"]
    assert [os.path.basename(r["file_name"]) for r in read(tmp_path / "out")] == ["a.png", "b.png"]
    run(tmp_path / "again", save(tmp_path / "in/a.png"))
