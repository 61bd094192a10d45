"""Classification as a command: killed and resumed, in two processes, and on real weights."""

import re

import numpy as np
import pytest
import torch
from helpers.classification import TINY, TOY, run_here
from helpers.runs import TRAIN_NET, check_killed_run_resumes_to_the_same_result, run

from sw_detectron.tasks.classification.data import register_classification


@pytest.mark.slow
def test_killed_pretraining_resumes_to_the_same_result(datasets, tmp_path):
    schedule = "SOLVER.MAX_ITER 10 SOLVER.CHECKPOINT_PERIOD 2 SOLVER.STEPS (7,)".split()
    expected, _ = check_killed_run_resumes_to_the_same_result(
        ["--config", TOY, *TINY, *schedule], datasets, tmp_path, kills=(2,)
    )
    assert expected["iteration"] == 9
    assert "backbone.stem.conv1.norm.sw_var_weight" in expected["model"]


@pytest.mark.slow
def test_two_processes_count_each_image_once(datasets, tmp_path):
    """37 images, 19 and 18 of them, in batches of 2 in place of 4."""
    arguments = [*TINY, "DATASETS.TEST", "('shapes_cls_val[:37]',)", "OUTPUT_DIR", str(tmp_path)]
    command = [*TRAIN_NET, "--config", TOY]
    two = run([*command, "--num-gpus", "2", "--dist-url", "auto", *arguments], datasets)
    assert two.returncode == 0, two.stderr[-2000:]
    assert "on 2 devices" in two.stdout
    weights = ["MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]
    one = run([*command, "--eval-only", *arguments, *weights], datasets)
    assert one.returncode == 0, one.stderr[-2000:]
    errors = [float(re.findall(r"copypaste: (\d+\.\d+)", log.stdout)[-1]) for log in (one, two)]
    assert errors[0] == errors[1]
    wrong = errors[0] * 37 / 100
    assert wrong == pytest.approx(round(wrong), abs=1e-4)  # as printed, with four decimals


def classifier_key(key):
    """The name in the classifier of a tensor of a CIFAR ResNet as it is published."""
    key = re.sub(r"^module\.(conv|bn)1", r"module.stem.\g<1>1", key)
    key = re.sub(r"layer(\d)", lambda m: f"res{int(m[1]) + 1}", key)
    key = re.sub(r"bn(\d)", r"conv\1.norm", key).removeprefix("module.")
    return key if key.startswith("linear.") else f"backbone.{key}"


@pytest.mark.slow
def test_published_weights_have_their_error(shared_data, tmp_path):
    """18.97 % of the test images as JPEG, which other networks of these weights make too."""
    path = shared_data / "data/pretrained/cifar10_resnet20-12fca82f.th"
    weights = torch.load(path, map_location="cpu")
    state = {classifier_key(key): value for key, value in weights["state_dict"].items()}
    torch.save({"model": state}, tmp_path / "resnet20.pth")
    images = np.load(shared_data / "data/cifar10_jpeg/test.npz")
    content, offsets = images["data"].tobytes(), images["offsets"]
    for name in images["classes"]:
        (tmp_path / "cifar10/test" / str(name)).mkdir(parents=True)
    for i, label in enumerate(images["labels"]):
        path = tmp_path / "cifar10/test" / str(images["classes"][label]) / f"{i:05d}.jpg"
        path.write_bytes(content[offsets[i] : offsets[i + 1]])
    register_classification(tmp_path)
    results = run_here(
        *["--config", "cifar10_resnet20_BN.yaml", "--eval-only", "DATALOADER.NUM_WORKERS", "0"],
        *["OUTPUT_DIR", str(tmp_path / "run"), "MODEL.WEIGHTS", str(tmp_path / "resnet20.pth")],
    )
    register_classification()
    assert results["classification"]["top1_error"] == pytest.approx(18.97, abs=0.1)
    assert results["classification"]["top5_error"] < 3
