"""Segmentation as a command: its configs, evaluation over ranks, resuming, real images."""

import json
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.modeling import build_model
from helpers.runs import TRAIN_NET, refuse, run, same
from PIL import Image
from torch import nn

from sw_detectron.config import config_folder
from sw_detectron.data import generate_shapes
from sw_detectron.engine import argument_parser, load_config, train_or_evaluate
from sw_detectron.engine.prediction import predict
from sw_detectron.layers import SwitchWhiten2d
from sw_detectron.tasks.segmentation import register_shapes_segmentation

# Configs


class Row(NamedTuple):
    """A row of the paper's tables: the statistics of the placed layers, and where those lie."""

    statistics: str
    placement: str
    whitening: str
    depth: int
    classes: int
    crop: int
    bins: tuple[int, ...] = ()


A, B = "bw iw", "bw iw bn in ln"
PYRAMID = (1, 2, 3, 6)
TABLE = {
    # Table 3; "the above implementation of SW is based on SVD"
    "ade20k_semantic_R50_BN": Row("", "none", "eigh", 50, 150, 473),
    "ade20k_semantic_R50_SN": Row("bn in ln", "conv2", "eigh", 50, 150, 473),
    "ade20k_semantic_R50_BW": Row("bw", "conv2", "eigh", 50, 150, 473),
    "ade20k_semantic_R50_SW": Row(A, "conv2", "eigh", 50, 150, 473),
    "ade20k_semantic_R50_SWb": Row(B, "conv2", "eigh", 50, 150, 473),
    "cityscapes_semantic_R50_BN": Row("", "none", "eigh", 50, 19, 713),
    "cityscapes_semantic_R50_SN": Row("bn in ln", "conv2", "eigh", 50, 19, 713),
    "cityscapes_semantic_R50_BW": Row("bw", "conv2", "eigh", 50, 19, 713),
    "cityscapes_semantic_R50_SW": Row(A, "conv2", "eigh", 50, 19, 713),
    "cityscapes_semantic_R50_SWb": Row(B, "conv2", "eigh", 50, 19, 713),
    # Table 4
    "ade20k_pspnet_R101_BN": Row("", "none", "eigh", 101, 150, 473, PYRAMID),
    "ade20k_pspnet_R101_SW": Row(A, "conv2", "eigh", 101, 150, 473, PYRAMID),
    # Table 5
    "cityscapes_semantic_R50_BW_7layers_eigh": Row("bw", "seven", "eigh", 50, 19, 713),
    "cityscapes_semantic_R50_SW_7layers_eigh": Row(A, "seven", "eigh", 50, 19, 713),
    "cityscapes_semantic_R50_SW_7layers_newton": Row(A, "seven", "newton", 50, 19, 713),
    # Of this project
    "shapes_semantic_R18_BN": Row("", "none", "newton", 18, 5, 97),
    "shapes_semantic_R18_SW": Row(A, "small", "newton", 18, 5, 97),
}
SEVEN = "res2.1.conv2 res3.0.conv2 res3.2.conv2 res4.0.conv2 res4.2.conv2 res4.4.conv2"
SMALL = "res2.0.conv2 res3.0.conv1 res3.1.conv2 res4.1.conv1"


def placed_layers(row):
    if row.placement == "conv2":
        blocks = {"res2": 3, "res3": 4, "res4": {50: 6, 101: 23}[row.depth]}
        return ["stem.conv1", *(f"{s}.{i}.conv2" for s, n in blocks.items() for i in range(n))]
    layers = {"none": "", "seven": f"stem.conv1 {SEVEN}", "small": f"stem.conv1 {SMALL}"}
    return layers[row.placement].split()


def test_the_table_names_every_config():
    names = {
        p.stem for kind in ("semantic", "pspnet") for p in config_folder().glob(f"*/*_{kind}_*")
    }
    assert names == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_norms_lie_where_the_papers_rows_have_them(name):
    row = TABLE[name]
    cfg = load_config(f"{name}.yaml", ["MODEL.DEVICE", "meta"])
    with torch.device("meta"):
        model = build_model(cfg)
    norms = {n: m for n, m in model.named_modules() if n.endswith(".norm")}
    expected = {f"backbone.{layer}.norm" for layer in placed_layers(row)}
    assert len(expected) == {"none": 0, "seven": 7, "small": 5}.get(row.placement, len(expected))
    assert row.placement != "conv2" or len(expected) == {50: 14, 101: 31}[row.depth]
    for layer, norm in norms.items():
        if layer in expected:
            assert isinstance(norm, SwitchWhiten2d), layer
            assert " ".join(norm.statistics) == row.statistics
            assert (norm.whitening, norm.num_pergroup, norm.sync) == (row.whitening, 16, True)
        else:
            assert type(norm) is nn.SyncBatchNorm, layer
    assert expected <= set(norms)
    assert all(p.requires_grad for p in model.parameters())
    head = model.sem_seg_head
    assert head.classifier.predictor.out_channels == row.classes
    assert (head.pyramid.bins if head.pyramid else ()) == row.bins
    assert head.stride == 8 and head.auxiliary is not None
    assert tuple(cfg.INPUT.CROP.SIZE) == model.window == (row.crop, row.crop)
    assert f"output/{name}" == cfg.OUTPUT_DIR


def test_the_recipe_of_the_papers_rows():
    for name in TABLE:
        cfg = load_config(f"{name}.yaml", [])
        if name.startswith("shapes"):
            continue
        iterations = 150_000 if name.startswith("ade20k") else 90_000
        assert cfg.SOLVER.IMS_PER_BATCH == 16
        assert iterations == cfg.SOLVER.MAX_ITER
        assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.HEAD_LR_FACTOR) == (0.01, 10)
        assert (cfg.SOLVER.LR_SCHEDULER_NAME, cfg.SOLVER.POLY_LR_POWER) == ("WarmupPolyLR", 0.9)
        assert (cfg.SOLVER.MOMENTUM, cfg.SOLVER.WEIGHT_DECAY) == (0.9, 1e-4)
        assert (cfg.INPUT.RANDOM_SCALE, cfg.INPUT.RANDOM_ROTATION) == ([0.5, 2.0], 10)
        assert cfg.INPUT.RANDOM_BLUR > 0 and cfg.INPUT.RANDOM_FLIP == "horizontal"
        assert cfg.MODEL.SEM_SEG_HEAD.AUX_LOSS_WEIGHT == 0.4
        assert cfg.TEST.AUG.SCALES == [0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


# The command

TINY = """
    SOLVER.IMS_PER_BATCH 4 SOLVER.MAX_ITER 2 INPUT.CROP.SIZE (65,65)
    DATASETS.TRAIN ('shapes_sem_seg_val',) DATASETS.TEST ('shapes_sem_seg_val[:5]',)
""".split()
SHAPES = "shapes_semantic_R18_SW.yaml"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["INPUT.CROP.SIZE", "(64,65)"], ["INPUT.CROP.SIZE", "multiple of 8"]),
        (["MODEL.SEM_SEG_HEAD.NUM_CLASSES", "7"], ["shapes_sem_seg_", "5 classes"]),
        (["DATASETS.TEST", "('shapes_val',)"], ["shapes_val", "no label maps"]),
        (["DATASETS.TRAIN", "('ade20k_sem_seg_train',)"], ["ade20k", "DETECTRON2_DATASETS"]),
        (["MODEL.SEM_SEG_HEAD.CLASS_WEIGHTS", "[1.0]"], ["CLASS_WEIGHTS", "5 classes"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_one_clear_line(capsys, tmp_path, arguments, words):
    message = refuse(capsys, "--config", SHAPES, *arguments, "OUTPUT_DIR", str(tmp_path))
    assert all(word in message for word in words), message


def succeed(command, datasets):
    done = run(command, datasets)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def execute(config, *arguments):
    """The command in this process."""
    train_or_evaluate(argument_parser("", "").parse_args(["--config", config, *arguments]))


@pytest.fixture
def shapes_here(datasets):
    """The data sets of shapes in the tests' folder, in this process too."""
    register_shapes_segmentation(datasets / "shapes")
    yield
    register_shapes_segmentation()


def confusion_matrix(predictions: Path, labels: dict[str, np.ndarray], classes: int) -> np.ndarray:
    """Counts of pixels by class and predicted class, from the masks that the evaluator writes."""
    counts = np.zeros((classes, classes))
    for result in json.loads(predictions.read_text()):
        mask = mask_util.decode(result["segmentation"]).astype(bool)
        label = labels[result["file_name"]]
        for k in range(classes):
            counts[k, result["category_id"]] += np.count_nonzero(mask & (label == k))
    return counts


def check_metrics(metrics: dict, counts: np.ndarray, names: list[str]) -> None:
    hits = counts.diagonal()
    with np.errstate(invalid="ignore"):
        iou = hits / (counts.sum(0) + counts.sum(1) - hits)
    present = counts.sum(1) > 0
    assert metrics["mIoU"] == pytest.approx(100 * iou[present].mean(), rel=1e-12)
    assert metrics["pACC"] == pytest.approx(100 * hits.sum() / counts.sum(), rel=1e-12)
    for k in np.flatnonzero(present):
        assert metrics[f"IoU-{names[k]}"] == pytest.approx(100 * iou[k], rel=1e-12)


@pytest.mark.slow
def test_training_and_exact_evaluation_over_ranks(shapes_here, datasets, tmp_path):
    """Two processes train; one and two evaluate, at one scale and several; all by hand."""
    two = ["--num-gpus", "2", "--dist-url", "auto", *TINY, "OUTPUT_DIR", str(tmp_path / "two")]
    succeed([*TRAIN_NET, "--config", SHAPES, *two], datasets)
    trained = json.loads((tmp_path / "two/results.json").read_text())["results"]
    one = ["MODEL.WEIGHTS", str(tmp_path / "two/model_final.pth")]
    one += "TEST.AUG.ENABLED True TEST.AUG.SCALES (0.75,1.5) OUTPUT_DIR".split()
    execute(SHAPES, "--eval-only", *TINY, *one, str(tmp_path / "one"))
    evaluated = json.loads((tmp_path / "one/results.json").read_text())["results"]
    # Of the five images one process has three and the other two.
    assert evaluated["sem_seg"] == trained["sem_seg"]

    folder = datasets / "shapes/val"
    labels = {
        str(file): np.array(Image.open(datasets / "shapes/labels/val" / file.name))
        for file in folder.iterdir()
    }
    names = ["background", "circle", "square", "triangle", "star"]
    for task, output in (("sem_seg", "inference"), ("sem_seg_TTA", "inference_TTA")):
        written = tmp_path / "one" / output / "sem_seg_predictions.json"
        counts = confusion_matrix(written, labels, 5)
        assert counts.sum() == 5 * 128 * 128
        check_metrics(evaluated[task], counts, names)
    assert evaluated["sem_seg"] != evaluated["sem_seg_TTA"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(shapes_here, tmp_path):
    options = [*TINY, *"DATASETS.TEST () SOLVER.CHECKPOINT_PERIOD 1 OUTPUT_DIR".split()]
    execute(SHAPES, "--resume", *options, str(tmp_path / "whole"))
    # Interrupted after the first of two iterations.
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "model_0000000.pth").write_bytes((tmp_path / "whole/model_0000000.pth").read_bytes())
    (cut / "last_checkpoint").write_text("model_0000000.pth")
    execute(SHAPES, "--resume", *options, str(cut))
    assert "Starting training from iteration 1" in (cut / "log.txt").read_text()
    same(torch.load(cut / "model_final.pth"), torch.load(tmp_path / "whole/model_final.pth"))


@pytest.mark.slow
def test_labels_that_do_not_fit_are_one_clear_line_from_workers_too(tmp_path):
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (80, 80)).save(tmp_path / "images/a.png")
    Image.new("L", (80, 80), 9).save(tmp_path / "labels/a.png")
    config = tmp_path / "config.yaml"
    folder = f"{{IMAGES: {tmp_path}/images, LABELS: {tmp_path}/labels, CLASSES: 5}}"
    config.write_text(
        f"_BASE_: {SHAPES}\n"
        f"DATASETS: {{SEM_SEG_FOLDERS: {{bad: {folder}}}, TRAIN: [bad], TEST: []}}\n"
        f"DATALOADER: {{NUM_WORKERS: 1}}\nOUTPUT_DIR: {tmp_path}/output\n"
    )
    failed = run([*TRAIN_NET, "--config", str(config)], tmp_path)
    assert failed.returncode == 1
    last = failed.stderr.strip().splitlines()[-1]
    assert "error: labels" in last and "a.png' have the value 9" in last
    assert "Traceback" not in failed.stderr


def test_predictions_of_a_folder(datasets, tmp_path):
    """Masks of all classes, and a picture as wide as the image and the legend."""
    torch.manual_seed(0)
    options = ["MODEL.DEVICE", "cpu"]
    model = build_model(load_config(SHAPES, options)).eval()
    torch.save({"model": model.state_dict()}, tmp_path / "model.pth")
    generate_shapes(tmp_path / "shapes", "val", 2, size=140)
    arguments = {"config_file": SHAPES, "weights": str(tmp_path / "model.pth")}
    arguments |= {"confidence": 0.5, "batch": 1}
    inputs = [str(tmp_path / "shapes/val"), *options]
    predict(Namespace(**arguments, inputs=inputs, output=str(tmp_path / "out")))
    results = json.loads((tmp_path / "out/predictions.json").read_text())
    for number, file in enumerate(sorted((tmp_path / "shapes/val").iterdir()), start=1):
        image = torch.from_numpy(np.array(Image.open(file)).transpose(2, 0, 1))
        with torch.no_grad():
            labels = model.probabilities(image).argmax(0).numpy()
        found = [r for r in results if r["image_id"] == number]
        assert [r["category_id"] for r in found] == np.unique(labels).tolist()
        for result in found:
            mask = mask_util.decode(result["segmentation"])
            np.testing.assert_array_equal(mask, labels == result["category_id"])
        assert Image.open(tmp_path / "out" / file.name).size == (280 + 160, 280)


# Real images


def panoptic_config(shared_data, folder, count, **options):
    """A config for real images, with the most frequent categories of COCO's panoptic masks."""
    root = shared_data / "data/coco"
    content = json.loads((root / "annotations/panoptic_train2017.json").read_text())
    annotations = content["annotations"][:count]
    areas = {}
    for annotation in annotations:
        for segment in annotation["segments_info"]:
            category = segment["category_id"]
            areas[category] = areas.get(category, 0) + segment["area"]
    chosen = sorted(areas, key=areas.get)[-5:]
    (folder / "images").mkdir()
    (folder / "labels").mkdir()
    files = {image["id"]: image["file_name"] for image in content["images"]}
    for annotation in annotations:
        file = files[annotation["image_id"]]
        (folder / "images" / file).symlink_to(root / "train2017" / file)
        with Image.open(root / "annotations/panoptic_train2017" / annotation["file_name"]) as image:
            pixels = np.array(image).astype(int) @ [1, 256, 256**2]
        labels = np.full(pixels.shape, 255, dtype=np.uint8)
        for segment in annotation["segments_info"]:
            if segment["category_id"] in chosen:
                labels[pixels == segment["id"]] = chosen.index(segment["category_id"])
        Image.fromarray(labels).save((folder / "labels" / file).with_suffix(".png"))
    names = {c["id"]: c["name"] for c in content["categories"]}
    classes = [names[c] for c in chosen]
    data = {"IMAGES": f"{folder}/images", "LABELS": f"{folder}/labels", "CLASSES": classes}
    path = folder / "config.yaml"
    # JSON is YAML.
    path.write_text(
        json.dumps(
            {
                "_BASE_": SHAPES,
                "DATASETS": {
                    "SEM_SEG_FOLDERS": {"real": data},
                    "TRAIN": ["real"],
                    "TEST": ["real"],
                },
                "OUTPUT_DIR": f"{folder}/output",
                **options,
            }
        )
    )
    return path, classes


@pytest.mark.slow
def test_real_images_train_in_one_process_and_resume_and_evaluate_in_two(shared_data, tmp_path):
    inputs = {"CROP": {"SIZE": [65, 65]}, "MIN_SIZE_TEST": 96, "MAX_SIZE_TEST": 96}
    config, classes = panoptic_config(shared_data, tmp_path, count=6, INPUT=inputs)
    options = "--resume SOLVER.IMS_PER_BATCH 4 SOLVER.MAX_ITER".split()
    execute(str(config), *options, "1", "DATASETS.TEST", "()")
    command = [*TRAIN_NET, "--config", str(config), "--num-gpus", "2", "--dist-url", "auto"]
    done = succeed([*command, *options, "2"], tmp_path)
    assert "Starting training from iteration 1" in done.stdout
    metrics = json.loads((tmp_path / "output/results.json").read_text())["results"]["sem_seg"]
    labels = {
        str(file): np.array(Image.open((tmp_path / "labels" / file.name).with_suffix(".png")))
        for file in (tmp_path / "images").iterdir()
    }
    assert any((label == 255).any() for label in labels.values())
    predictions = tmp_path / "output/inference/sem_seg_predictions.json"
    check_metrics(metrics, confusion_matrix(predictions, labels, 5), classes)


@pytest.mark.slow
def test_four_real_images_are_learnt_by_heart(shared_data, tmp_path):
    inputs = {
        "CROP": {"SIZE": [97, 97]},
        "RANDOM_SCALE": [0.2, 0.2],
        "RANDOM_ROTATION": 0.0,
        "RANDOM_FLIP": "none",
        "MIN_SIZE_TEST": 96,
        "MAX_SIZE_TEST": 128,
    }
    solver = {"IMS_PER_BATCH": 4, "BASE_LR": 0.05, "MAX_ITER": 180, "CHECKPOINT_PERIOD": 5000}
    config, _ = panoptic_config(shared_data, tmp_path, count=4, INPUT=inputs, SOLVER=solver)
    succeed([*TRAIN_NET, "--config", str(config)], tmp_path)
    results = json.loads((tmp_path / "output/results.json").read_text())
    assert results["results"]["sem_seg"]["mIoU"] > 80
