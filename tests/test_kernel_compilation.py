"""Every kernel compiles, also for GPUs that are not there."""

import json
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
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(kernels) >= 20  # with their specializations
    if target[0] == "cuda":
        # A few bytes of a thread stay in the cache; kilobytes would be the kernel's time. Six
        # matrices of 64 x 64 at once are more than the registers of a program.
        large = [k for k in kernels if k["kernel"] == "_whiten_backward_kernel" and k["G"] == 64]
        assert large and all(k["spilled"] <= 2048 for k in large)
        assert [k for k in kernels if k["spilled"] > 128 and k not in large] == []
        assert all(k["shared"] <= 99 * 1024 for k in kernels)  # of a program, since sm_86
