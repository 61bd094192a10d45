"""What all tests share: where the test data lies, and how Triton's kernels run."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton then interprets its kernels, so that their tests run here as on a GPU. It decides when
    # it is imported. Nothing else changes: on a CPU layers take the kernels only when told to.
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared_data() -> Path:
    """The folder of real images, weights and golden vectors; the test is skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"the shared test data is not at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """A folder for generated data sets, shared by all tests of a run."""
    return tmp_path_factory.mktemp("datasets")
