#!/usr/bin/env python
"""Measure all that Switchable Whitening costs on a GPU, within some minutes, as one report."""

import argparse
import math
import os
import time

import torch

from sw_detectron.benchmark.gpu.budget import Outcome, run_parts
from sw_detectron.benchmark.gpu.goals import find_goals
from sw_detectron.benchmark.gpu.parts import PARTS, Scale, rehearsal
from sw_detectron.benchmark.gpu.report import REHEARSAL, describe_gpu, write_report
from sw_detectron.cli import make_parser, output_folder, run
from sw_detectron.errors import UserError

EXAMPLES = """
examples:
  what it costs on your card, in six minutes:
    %(prog)s

  the same on a CPU, as small as it can be, to see that all of it works:
    %(prog)s --rehearse
"""


def main(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    folder = output_folder(args.output)  # before minutes of work, not after
    # For the processes of the parts. PyTorch's profiler would announce its every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Whether there is a GPU is then asked in a way that leaves it to the processes forked later.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if args.rehearse:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        scale = rehearsal(folder)
    elif torch.cuda.is_available():
        scale = Scale(torch.device("cuda", 0), folder)
    else:
        raise UserError("PyTorch finds no GPU here; --rehearse tries everything on the CPU")
    machine = describe_gpu(scale.device)
    for name in ("report.md", "report.json", "chart.png", "tests.log"):
        (folder / name).unlink(missing_ok=True)  # of an earlier run

    def after_part(outcomes: list[Outcome]) -> None:
        write_report(folder, machine, outcomes, args.rehearse)
        last = [outcome for outcome in outcomes if outcome.seconds][-1]
        print(f"{last.part}: {last.state} ({last.seconds:.0f} s)", flush=True)

    # A little is left for the start, and for writing at the end.
    outcomes = run_parts(PARTS, scale, begin + 0.95 * 60 * args.minutes, after_part)
    write_report(folder, machine, outcomes, args.rehearse)
    print_goals(outcomes)
    print("".join(f"\n{path}" for path in sorted(folder.iterdir()) if path.is_file()))
    if args.rehearse:
        print(REHEARSAL)


def print_goals(outcomes: list[Outcome]) -> None:
    """What is not met, or not known."""
    for outcome in outcomes:
        for note in dict.fromkeys(outcome.notes):
            print(f"{outcome.part}: {note}")
        if not outcome.seconds:
            print(f"{outcome.part}: {outcome.state}")
    goals = find_goals(pair for outcome in outcomes for pair in outcome.records)
    unmet = [goal for goal in goals if goal.state != "met"]
    print("\n".join(goal.line() for goal in unmet) or "every goal is met")


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of minutes")
    return value


if __name__ == "__main__":
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=6.0,
        help="time for all; what does not fit is left out, and named (default: %(default)g)",
    )
    parser.add_argument(
        "--output",
        default="output/gpu",
        metavar="DIR",
        help="folder of report.md, report.json and chart.png (default: %(default)s)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="try every part on the CPU, as small as it can be: the numbers then mean nothing",
    )
    run(main, parser.parse_args())
