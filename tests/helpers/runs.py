"""Runs of the training command, in this process or in one of their own."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sw_detectron.engine import argument_parser, launch, train_or_evaluate

ROOT = Path(__file__).resolve().parents[2]
TRAIN_NET = [sys.executable, str(ROOT / "tools/train_net.py")]
SHAPES = "shapes_mask_rcnn_R18_FPN_SW.yaml"
PAPER = "mask_rcnn_R50_FPN_SW_2x.yaml"
# Narrow, on two small images a step: seconds instead of minutes.
TINY = """
    SOLVER.IMS_PER_BATCH 2 INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64
    MODEL.FPN.OUT_CHANNELS 32 MODEL.RPN.POST_NMS_TOPK_TRAIN 20 MODEL.RPN.POST_NMS_TOPK_TEST 10
    MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16 MODEL.ROI_BOX_HEAD.FC_DIM 32
    MODEL.ROI_MASK_HEAD.CONV_DIM 16
""".split()


def environment(datasets):
    return os.environ | {"DETECTRON2_DATASETS": str(datasets), "OMP_NUM_THREADS": "1"}


def run(command, datasets, **kwargs):
    return subprocess.run(
        command, env=environment(datasets), capture_output=True, text=True, **kwargs
    )


@contextmanager
def started(command, datasets, **kwargs):
    """A process of the command, which listens to an interruption, and is gone at the end."""

    def listen():  # what a shell starts in the background does not
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(command, env=environment(datasets), preexec_fn=listen, **kwargs)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def refuse(capsys, *arguments):
    """The one line on standard error of a command that must fail."""
    args = argument_parser("", "").parse_args(arguments)
    with pytest.raises(SystemExit) as stop:
        launch(train_or_evaluate, args)
    assert isinstance(stop.value.code, str)  # Python prints it and exits with status 1
    assert "\n" not in stop.value.code
    return stop.value.code


def same(a, b, path=""):
    """Assert that two nested checkpoints are equal to the bit."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def check_killed_run_resumes_to_the_same_result(arguments, datasets, tmp_path, kills):
    """SIGKILL at a random moment after given numbers of checkpoints; the end is as without."""
    command = [*TRAIN_NET, "--resume", *arguments, "DATASETS.TEST", "()", "OUTPUT_DIR"]
    whole = run([*command, str(tmp_path / "whole")], datasets)
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert "training from scratch" in whole.stdout

    generator = random.Random(0)
    cut = tmp_path / "cut"
    for checkpoints in kills:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with started([*command, str(cut)], datasets, cwd=tmp_path, **silent) as process:
            deadline = time.monotonic() + 240
            while len(list(cut.glob("model_0*.pth"))) < checkpoints:
                assert process.poll() is None, "finished before it was killed"
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(generator.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
        assert not (cut / "model_final.pth").exists()
    rest = run([*command, str(cut)], datasets)
    assert rest.returncode == 0, rest.stderr[-2000:]
    expected = torch.load(tmp_path / "whole/model_final.pth")
    same(torch.load(cut / "model_final.pth"), expected)
    return expected, cut
