"""What the tools share: how a program ends, and what its arguments may be."""

import argparse
import subprocess
import sys

import pytest
import torch

from sw_detectron.cli import (
    add_config_argument,
    fail,
    fraction,
    make_parser,
    output_folder,
    positive,
    run,
    subset_of,
)
from sw_detectron.errors import UserError


def ending(main, capsys) -> tuple[object, str]:
    with pytest.raises(SystemExit) as stop:
        run(main, argparse.Namespace())
    return stop.value.code, capsys.readouterr().err


def raising(error):
    def main(args):
        raise error

    return main


def test_mistakes_and_interruptions_end_without_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tool.py"])
    assert ending(raising(UserError("no 'x'; give a y")), capsys)[0] == (
        "tool.py: error: no 'x'; give a y"
    )
    assert ending(raising(KeyboardInterrupt()), capsys) == (130, "tool.py: interrupted\n")
    worker = "Caught UserError in a worker.\nTraceback …\nsw_detectron.errors.UserError: no image\n"
    assert ending(raising(UserError(worker)), capsys)[0] == "tool.py: error: no image"
    with pytest.raises(ValueError, match="a bug"):  # nothing that a user can mend
        run(raising(ValueError("a bug")), argparse.Namespace())
    with pytest.raises(SystemExit, match="tool.py: error: it ended"):
        fail("it ended")


def test_the_line_goes_to_standard_error_with_status_1():
    code = (
        "from sw_detectron.cli import run; from sw_detectron.errors import UserError\n"
        "def main(args): raise UserError('here')\n"
        "run(main, None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "-c: error: here\n")


@pytest.mark.parametrize(
    "parse, text, value",
    [
        (positive, "12", 12),
        (positive, "0", None),
        (positive, "-1", None),
        (positive, "1.5", None),
        (fraction, "0", 0.0),
        (fraction, "1.0", 1.0),
        (fraction, "1.1", None),
        (fraction, "nan", None),
        (fraction, "half", None),
        (subset_of(("bw", "iw", "ln")), "ln,bw", ("ln", "bw")),
        (subset_of(("bw", "iw", "ln")), "bw,bw", None),
        (subset_of(("bw", "iw", "ln")), "bw,xw", None),
        (subset_of(("bw", "iw", "ln")), "", None),
    ],
)
def test_types_of_arguments(parse, text, value):
    if value is None:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text!r} is no "):
            parse(text)
    else:
        assert parse(text) == value


def test_a_lack_of_memory_is_one_line(capsys):
    def main(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore of it.")

    code, _ = ending(main, capsys)
    assert "error: CUDA out of memory. Tried to allocate 9 GiB." in code
    assert "\n" not in code and "smaller images" in code


def test_config_has_two_flags():
    parser = make_parser("What it does.", "examples:\n  %(prog)s  as written")
    add_config_argument(parser, action="append")
    args = parser.parse_args(["--config", "a.yaml", "--config-file", "b.yaml"])
    assert args.config_file == ["a.yaml", "b.yaml"]
    assert parser.format_help().endswith(f"examples:\n  {parser.prog}  as written\n")


def test_the_output_folder_is_made_or_named(tmp_path):
    assert output_folder(str(tmp_path / "a/b")) == tmp_path / "a/b"
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="'.*/file'"):
        output_folder(tmp_path / "file")
