"""The tests that a GPU is needed for, in a process of their own that has a time limit."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import UserError

ROOT = Path(__file__).resolve().parents[3]
# Of the layer on a GPU, and of each kernel, which a GPU then runs in the place of the interpreter.
PATTERNS = ("test_cuda*.py", "test_kernel*.py")

_OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?:\s|$)")
_TEST = re.compile(r"\S+\.py::.*?(?= (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b|$)")


@dataclass(frozen=True)
class SuiteRun:
    """How a run of the tests went.

    Attributes:
        failed: the names of the tests that failed or raised an error.
        status: pytest's exit status: 0, 1 where some failed, 5 where there was none to run; None
            if its time ended before.
    """

    passed: int
    failed: tuple[str, ...]
    skipped: int
    status: int | None

    def record(self) -> dict[str, object]:
        return asdict(self)

    def row(self) -> dict[str, object]:
        ends = {0: "to the end", 1: "to the end", 5: "no test to run", None: "time was up"}
        return {
            "passed": self.passed,
            "failed": len(self.failed),
            "skipped": self.skipped,
            "ran": ends.get(self.status, f"pytest ended with status {self.status}"),
        }


def gpu_tests() -> list[Path]:
    """The files of the tests.

    Raises:
        UserError: they are not here.
    """
    found = [path for pattern in PATTERNS for path in sorted((ROOT / "tests").glob(pattern))]
    if not found:
        raise UserError(f"no tests are found in {str(ROOT / 'tests')!r}: run from a checkout")
    return found


def run_suite(files: list[Path], seconds: float, log: Path, processes: int = 1) -> SuiteRun:
    """Run test files, the first ones first, until they are through or the time is over.

    Args:
        log: the file of pytest's output.
        processes: that share the tests, if pytest-xdist is there.

    Raises:
        UserError: pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise UserError("pytest is not installed; install it to run the tests")
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "--tb=short", "-rN"]
    command += ["-p", "no:cacheprovider", "-m", "not slow"]
    if processes > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(processes)]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    environment.pop("SW_DETECTRON_BACKEND", None)  # the tests choose the backend
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, *map(str, files)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,  # so that it ends together with its processes
        )
        try:
            status = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return count_outcomes(log.read_text(errors="replace"), status)


def count_outcomes(text: str, status: int | None) -> SuiteRun:
    """What `pytest -v` printed about its tests, whether in one process or in several."""
    counts, failed = Counter(), []
    for line in text.splitlines():
        outcome, test = _OUTCOME.search(line), _TEST.search(line)
        # A line of a traceback names a test too, but has no outcome.
        if outcome and test and (line.startswith("[gw") or line.startswith(test[0])):
            counts[outcome[1]] += 1
            if outcome[1] in ("FAILED", "ERROR"):
                failed.append(test[0])
    skipped = counts["SKIPPED"] + counts["XFAIL"]
    return SuiteRun(counts["PASSED"] + counts["XPASS"], tuple(failed), skipped, status)
