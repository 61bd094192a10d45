"""Models on corrupted images: pixels, evaluation, sums, files, and what is refused."""

import importlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import build_model
from detectron2.utils import comm
from helpers.coco import small_coco
from helpers.figures import check_texts
from helpers.runs import ROOT, TINY, environment
from PIL import Image

from sw_detectron.analysis.corruption import (
    CLEAN,
    corruption_figure,
    main_metrics,
    markdown_tables,
    mean_names,
    robustness,
    values_by_metric,
)
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.data.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    ImageCorruption,
    corrupt,
    image_names,
)
from sw_detectron.data.images import images_changed, read_image
from sw_detectron.data.slices import register_spread
from sw_detectron.engine import corruption as engine_corruption
from sw_detectron.engine import corruption_benchmark, load_config, load_model
from sw_detectron.errors import UserError
from sw_detectron.task import find_task
from sw_detectron.tasks.classification.data import register_images

imagecorruptions = pytest.importorskip(
    "imagecorruptions", reason="pip install '.[robustness]' installs imagecorruptions"
)

TOOL = [sys.executable, str(ROOT / "tools/corruption_benchmark.py")]
CONFIG = "nuclei_mask_rcnn_R18_FPN_SW.yaml"
SMALL = [*TINY, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0", "MODEL.DEVICE", "cpu"]
SMALL += ["MODEL.FPN.OUT_CHANNELS", "16", "DATALOADER.NUM_WORKERS", "0"]
RANDOM = [
    *("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur"),
    *("snow", "frost", "fog", "elastic_transform"),
]
# Width and height; the third is smaller than the library takes.
SIZES = ((48, 40), (40, 36), (30, 24))


def pixels_of(seed=0, height=40, width=44):
    """A picture with soft shapes, so that blur and compression change it too."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))


def write_coco_folder(folder):
    """Three images, the second of them grey."""
    content = small_coco(3)
    for record, (width, height) in zip(content["images"], SIZES):
        record |= {"width": width, "height": height}
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)
        for number, (width, height) in enumerate(SIZES):
            image = Image.fromarray(pixels_of(number, height, width))
            image = image.convert("L") if number == 1 else image
            image.save(folder / split / f"{number + 1}.png")
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / f"annotations/{split}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_coco_folder(tmp_path_factory.mktemp("own"))


def save_model(folder, output, config=CONFIG, seed=0, overrides=()):
    """A checkpoint of an untrained model, which carries its config."""
    cfg = load_config(config, [*SMALL, "DATASETS.COCO_FOLDER", str(folder), *overrides])
    DatasetCatalog.get(cfg.DATASETS.TEST[0])
    torch.manual_seed(seed)
    output.mkdir()
    Checkpointer(build_model(cfg), str(output), cfg=cfg).save("model_final")
    return str(output / "model_final.pth")


@pytest.fixture(scope="module")
def weights(folder, tmp_path_factory):
    parent = tmp_path_factory.mktemp("models")
    return [save_model(folder, parent / name, seed=i) for i, name in enumerate(("sw", "bn"))]


def arguments(output, weights, *opts, corruptions="brightness", severities="1,5", images=None):
    return Namespace(
        config_file=None,
        weights=weights,
        output=str(output),
        corruptions=corruptions,
        severities=severities,
        images=images,
        opts=list(opts),
    )


class Fingerprint(DatasetEvaluator):
    """Sums up a detector's outputs so finely that no two images give the same."""

    def reset(self):
        self._sum = {}

    def process(self, inputs, outputs):
        for image, output in zip(inputs, outputs):
            found = output["instances"]
            boxes = found.pred_boxes.tensor.double().sum()
            self._sum[image["image_id"]] = float(boxes * found.scores.double().sum())

    def evaluate(self):
        values = {
            f"AP-{key}": value for part in comm.all_gather(self._sum) for key, value in part.items()
        }
        return {"bbox": {"AP": math.fsum(values.values()), **values}}


@pytest.fixture
def fingerprints(monkeypatch):
    """Detectors are evaluated by their `Fingerprint`."""
    trainer = find_task(load_config(CONFIG, ["MODEL.DEVICE", "cpu"])).trainer
    monkeypatch.setattr(
        trainer, "build_evaluator", classmethod(lambda cls, cfg, name, folder=None: Fingerprint())
    )


@pytest.fixture
def evaluations(monkeypatch):
    """The changes with which models were evaluated, in order."""
    made, evaluate = [], engine_corruption.evaluate

    def counted(cfg, model, change):
        made.append(change)
        return evaluate(cfg, model, change)

    monkeypatch.setattr(engine_corruption, "evaluate", counted)
    return made


# Pixels


def test_the_corruptions_are_the_librarys_common_ones():
    assert list(CORRUPTIONS) == imagecorruptions.get_corruption_names("common")


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_an_images_pixels_follow_from_its_name(corruption):
    image = pixels_of()
    states = np.random.get_state(), random.getstate(), torch.get_rng_state()  # noqa: NPY002
    first = corrupt(image, corruption, 3, "a")
    other = corrupt(image, corruption, 3, "b")
    assert np.array_equal(corrupt(image, corruption, 3, "a"), first)
    assert first.shape == image.shape
    assert first.dtype == np.uint8
    assert not np.array_equal(first, image)
    assert np.array_equal(first, other) == (corruption not in RANDOM)
    assert all(map(np.array_equal, np.random.get_state()[1:3], states[0][1:3]))  # noqa: NPY002
    assert random.getstate() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_severities_draw_noise_of_their_own():
    grey = np.full((64, 64, 3), 128, np.uint8)
    noise = [corrupt(grey, "gaussian_noise", s, "a").astype(float).ravel() - 128 for s in (1, 2)]
    assert abs(np.corrcoef(*noise)[0, 1]) < 0.1  # of 12,288 values; 1 if it were the same noise


def test_an_error_leaves_numpys_generator_too(monkeypatch):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(KeyError):
        corrupt(pixels_of(), "none", 3, "a")
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@pytest.mark.slow
def test_another_process_sees_the_same_pixels():
    chosen = ("gaussian_noise", "impulse_noise", "snow", "frost", "elastic_transform")
    script = (
        "import sys, numpy as np\n"
        "from sw_detectron.data.corruptions import corrupt\n"
        "image = np.frombuffer(bytes.fromhex(sys.argv[1]), np.uint8).reshape(40, 44, 3)\n"
        "for name in reversed(sys.argv[2:]):\n"
        "    print(corrupt(image, name, 2, 'a').tobytes().hex())\n"
    )
    image = pixels_of()
    command = [sys.executable, "-c", script, image.tobytes().hex(), *chosen]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    here = [corrupt(image, name, 2, "a").tobytes().hex() for name in reversed(chosen)]
    assert output.split() == here


@pytest.mark.parametrize("size", [(1, 1), (31, 50), (50, 20), (8, 9)])
@pytest.mark.parametrize("corruption", ["gaussian_noise", "pixelate", "snow", "zoom_blur", "fog"])
def test_small_images_are_cut_out_of_mirrored_ones(corruption, size):
    image = pixels_of(0, *size)
    found = corrupt(image, corruption, 4, "a")
    tall = np.concatenate([image, image[::-1]] * 16)[: max(32, size[0])]
    mirrored = np.concatenate([tall, tall[:, ::-1]] * 16, axis=1)[:, : max(32, size[1])]
    mirrored = mirrored if size[1] < 32 else tall
    mirrored = mirrored if size[0] < 32 else mirrored[: size[0]]
    expected = corrupt(mirrored, corruption, 4, "a")[: size[0], : size[1]]
    assert found.shape == image.shape
    assert np.array_equal(found, expected)


def test_images_have_names_that_do_not_depend_on_their_folder():
    def records(folder):
        return [{"file_name": f"{folder}/{name}"} for name in ("cat/1.png", "dog/1.png")]

    names = image_names(records("/a/b"))
    assert names == {"/a/b/cat/1.png": "cat/1.png", "/a/b/dog/1.png": "dog/1.png"}
    assert list(image_names(records("c")).values()) == list(names.values())
    assert image_names([{"file_name": "a.png", "image_id": 3}]) == {"a.png": "3"}
    assert image_names([{"image": 0, "image_id": 3}]) == {3: "3"}
    with pytest.raises(UserError, match="cannot be told apart"):
        image_names([{"image": 0}])


def test_images_of_other_data_sets_stay(tmp_path):
    path = str(tmp_path / "1.png")
    Image.fromarray(pixels_of()).save(path)
    with images_changed(ImageCorruption("brightness", 5, {"other.png": "1"})):
        assert np.array_equal(read_image(path, "RGB"), pixels_of())
    with images_changed(ImageCorruption("brightness", 5, {path: "1"})):
        assert not np.array_equal(read_image(path, "RGB"), pixels_of())
    assert np.array_equal(read_image(path, "RGB"), pixels_of())


@pytest.mark.parametrize("format", ["RGB", "BGR", "L", "YUV-BT.601"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "I;16"])
def test_all_formats_are_read_as_from_a_corrupted_png(tmp_path, format, mode):
    path, copy = str(tmp_path / "1.png"), str(tmp_path / "copy.png")
    if mode == "I;16":
        Image.fromarray(pixels_of()[..., 0].astype(np.uint16) * 257).save(path)
    else:
        Image.fromarray(pixels_of()).convert(mode).save(path)
    Image.fromarray(corrupt(read_image(path, "RGB"), "snow", 2, "x")).save(copy)
    with images_changed(ImageCorruption("snow", 2, {path: "x"})):
        found = read_image(path, format)
    assert np.array_equal(found, read_image(copy, format))


def corrupt_files(source, target, corruption, severity):
    """The folder's validation images as PNG; each is named by its image_id."""
    for path in (source / "val").iterdir():
        pixels = corrupt(read_image(path, "RGB"), corruption, severity, path.stem)
        Image.fromarray(pixels).save(target / "val" / path.name)


# Evaluation


def test_clean_is_the_plain_evaluation(folder, weights, tmp_path):
    cfg, model = load_model("", weights[0], ["OUTPUT_DIR", str(tmp_path)])
    expected = find_task(cfg).trainer.test(cfg, model)
    corruption_benchmark(arguments(tmp_path / "out", weights[:1], severities="1"))
    (file,) = (tmp_path / "out/measured").glob("*/clean_0.json")
    found = json.loads(file.read_text())["results"]
    assert found.keys() == expected.keys() == {"bbox", "segm"}
    for task, metrics in expected.items():
        assert found[task] == {k: None if math.isnan(v) else v for k, v in metrics.items()}


def test_a_measurement_is_that_of_images_corrupted_beforehand(
    folder, weights, tmp_path, fingerprints
):
    chosen = "impulse_noise,frost"
    args = arguments(tmp_path / "out", weights[:1], corruptions=chosen, severities="3")
    corruption_benchmark(args)
    values = []
    for corruption, severity in (*((name, 3) for name in chosen.split(",")), CLEAN):
        copied = write_coco_folder(tmp_path / corruption)
        if corruption != "clean":
            corrupt_files(folder, copied, corruption, severity)
        cfg, model = load_model("", weights[0], ["DATASETS.COCO_FOLDER", str(copied)])
        expected = find_task(cfg).trainer.test(cfg, model)
        (file,) = (tmp_path / "out/measured").glob(f"*/{corruption}_{severity}.json")
        assert json.loads(file.read_text())["results"] == expected
        assert len(expected["bbox"]) == 4
        values.append(expected["bbox"]["AP"])
    assert len(set(values)) == 3


def test_workers_of_the_data_loader_see_the_same(folder, weights, tmp_path, fingerprints):
    for workers in ("0", "2"):
        opts = ["DATALOADER.NUM_WORKERS", workers]
        args = arguments(tmp_path / workers, weights[:1], *opts, corruptions="gaussian_noise")
        corruption_benchmark(args)
    a, b = (json.loads((tmp_path / n / "results.json").read_text()) for n in "02")
    assert a == b


def test_workers_that_are_not_forked_are_left_out(folder, weights, tmp_path, monkeypatch):
    benchmark = engine_corruption.Benchmark(
        (CLEAN,), None, ("DATALOADER.NUM_WORKERS", "2"), tmp_path
    )
    for method, workers in (("fork", 2), ("spawn", 0)):
        monkeypatch.setattr("multiprocessing.get_start_method", lambda method=method: method)
        cfg = engine_corruption.prepare("", weights[0], benchmark).cfg
        assert workers == cfg.DATALOADER.NUM_WORKERS


def batches(cfg):
    return list(find_task(cfg).trainer.build_test_loader(cfg, cfg.DATASETS.TEST[0]))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_classifier_sees_corrupted_images(tmp_path, in_memory):
    name = f"corrupted_{tmp_path.name}"
    images = [pixels_of(i, 40, 40) for i in range(4)]
    for i, image in enumerate(images):
        (tmp_path / "val" / "abcd"[i]).mkdir(parents=True)
        Image.fromarray(image).save(tmp_path / "val" / "abcd"[i] / "x.png")
    records = [{"image": x, "label": i, "image_id": i} for i, x in enumerate(images)]
    opts = ["DATASETS.FOLDER", str(tmp_path), "DATASETS.TEST", "('folder_val',)"]
    opts += ["INPUT.CLASSIFIER.SIZE", "40", "INPUT.CLASSIFIER.RESIZE_TEST", "40"]
    cfg = load_config("classification_shapes_R18_SW.yaml", [*opts, "DATALOADER.NUM_WORKERS", "0"])
    if in_memory:
        register_images(name, tmp_path, lambda: records, lambda: tuple("abcd"))
        cfg.DATASETS.TEST = (name,)
    names = image_names(DatasetCatalog.get(cfg.DATASETS.TEST[0]))
    with images_changed(ImageCorruption("shot_noise", 2, names)):
        found = torch.cat([batch["image"] for batch in batches(cfg)])
    for i, (image, seen) in enumerate(zip(images, found, strict=True)):
        expected = corrupt(image, "shot_noise", 2, str(i) if in_memory else f"{'abcd'[i]}/x.png")
        rgb = expected if cfg.INPUT.FORMAT == "RGB" else expected[..., ::-1]
        assert np.array_equal(seen.permute(1, 2, 0).numpy(), rgb)


def test_a_segmentor_sees_corrupted_images(tmp_path):
    cfg = load_config("shapes_semantic_R18_SW.yaml", ["MODEL.DEVICE", "cpu"])
    cfg.INPUT.MIN_SIZE_TEST = 0
    path = str(tmp_path / "1.png")
    Image.fromarray(pixels_of()).save(path)
    Image.fromarray(np.zeros((40, 44), np.uint8)).save(tmp_path / "labels.png")
    record = {"file_name": path, "sem_seg_file_name": str(tmp_path / "labels.png")}
    mapper = find_task(cfg).trainer.build_mapper(cfg, is_train=False)
    with images_changed(ImageCorruption("fog", 2, {path: "1.png"})):
        seen = mapper(record)["image"]
    expected = corrupt(pixels_of(), "fog", 2, "1.png")
    rgb = expected if cfg.INPUT.FORMAT == "RGB" else expected[..., ::-1]
    assert np.array_equal(seen.permute(1, 2, 0).numpy(), rgb)


def test_a_subset_is_spread_evenly(folder):
    load_config(CONFIG, ["DATASETS.COCO_FOLDER", str(folder)])
    everything = DatasetCatalog.get("own_val")
    part = register_spread("own_val", 2)
    assert DatasetCatalog.get(part) == [everything[0], everything[1]]
    assert DatasetCatalog.get(register_spread("own_val", 9)) == everything
    assert MetadataCatalog.get(part).thing_classes == MetadataCatalog.get("own_val").thing_classes


@pytest.mark.slow
def test_two_processes_measure_what_one_does(folder, weights, tmp_path):
    command = [*TOOL, "--weights", weights[0], "--corruptions", "gaussian_noise,fog"]
    command += ["--severities", "2", "--output"]
    for number in "12":
        done = subprocess.run(
            [*command, str(tmp_path / number), "--num-gpus", number],
            env=environment(tmp_path) | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "| gaussian_noise |" in done.stdout
        assert done.stdout.count("[3/3]") == 1
    one, two = (json.loads((tmp_path / n / "results.json").read_text()) for n in "12")
    assert one == two


# Sums


def test_the_means_are_those_of_the_paper():
    generator = np.random.default_rng(0)
    table = generator.uniform(0, 40, (15, 5))
    values = {(c, s): table[i, s - 1] for i, c in enumerate(CORRUPTIONS) for s in SEVERITIES}
    found = robustness({CLEAN: 42.0, **values})
    assert found.complete
    assert found.mean == pytest.approx(table.sum() / 75)
    assert found.relative == pytest.approx(table.sum() / 75 / 42)
    assert list(found.by_corruption) == list(CORRUPTIONS)
    assert list(found.by_corruption.values()) == pytest.approx(list(table.mean(axis=1)))
    assert mean_names(found.complete) == ("mPC", "rPC")
    del values["fog", 3]
    assert not robustness({CLEAN: 42.0, **values}).complete


def test_a_part_of_the_benchmark_is_not_called_mpc():
    values = {CLEAN: 20.0, ("fog", 1): 10.0, ("fog", 3): 5.0}
    text = markdown_tables({"a|b": {"box AP": robustness(values)}})
    assert "PC" not in text
    assert r"| a\|b    | 20.0      | 7.5                        | 37.5 %       |" in text
    assert "mean over those measured" in text


def test_nothing_is_divided_by_zero():
    found = robustness({CLEAN: 0.0, ("fog", 1): 0.0})
    assert math.isnan(found.relative)
    assert "| a       | 0.0       | 0.0                        | -            |" in markdown_tables(
        {"a": {"mIoU": found}}
    )


def test_the_metrics_of_the_tasks():
    assert main_metrics({"classification": {"top1_error": 12.5, "top5_error": 2.0}}) == {
        "accuracy": 87.5
    }
    detector = {"bbox": {"AP": 1.0, "AP50": 2.0}, "segm": {"AP": 3.0, "AP-cat": 4.0}}
    assert main_metrics(detector) == {"box AP": 1.0, "mask AP": 3.0}
    assert main_metrics({"sem_seg": {"mIoU": 5.0, "pACC": 6.0}}) == {"mIoU": 5.0}
    assert math.isnan(main_metrics({"bbox": {"AP": None}})["box AP"])


def test_a_detector_that_finds_nothing_has_an_ap_of_0():
    both = {"bbox": {"AP": 30.0}, "segm": {"AP": 20.0}}
    # What Detectron2's evaluator gives without a single detection.
    results = {CLEAN: both, ("fog", 1): both, ("fog", 5): {"bbox": {"AP": math.nan}}}
    assert values_by_metric(results) == {
        "box AP": {CLEAN: 30.0, ("fog", 1): 30.0, ("fog", 5): 0.0},
        "mask AP": {CLEAN: 20.0, ("fog", 1): 20.0, ("fog", 5): 0.0},
    }
    unmeasured = values_by_metric({CLEAN: {"bbox": {"AP": None}}, ("fog", 1): {}})
    assert all(math.isnan(value) for value in unmeasured["box AP"].values())


@pytest.mark.parametrize("corruptions", [1, 4, 7, 15])
@pytest.mark.parametrize("models", [1, 3])
def test_the_picture_has_a_panel_for_each_corruption(corruptions, models):
    chosen = CORRUPTIONS[:corruptions]
    measured = {
        f"model_{i}": {CLEAN: 40.0 - i}
        | {(c, s): 40.0 - i - 5 * s - k for k, c in enumerate(chosen) for s in SEVERITIES}
        for i in range(models)
    }
    figure = corruption_figure(measured, "box AP")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [name.replace("_", " ") for name in chosen]
    for k, axes in enumerate(figure.axes):
        assert len(axes.lines) == models
        for i, line in enumerate(axes.lines):
            expected = [(0, 40 - i), *((s, 40 - i - 5 * s - k) for s in SEVERITIES)]
            assert [tuple(point) for point in line.get_xydata()] == expected
    check_texts(figure)


# The benchmark


def test_several_models_are_in_one_table(folder, weights, tmp_path, capsys):
    found = corruption_benchmark(arguments(tmp_path, weights, corruptions="fog,contrast"))
    assert list(found) == ["sw", "bn"]
    text = (tmp_path / "results.md").read_text()
    assert "3 images of `own_val`" in text
    for line in ("| sw ", "| bn ", "| box AP ", "| mask AP ", "| fog ", "| contrast "):
        assert line in text
    assert (tmp_path / "corruptions.png").is_file()
    assert (tmp_path / "corruptions_mask_AP.png").is_file()
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["images"] == 3
    measured = record["models"]["bn"]["mask AP"]["by severity"]["contrast"]
    assert list(measured) == ["1", "5"]
    assert found["bn"]["mask AP"].by_corruption["contrast"] == sum(measured.values()) / 2
    progress = capsys.readouterr().out.splitlines()
    assert progress[0].startswith("[1/10] sw: clean: box AP ")
    assert "(remaining 0:0" in progress[0]
    assert progress[-1].startswith("[10/10] bn: contrast, severity 5: ")


def test_what_was_measured_is_not_measured_again(
    folder, weights, tmp_path, fingerprints, evaluations, capsys
):
    args = arguments(tmp_path / "cut", weights[:1], corruptions="shot_noise")
    whole = corruption_benchmark(
        arguments(tmp_path / "whole", weights[:1], corruptions="shot_noise")
    )
    assert len(evaluations) == 3
    evaluations.clear()

    counted = engine_corruption.evaluate

    def interrupted(cfg, model, change):
        if len(evaluations) == 2:
            raise KeyboardInterrupt
        return counted(cfg, model, change)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_corruption, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            corruption_benchmark(args)
    evaluations.clear()
    capsys.readouterr()
    assert corruption_benchmark(args) == whole
    assert len(evaluations) == 1
    assert "[2/3] sw: 2 were measured before" in capsys.readouterr().out
    assert corruption_benchmark(args) == whole
    assert len(evaluations) == 1
    # More of the same: only what is new.
    corruption_benchmark(arguments(tmp_path / "cut", weights[:1], corruptions="shot_noise,fog"))
    assert len(evaluations) == 3


@pytest.mark.parametrize("changed", ["override", "checkpoint", "images", "annotations", "damaged"])
def test_changed_arguments_are_measured_anew(tmp_path, fingerprints, evaluations, changed):
    folder = write_coco_folder(tmp_path / "own")
    weights = save_model(folder, tmp_path / "model")
    args = arguments(tmp_path / "out", [weights], severities="1")
    before = corruption_benchmark(args)
    assert len(evaluations) == 2
    if changed == "override":
        args.opts = ["INPUT.MIN_SIZE_TEST", "96"]
    elif changed == "checkpoint":
        shutil.rmtree(tmp_path / "model")
        save_model(folder, tmp_path / "model", seed=5)
    elif changed == "images":
        args.images = 2
    elif changed == "annotations":
        content = small_coco(2)
        for record, (width, height) in zip(content["images"], SIZES):
            record |= {"width": width, "height": height}
        (folder / "annotations/val.json").write_text(json.dumps(content))
    else:
        for path in (tmp_path / "out/measured").glob("*/*.json"):
            path.write_text(path.read_text()[:20])
    after = corruption_benchmark(args)
    assert len(evaluations) == 4
    assert (after == before) == (changed == "damaged")
    number = 2 if changed in ("images", "annotations") else 3
    assert f"{number} images of `own_val`" in (tmp_path / "out/results.md").read_text()
    if changed in ("override", "images"):  # back to the first: both are kept
        args.opts, args.images = [], None
        assert corruption_benchmark(args) == before
        assert len(evaluations) == 4


def test_workers_and_the_writing_of_a_path_do_not_count_as_changes(
    folder, weights, tmp_path, evaluations, monkeypatch
):
    args = arguments(tmp_path, weights[:1], severities="1")
    corruption_benchmark(args)
    monkeypatch.chdir(Path(weights[0]).parent)
    args.weights = ["model_final.pth"]
    args.opts = ["OUTPUT_DIR", "elsewhere"]
    corruption_benchmark(args)
    assert len(evaluations) == 2


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": "fog,rain"}, "--corruptions fog,rain: there is no 'rain'; known: gauss"),
        ({"severities": "0"}, "--severities 0: there is no '0'; known: 1, 2, 3, 4, 5"),
        ({"severities": "1,high"}, "there is no 'high'"),
        ({"corruptions": ""}, "--corruptions is empty: there is nothing to do"),
        ({"severities": ","}, "--severities is empty: there is nothing to do"),
    ],
)
def test_unknown_conditions_are_one_line(weights, tmp_path, options, message):
    refused(arguments(tmp_path, weights, **options), message)


def refused(args, message):
    with pytest.raises(UserError) as error:
        corruption_benchmark(args)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_library_is_one_line(weights, tmp_path, monkeypatch):
    import_module = importlib.import_module

    def without(name, *args):
        if name == "imagecorruptions":
            raise ModuleNotFoundError("No module named 'imagecorruptions'", name=name)
        return import_module(name, *args)

    monkeypatch.setattr("importlib.import_module", without)
    refused(arguments(tmp_path, weights), "pip install '.[robustness]'")


def test_models_are_compared_on_one_data_set(folder, weights, tmp_path):
    other = tmp_path / "other"
    write_coco_folder(other)
    content = json.loads((other / "annotations/val.json").read_text())
    content["annotations"].pop()
    (other / "annotations/val.json").write_text(json.dumps(content))
    second = save_model(other, tmp_path / "second")
    refused(arguments(tmp_path / "out", [weights[0], second]), "compare them on one data set")


def test_an_evaluation_without_a_known_metric_is_refused_at_once(
    weights, tmp_path, fingerprints, evaluations, monkeypatch
):
    monkeypatch.setattr(Fingerprint, "evaluate", lambda self: {"speed": {"fps": 3.0}})
    refused(arguments(tmp_path, weights), "none of the metrics that are compared: AP")
    assert evaluations == [None]


def test_without_test_data_there_is_nothing_to_do(weights, tmp_path):
    refused(arguments(tmp_path, weights, "DATASETS.TEST", "()"), "DATASETS.TEST is empty")
    refused(arguments(tmp_path, ["nowhere.pth"]), "'nowhere.pth' do not exist")
    args = arguments(tmp_path, weights)
    args.config_file = [CONFIG]
    refused(args, "--config is given 1 and --weights 2 times")


@pytest.mark.slow
def test_the_tool_ends_with_one_line_without_the_library(weights, tmp_path):
    arguments = [TOOL[1], "--weights", weights[0], "--output", str(tmp_path)]
    script = (
        "import runpy, sys; sys.modules['imagecorruptions'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "install it with pip install '.[robustness]'" in done.stderr
