"""Detectron2's own scripts, run by `python -m sw_detectron.run`, on SW models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sw_detectron.data import generate_shapes

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(sys.prefix) / "detectron2_tools"
CONFIG = ["--config-file", "shapes_mask_rcnn_R18_FPN_SW.yaml"]
TINY = """
    MODEL.DEVICE cpu SOLVER.MAX_ITER 2 SOLVER.WARMUP_ITERS 0 SOLVER.IMS_PER_BATCH 2
    INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64
    MODEL.RPN.POST_NMS_TOPK_TRAIN 20 MODEL.RPN.POST_NMS_TOPK_TEST 10
    MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16 MODEL.ROI_BOX_HEAD.FC_DIM 32
    MODEL.ROI_MASK_HEAD.CONV_DIM 16
""".split()
NUM_VAL = 6
SW_WEIGHT = "backbone.bottom_up.stem.conv1.norm.sw_var_weight"

LAZY_CONFIG = """
import detectron2.data.transforms as T
from detectron2 import model_zoo
from detectron2.config import LazyCall as L

model = model_zoo.get_config("common/models/mask_rcnn_fpn.py").model
model.backbone.bottom_up.freeze_at = 0
model.backbone.bottom_up.stem.norm = "SW"
model.backbone.bottom_up.stages.depth = 18
model.backbone.bottom_up.stages.norm = "BN"
model.backbone.bottom_up.stages.pop("stride_in_1x1")
model.proposal_generator.post_nms_topk = (20, 10)
model.roi_heads.num_classes = 4
model.roi_heads.batch_size_per_image = 16
model.roi_heads.box_head.fc_dims = [32]
model.roi_heads.box_predictor.input_shape.channels = 32
model.roi_heads.mask_head.conv_dims = [16, 16]

dataloader = model_zoo.get_config("common/data/coco.py").dataloader
for _part, _name in ((dataloader.train, "shapes_train"), (dataloader.test, "shapes_val")):
    _part.dataset.names = _name
    _part.num_workers = 0
    _part.mapper.augmentations = [L(T.ResizeShortestEdge)(short_edge_length=64, max_size=64)]
dataloader.train.total_batch_size = 2
dataloader.evaluator.dataset_name = "shapes_val"

optimizer = model_zoo.get_config("common/optim.py").SGD
lr_multiplier = model_zoo.get_config("common/coco_schedule.py").lr_multiplier_1x
lr_multiplier.warmup_length = 0
train = model_zoo.get_config("common/train.py").train
train.max_iter = 2
train.device = "cpu"
"""


@pytest.fixture(scope="module")
def small_datasets(tmp_path_factory):
    if not TOOLS.is_dir():
        pytest.skip(f"Detectron2's scripts are not at {TOOLS}, where `make setup` puts them")
    root = tmp_path_factory.mktemp("datasets")
    generate_shapes(root / "shapes", "train", 8)
    generate_shapes(root / "shapes", "val", NUM_VAL)
    return root


@pytest.fixture(scope="module")
def run(small_datasets):
    environment = os.environ | {
        "DETECTRON2_DATASETS": str(small_datasets),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }

    def run(script: str, *arguments: str, fails: bool = False) -> str:
        """Run one of Detectron2's scripts; returns what it has written to both its outputs."""
        done = subprocess.run(
            [sys.executable, "-m", "sw_detectron.run", str(TOOLS / script), *arguments],
            env=environment,
            cwd=small_datasets,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stdout[-3000:]
        return done.stdout

    return run


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """The output of a short run of train_net.py."""
    folder = tmp_path_factory.mktemp("trained")
    run("train_net.py", *CONFIG, *TINY, "OUTPUT_DIR", str(folder))
    return folder


def results(folder: Path) -> list[dict]:
    (path,) = folder.rglob("coco_instances_results.json")
    return json.loads(path.read_text())


def test_train_net_trains_sw(trained):
    state = torch.load(trained / "model_final.pth")
    assert state["iteration"] == 1
    assert not torch.equal(state["model"][SW_WEIGHT], torch.ones(2))  # where it has started
    assert results(trained)
    # By Detectron2's default, norms are not decayed: neither SW's γ and β nor the others'.
    groups = state["trainer"]["_trainer"]["optimizer"]["param_groups"]
    not_decayed = [i for group in groups if group["weight_decay"] == 0 for i in group["params"]]
    norms = [k for k in state["model"] if k.endswith(("norm.weight", "norm.bias"))]
    assert len(not_decayed) == len(norms) > 0


@pytest.mark.slow
def test_train_net_evaluates_in_two_processes_and_with_test_time_augmentation(
    run, trained, tmp_path
):
    """The processes are spawned: they know SW although they do not start at the command line."""
    augmentation = "TEST.AUG.ENABLED True TEST.AUG.MIN_SIZES (64,96)".split()
    run(
        *["train_net.py", *CONFIG, "--eval-only", "--num-gpus", "2", *TINY, *augmentation],
        *["MODEL.WEIGHTS", str(trained / "model_final.pth"), "OUTPUT_DIR", str(tmp_path)],
    )
    # Only the order of the images differs, and what batches do not change in evaluation.
    ordered = sorted(results(tmp_path / "inference"), key=lambda r: r["image_id"])
    assert ordered == results(trained)
    assert {r["image_id"] for r in results(tmp_path / "inference_TTA")} <= set(range(1, 7))


@pytest.mark.slow
def test_plain_train_net_trains_sw(run, trained, tmp_path):
    run("plain_train_net.py", *CONFIG, *TINY, "OUTPUT_DIR", str(tmp_path))
    state = torch.load(tmp_path / "model_final.pth")
    assert not torch.equal(state["model"][SW_WEIGHT], torch.ones(2))
    assert state["model"].keys() == torch.load(trained / "model_final.pth")["model"].keys()
    assert results(tmp_path)


@pytest.mark.slow
def test_lazyconfig_train_net_trains_sw(run, tmp_path):
    (tmp_path / "lazy.py").write_text(LAZY_CONFIG)
    run(
        *["lazyconfig_train_net.py", "--config-file", str(tmp_path / "lazy.py")],
        f"train.output_dir={tmp_path / 'run'}",
    )
    state = torch.load(tmp_path / "run/model_final.pth")
    assert not torch.equal(state["model"][SW_WEIGHT], torch.ones(2))


@pytest.mark.slow
def test_analyze_model_looks_into_sw(run, trained):
    output = run(
        *["analyze_model.py", *CONFIG, "--tasks", "structure", "parameter", "flop", "activation"],
        *["-n", "2", *TINY, "MODEL.WEIGHTS", str(trained / "model_final.pth")],
    )
    assert output.count("SwitchWhiten2d(") == 5
    # Nothing else in this model multiplies matrices in batches.
    gflops = {name: float(value) for name, value in re.findall(r"\('(\w+)', ([\d.e-]+)\)", output)}
    assert gflops["bmm"] > 0
    assert float(re.search(r"Total GFlops: ([\d.]+)", output)[1]) > 0
    assert "Total (Million) Activations" in output
    rows = re.findall(r"stem\.conv1\.norm +\| ([\d.]+)K", output)
    assert float(rows[0]) == pytest.approx((2 * 64 + 2 * 2) / 1000, abs=0.05)


@pytest.mark.slow
def test_visualize_json_results_draws_predictions_beside_the_ground_truth(run, trained, tmp_path):
    predictions = trained / "inference/coco_instances_results.json"
    run(
        *["visualize_json_results.py", "--input", str(predictions), "--output", str(tmp_path)],
        *["--dataset", "shapes_val", "--conf-threshold", "0.05"],
    )
    pictures = sorted(tmp_path.iterdir())
    assert len(pictures) == NUM_VAL
    for path in pictures:
        pixels = np.asarray(Image.open(path))
        assert pixels.shape == (128, 2 * 128, 3)
        assert not np.array_equal(pixels[:, :128], pixels[:, 128:])


@pytest.mark.slow
def test_benchmark_measures_evaluation(run, trained):
    weights = ["MODEL.WEIGHTS", str(trained / "model_final.pth")]
    output = run("benchmark.py", *CONFIG, "--task", "eval", *TINY, *weights)
    assert "300 iters in" in output


@pytest.mark.slow
def test_mistakes_are_one_line(run, small_datasets):
    unknown = run("train_net.py", "--config-file", "shapes_mask_rcnn_SW.yaml", fails=True)
    assert "Traceback" not in unknown
    assert "'shapes_mask_rcnn_SW.yaml'" in unknown and CONFIG[1] in unknown
    missing = run("no_such_script.py", fails=True)
    assert missing.strip() == f"{TOOLS / 'no_such_script.py'}: error: there is no such script"
