"""The training command in several processes, on CPUs."""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from detectron2.layers import NaiveSyncBatchNorm
from helpers.runs import SHAPES, TINY, TRAIN_NET, run, started
from torch import nn

from sw_detectron.engine import argument_parser, launch
from sw_detectron.engine.trainer import sync_batch_norms_for_cpu

# All anchors and no random flip: the losses of the proposal network do not depend on chance, and
# are divided by the same number in one process as in two.
DETERMINISTIC = """
    SOLVER.IMS_PER_BATCH 4 SOLVER.MAX_ITER 1 DATASETS.TEST ()
    MODEL.RPN.BATCH_SIZE_PER_IMAGE 1000000 INPUT.RANDOM_FLIP none
""".split()


def losses(folder):
    return json.loads((folder / "metrics.json").read_text().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["--num-gpus", "torchrun"])
def test_first_loss_of_two_processes_equals_that_of_one(datasets, tmp_path, launcher):
    arguments = ["--config", SHAPES, *TINY, *DETERMINISTIC, "OUTPUT_DIR"]
    one = run([*TRAIN_NET, *arguments, str(tmp_path / "one")], datasets)
    assert one.returncode == 0, one.stderr[-2000:]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", "2", TRAIN_NET[1]]
    else:
        command = [*TRAIN_NET, "--num-gpus", "2", "--dist-url", "auto"]
    two = run([*command, *arguments, str(tmp_path / "two")], datasets)
    assert two.returncode == 0, two.stderr[-2000:]
    assert "World size: 2" in two.stdout
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    for key in ("loss_rpn_cls", "loss_rpn_loc"):
        # float32 sums in another order, through 20 layers
        assert two[key] == pytest.approx(one[key], rel=1e-4), key
    # The heads' losses are means over each process's own proposals.
    assert two["total_loss"] == pytest.approx(one["total_loss"], rel=0.1)


def ranks_of(parent):
    """The two processes that train; not the one that Python adds to watch over shared memory."""
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    ranks = [p for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(ranks) == 2
    return [int(p) for p in ranks]


@contextmanager
def training_ranks(command, datasets, log):
    """A process, and the two that it started, once these have trained for 20 iterations."""
    with log.open("w") as stream:
        outputs = {"stdout": stream, "stderr": stream}
        with started(command, datasets, cwd=datasets, **outputs) as parent:
            deadline = time.monotonic() + 240
            while "iter: 19" not in log.read_text():
                assert parent.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
            yield parent, ranks_of(parent)


@pytest.mark.slow
def test_a_killed_process_ends_the_others(datasets, tmp_path):
    command = [*TRAIN_NET, "--config", SHAPES, "--num-gpus", "2", "--dist-url", "auto", *TINY]
    command += ["DATASETS.TEST", "()", "OUTPUT_DIR", str(tmp_path)]
    log = tmp_path / "log"
    with training_ranks(command, datasets, log) as (parent, ranks):
        subprocess.run(["kill", "-9", str(ranks[1])], check=True)
        assert parent.wait(timeout=60) == 1
    last = log.read_text().strip().splitlines()[-1]
    assert "ended with SIGKILL" in last, last
    assert not Path(f"/proc/{ranks[0]}").exists()


@pytest.mark.slow
def test_mistakes_are_one_line_in_several_processes_too(datasets, tmp_path):
    arguments = ["--config", SHAPES, "--num-gpus", "2", "--dist-url", "auto"]
    failed = run([*TRAIN_NET, *arguments, "MODEL.WEIGHTS", "nowhere.pth"], datasets)
    assert failed.returncode == 1
    errors = [line for line in failed.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "nowhere.pth" in errors[0]
    assert "Traceback" not in failed.stderr


def test_batch_norms_that_run_on_cpus_keep_names_values_and_flags():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.SyncBatchNorm(4, eps=1e-3)))
    bn = net[1][0]
    nn.init.normal_(bn.weight)
    bn.running_mean.normal_()
    bn.bias.requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    twin = sync_batch_norms_for_cpu(net)[1][0]
    assert type(twin) is NaiveSyncBatchNorm
    assert (twin.eps, twin.bias.requires_grad, twin.weight.requires_grad) == (1e-3, False, True)
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.slow
def test_what_one_process_cannot_do_is_one_line(datasets, tmp_path):
    """Not the first process: before, nothing was said."""
    script = tmp_path / "train.py"
    script.write_text(
        "from detectron2.utils import comm\n"
        "from sw_detectron.engine import argument_parser, launch\n"
        "from sw_detectron.errors import UserError\n"
        "def main(args):\n"
        "    if comm.get_rank() == 1:\n"
        "        full = OSError(28, 'No space left on device', 'here')\n"
        "        raise full if args.opts else UserError('x y')\n"
        "    comm.synchronize()\n"
        "if __name__ == '__main__':\n"
        "    launch(main, argument_parser('', '').parse_args())\n"
    )
    two = [sys.executable, str(script), "--config", "c", "--num-gpus", "2", "--dist-url", "auto"]
    for arguments, words in (([], "error: x y"), (["a"], "No space left on device: 'here'")):
        failed = run([*two, *arguments], datasets, timeout=200)
        assert failed.returncode == 1
        lines = [line for line in failed.stderr.splitlines() if "error: " in line]
        assert len(lines) == 1 and lines[0].endswith(words), failed.stderr[-2000:]
        assert "Traceback" not in failed.stderr


@pytest.mark.slow
def test_several_processes_are_interrupted_together(datasets, tmp_path):
    command = [*TRAIN_NET, "--config", SHAPES, "--num-gpus", "2", "--dist-url", "auto", *TINY]
    command += ["DATASETS.TEST", "()", "OUTPUT_DIR", str(tmp_path)]
    log = tmp_path / "log"
    with training_ranks(command, datasets, log) as (parent, ranks):
        parent.send_signal(signal.SIGINT)  # a terminal would send it to all of them
        assert parent.wait(timeout=60) == 130
    assert "Traceback" not in log.read_text()
    assert "broadcast_buffers" not in log.read_text()
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("arguments", [["--num-gpus", "0"], ["--machine-rank", "1"]], ids="=".join)
def test_processes_and_machines_that_are_not_there_are_refused(arguments):
    args = argument_parser("", "").parse_args(["--config", SHAPES, *arguments])
    with pytest.raises(SystemExit, match=" ".join(arguments)):
        launch(lambda args: pytest.fail("it was started"), args)
