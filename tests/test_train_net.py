"""The training command: what it does, what it refuses, and how it comes back after a crash."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import build_model
from helpers.runs import (
    PAPER,
    SHAPES,
    TINY,
    TRAIN_NET,
    check_killed_run_resumes_to_the_same_result,
    refuse,
    run,
    started,
)

from sw_detectron import run as run_module
from sw_detectron.analysis import read_metrics
from sw_detectron.config import config_folder, find_config
from sw_detectron.data.slices import register_slice
from sw_detectron.engine import argument_parser, load_config, train_or_evaluate
from sw_detectron.errors import UserError
from sw_detectron.modeling.summary import sw_layers


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config", "mask_rcnn_R50_SW_2x.yaml"], ["'mask_rcnn_R50_SW_2x.yaml'", PAPER]),
        (["--config", "nothing"], ["'nothing'", str(config_folder())]),
        (["--config", SHAPES, "MODEL.SW.GROUPS", "4"], ["MODEL.SW.GROUPS"]),
        (["--config", SHAPES, "MODEL.SW.EPS", "small"], ["MODEL.SW.EPS", "small"]),
        (["--config", SHAPES, "SEED"], ["pairs", "SEED"]),
        (["--config", SHAPES, "MODEL.WEIGHTS", "nowhere.pth"], ["nowhere.pth", "MODEL.WEIGHTS"]),
        (["--config", SHAPES, "DATASETS.TRAIN", "('coco',)"], ["'coco'", "shapes_train"]),
        (["--config", SHAPES, "DATASETS.TRAIN", "()"], ["DATASETS.TRAIN"]),
        (["--config", SHAPES, "MODEL.SW.PLACEMENT", "x"], ["'x'", "imagenet"]),
        (["--config", SHAPES, "MODEL.SW.NUM_PERGROUP", "48"], ["stem.conv1", "48"]),
        (["--config", SHAPES, "--eval-only"], ["--eval-only", "MODEL.WEIGHTS"]),
    ],
    ids=lambda value: " ".join(value[1:]) if value[0].startswith("--") else "",
)
def test_mistakes_are_one_clear_line(capsys, tmp_path, arguments, words):
    if "()" not in arguments and len(arguments) % 2 == 0:
        arguments = [*arguments, "OUTPUT_DIR", str(tmp_path)]
    message = refuse(capsys, *arguments)
    assert all(word in message for word in words), message


def test_a_missing_data_set_is_one_clear_line(capsys, tmp_path, monkeypatch):
    metadata = MetadataCatalog.get("coco_2017_train")
    json_file = metadata.json_file
    if Path(json_file).exists():
        pytest.skip("COCO is here")
    message = refuse(capsys, "--config", PAPER, "OUTPUT_DIR", str(tmp_path / "run"))
    assert all(w in message for w in ("coco_2017_", json_file[:-20], "DETECTRON2_DATASETS"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [b"<html>404</html>", b"", b"PK\x03\x04 cut", b"\x80\x02}q\x00."], ids=str
)
def test_a_corrupt_checkpoint_is_one_clear_line(capsys, tmp_path, content):
    (tmp_path / "bad.pth").write_bytes(content)
    message = refuse(
        capsys,
        *["--config", SHAPES, "--eval-only"],
        *["OUTPUT_DIR", str(tmp_path), "MODEL.WEIGHTS", str(tmp_path / "bad.pth")],
    )
    assert "bad.pth" in message


def test_a_broken_config_is_one_clear_line(capsys, tmp_path):
    (tmp_path / "broken.yaml").write_text("MODEL: {SW: [")
    assert "broken.yaml" in refuse(capsys, "--config", str(tmp_path / "broken.yaml"))
    (tmp_path / "wrong.yaml").write_text("MODEL: {SW: {NORMS: SW}}")
    assert "NORMS" in refuse(capsys, "--config", str(tmp_path / "wrong.yaml"))


@pytest.mark.slow
def test_the_script_explains_itself_and_fails_in_one_line(datasets):
    help_text = run([*TRAIN_NET, "--help"], datasets)
    assert help_text.returncode == 0
    assert "--config FILE, --config-file FILE" in help_text.stdout
    assert f"--config {PAPER} --num-gpus 8" in help_text.stdout
    failed = run([*TRAIN_NET, "--config", "no.yaml"], datasets)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert failed.stderr.strip().splitlines()[-1].startswith(f"{TRAIN_NET[1]}: error: config 'no")


def test_the_papers_config():
    """Table 7, row SW^a, and section C of the appendix."""
    cfg = load_config(PAPER, ["MODEL.DEVICE", "cpu"])
    model = build_model(cfg)
    assert [row.number for row in sw_layers(model)] == [1, 6, 12, 18, 24, 30, 36]
    norms = [m for n, m in model.named_modules() if n.endswith((".norm", "_norm"))]
    sync = [m for m in norms if type(m) is torch.nn.SyncBatchNorm]
    # 53 + 4 of the ResNet, less 7 SW; 8 of the FPN; 4 and 4 of the heads; the mask head's
    # deconvolution has none.
    assert len(sync) == 57 - 4 - 7 + 4 + 8 + 4 + 4 - 4
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    assert model.roi_heads.box_head.conv4.norm.num_features == 256
    assert not hasattr(model.roi_heads.box_head, "fc2")
    assert all(p.requires_grad for p in model.parameters())
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR) == (16, 180000, 0.02)
    assert tuple(cfg.SOLVER.STEPS) == (120000, 160000)
    assert (tuple(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN) == ((800,), 1333)
    assert cfg.INPUT.FORMAT == "RGB"
    assert not cfg.MODEL.RESNETS.STRIDE_IN_1X1


def test_slices_of_data_sets():
    if "digits" not in DatasetCatalog.list():
        DatasetCatalog.register("digits", lambda: list(range(10)))
        MetadataCatalog.get("digits").set(json_file="x", evaluator_type="coco", thing_classes=["a"])
    for name, expected in {"digits[:3]": [0, 1, 2], "digits[8:]": [8, 9]}.items():
        register_slice(name)
        register_slice(name)
        assert DatasetCatalog.get(name) == expected
        assert MetadataCatalog.get(name).thing_classes == ["a"]
        assert not hasattr(MetadataCatalog.get(name), "json_file")
    register_slice("nothing[:3]")
    assert "nothing[:3]" not in DatasetCatalog.list()


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_result(datasets, tmp_path):
    schedule = "SOLVER.MAX_ITER 12 SOLVER.CHECKPOINT_PERIOD 2 SOLVER.STEPS (7,)".split()
    arguments = ["--config", SHAPES, *TINY, *schedule, "SOLVER.WARMUP_ITERS", "3"]
    expected, cut = check_killed_run_resumes_to_the_same_result(
        arguments, datasets, tmp_path, kills=(1, 3)
    )
    assert expected["iteration"] == 11
    assert "backbone.bottom_up.stem.conv1.norm.sw_var_weight" in expected["model"]
    base_lr = load_config(SHAPES, []).SOLVER.BASE_LR
    lr = [json.loads(line)["lr"] for line in (cut / "metrics.json").read_text().splitlines()][-1]
    assert lr == pytest.approx(base_lr / 10)


@pytest.mark.slow
def test_killed_run_on_real_images_resumes_to_the_same_result(shared_data, tmp_path):
    """The 2x config itself, with size and length overridden, and the data read in order."""
    arguments = """
        SOLVER.IMS_PER_BATCH 2 SOLVER.MAX_ITER 5 SOLVER.CHECKPOINT_PERIOD 1 SEED 3
        INPUT.MIN_SIZE_TRAIN (64,) INPUT.MAX_SIZE_TRAIN 96 MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 8
        DATALOADER.NUM_WORKERS 0 DATALOADER.ASPECT_RATIO_GROUPING False
    """.split()
    check_killed_run_resumes_to_the_same_result(
        ["--config", PAPER, *arguments], shared_data / "data", tmp_path, kills=(2,)
    )


@pytest.mark.slow
def test_training_records_importance_ratios_and_evaluates(datasets, tmp_path):
    arguments = [*TINY, "SOLVER.MAX_ITER", "2", "DATASETS.TEST", "('shapes_val[:4]',)"]
    done = run([*TRAIN_NET, "--config", SHAPES, *arguments, "OUTPUT_DIR", str(tmp_path)], datasets)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    ratios = {k: v for r in records for k, v in r.items() if k.startswith("sw/")}
    for layer in ("stem.conv1", "res2.0.conv2", "res3.0.conv1", "res3.1.conv2", "res4.1.conv1"):
        for kind in ("mean", "cov"):
            total = ratios[f"sw/{layer}/{kind}/bw"] + ratios[f"sw/{layer}/{kind}/iw"]
            assert total == pytest.approx(1, abs=1e-6)
    results = json.loads((tmp_path / "inference/coco_instances_results.json").read_text())
    assert isinstance(results, list)
    assert any("bbox/AP" in r for r in records)
    assert "ground truth beside predictions" in (tmp_path / "report.html").read_text()
    again = run(
        [*TRAIN_NET, "--config", SHAPES, "--eval-only", "--resume", *arguments]
        + ["OUTPUT_DIR", str(tmp_path)],
        datasets,
    )
    assert again.returncode == 0, again.stderr[-2000:]
    assert "copypaste: Task: segm" in again.stdout


@pytest.mark.slow
def test_the_papers_config_on_real_images(shared_data, tmp_path):
    """The 2x config itself, with only size and length overridden."""
    small = """
        SOLVER.IMS_PER_BATCH 2 SOLVER.MAX_ITER 2 DATALOADER.NUM_WORKERS 1
        INPUT.MIN_SIZE_TRAIN (128,) INPUT.MAX_SIZE_TRAIN 160
        INPUT.MIN_SIZE_TEST 128 INPUT.MAX_SIZE_TEST 160 DATASETS.TEST ('coco_2017_val[:10]',)
        TEST.PRECISE_BN.NUM_ITER 2
    """.split()
    small += ["OUTPUT_DIR", str(tmp_path)]
    done = run([*TRAIN_NET, "--config", PAPER, *small], shared_data / "data")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "12  res3.0.conv2" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    losses = [r["total_loss"] for r in records if "total_loss" in r]
    assert losses
    assert all(0 < loss < 100 for loss in losses)
    assert any("bbox/AP" in r for r in records)
    assert "Start inference on 10 batches" in done.stdout


@pytest.mark.slow
def test_the_last_of_two_runs_in_a_folder_is_shown(datasets, tmp_path):
    """Before, the page had the curves of the first run, and its layers."""
    arguments = [*TINY, "DATASETS.TEST", "()", "OUTPUT_DIR", str(tmp_path)]
    for schedule in (["SOLVER.MAX_ITER", "25"], ["SOLVER.MAX_ITER", "3", "MODEL.SW.LAYERS", "[1]"]):
        train_or_evaluate(
            argument_parser("", "").parse_args(["--config", SHAPES, *arguments, *schedule])
        )
    series = read_metrics(tmp_path)
    assert list(series["total_loss"][0]) == [2]
    assert {key.split("/")[1] for key in series if key.startswith("sw/")} == {"stem.conv1"}
    assert "res3" not in (tmp_path / "report.html").read_text().split("<h2>Config")[0]


@pytest.mark.slow
def test_a_run_that_diverges_ends_in_one_line(datasets, tmp_path):
    """The rate explodes at the end of the warm-up; Detectron2's proposals notice it first."""
    schedule = ["SOLVER.MAX_ITER", "60", "SOLVER.CHECKPOINT_PERIOD", "2", "SOLVER.STEPS", "()"]
    schedule += ["SOLVER.WARMUP_ITERS", "3", "SOLVER.WARMUP_METHOD", "constant"]
    schedule += ["SOLVER.WARMUP_FACTOR", "1e-35", "SOLVER.BASE_LR", "1e30"]
    done = run(
        [*TRAIN_NET, "--config", SHAPES, *TINY, *schedule, "OUTPUT_DIR", str(tmp_path)], datasets
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    words = ("iteration 4: Predicted boxes", "total_loss was ", "in iteration 3", "learning rate")
    assert all(word in line for word in words), line
    assert "Traceback" not in done.stderr + done.stdout
    assert (tmp_path / "model_0000003.pth").exists()
    assert not (tmp_path / "model_final.pth").exists()
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "inference").exists()


@pytest.mark.slow
def test_an_interrupted_run_ends_in_silence_and_can_be_resumed(datasets, tmp_path):
    schedule = ["SOLVER.MAX_ITER", "5000", "SOLVER.CHECKPOINT_PERIOD", "2", "OUTPUT_DIR"]
    command = [*TRAIN_NET, "--config", SHAPES, *TINY, *schedule, str(tmp_path)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, datasets, cwd=datasets, **piped) as process:
        deadline = time.monotonic() + 240
        while not (tmp_path / "last_checkpoint").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert (tmp_path / (tmp_path / "last_checkpoint").read_text()).exists()


def test_results_are_there_though_something_fails_after_the_evaluation(
    datasets, tmp_path, monkeypatch, capsys
):
    """A disk that is full when the augmented test begins."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets))

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "predictions.json")

    trainer = "sw_detectron.tasks.detection.trainer.DetectionTrainer"
    monkeypatch.setattr(f"{trainer}.test", classmethod(lambda *_: {"bbox": {"AP": 12.0}}))
    monkeypatch.setattr(f"{trainer}.test_with_augmentation", fail)
    schedule = ["SOLVER.MAX_ITER", "1", "TEST.AUG.ENABLED", "True", "OUTPUT_DIR", str(tmp_path)]
    message = refuse(capsys, "--config", SHAPES, *TINY, *schedule)
    assert "No space left on device" in message and "predictions.json" in message
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["results"] == {"bbox": {"AP": 12.0}} and record["iterations"] == 1


def test_results_of_the_last_evaluation_are_there_when_training_fails(
    datasets, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets))
    found = iter([{"bbox": {"AP": 12.0}}])
    trainer = "sw_detectron.tasks.detection.trainer.DetectionTrainer"

    def evaluate(*_):
        try:
            return next(found)
        except StopIteration:
            raise UserError("an image cannot be read") from None

    monkeypatch.setattr(f"{trainer}.test", classmethod(evaluate))
    schedule = ["SOLVER.MAX_ITER", "4", "TEST.EVAL_PERIOD", "2", "OUTPUT_DIR", str(tmp_path)]
    assert "cannot be read" in refuse(capsys, "--config", SHAPES, *TINY, *schedule)
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["results"] == {"bbox": {"AP": 12.0}} and record["iterations"] == 2


@pytest.mark.parametrize("written", [["--config-file", SHAPES], [f"--config-file={SHAPES}"]])
def test_scripts_find_configs_by_their_bare_name(tmp_path, monkeypatch, written):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SW_DETECTRON_SCRIPT", "")
    script = tmp_path / "script.py"
    script.write_text("")
    run_module._prepare([str(script), "--num-gpus", "1", *written, "KEY=a", "--config-file"])
    path = str(find_config(SHAPES))
    expected = [f"--config-file={path}"] if len(written) == 1 else ["--config-file", path]
    assert sys.argv == [str(script), "--num-gpus", "1", *expected, "KEY=a", "--config-file"]
    with pytest.raises(UserError, match="nothing"):
        run_module._prepare([str(script), "--config-file=nothing"])
