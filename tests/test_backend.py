"""Which backend computes a call of the layer: kernels, or plain PyTorch."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.kernel_cases import DEVICE, DTYPES, make_options, make_parameters

from sw_detectron.layers import STATISTICS, backend, plain, set_backend, triton
from sw_detectron.layers.options import Running


@pytest.fixture
def chosen():
    """Whatever a test chooses, the next one starts with "auto"."""
    yield set_backend
    set_backend("auto")


def test_what_has_kernels():
    x = torch.ones(2, 48, 3, 3, device=DEVICE)
    running = Running(x.new_ones(3, 16, 1), x.new_ones(3, 16, 16))
    options, parameters = make_options(("bw", "ln"), 16), make_parameters(("bw", "ln"), 48)
    assert all(triton.has_kernels(x.to(dtype), parameters, running, options) for dtype in DTYPES)
    assert not triton.has_kernels(x.double(), parameters, running, options)
    assert not triton.has_kernels(x, parameters, running._replace(cov=running.cov.mT), options)
    for changes in (
        {"num_pergroup": 7},
        {"num_pergroup": 65},
        {"whitening": "eigh"},
        {"statistics": ("bn", "ln")},
    ):
        assert not triton.has_kernels(x, parameters, running, options._replace(**changes))


def test_a_chosen_backend_computes(chosen):
    x = torch.ones(2, 48, 3, 3, device=DEVICE)
    running = Running(x.new_ones(3, 16, 1), x.new_ones(3, 16, 16))
    options, parameters = make_options(STATISTICS, 16), make_parameters(STATISTICS, 48)
    chosen("triton")
    assert backend.backend_of_call(x, parameters, running, options) is triton
    assert backend.backend_of_call(x.double(), parameters, running, options) is plain
    chosen("torch")
    assert backend.backend_of_call(x, parameters, running, options) is plain
    with pytest.raises(ValueError, match="cuda"):
        chosen("cuda")


def run_python(program, **environment):
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from sw_detectron.layers import SwitchWhiten2d, set_backend, triton
assert not triton.HAS_TRITON
layer, x = SwitchWhiten2d(16), torch.randn(1, 16, 2, 2)
layer(x).sum().backward()
set_backend("triton")
try:
    layer(x)
except RuntimeError as error:
    assert "not installed" in str(error), error
else:
    raise AssertionError
"""
    run = run_python(program)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_the_environment_variable_is_read_at_the_import():
    program = """
import os
from sw_detectron.layers.backend import get_backend
os.environ["SW_DETECTRON_BACKEND"] = "triton"
print(get_backend())
"""
    assert run_python(program, SW_DETECTRON_BACKEND="torch").stdout == "torch\n"
