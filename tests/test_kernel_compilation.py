"""Every kernel compiles, also for GPUs that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

TOOL = Path(__file__).parent / "helpers" / "offline_compilation.py"

# Backend, architecture, threads of a warp: A100, H100, MI300.
TARGETS = [("cuda", "80", "32"), ("cuda", "90", "32"), ("hip", "gfx942", "64")]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_kernels_compile(target, tmp_path):
    # In a process of its own, where Triton does not interpret kernels, and nothing is cached.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(TOOL.parents[2])}
    command = [sys.executable, str(TOOL), *target]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 20  # kernels with their specializations
