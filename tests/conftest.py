"""Where the shared test data lies, if it does."""

from pathlib import Path

import pytest

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
