"""What the command lines of all tools share: parsers, arguments, and how a program ends."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from .errors import UserError, one_line

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended, as shells have it


def run(main: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> None:
    """Call `main(args)`; a `UserError`, or a GPU without the memory, ends the program as `fail`
    does, Ctrl-C with status 130."""
    try:
        main(args)
    except UserError as error:
        fail(error)
    except torch.OutOfMemoryError as error:
        fail(f"{one_line(error)} Take fewer or smaller images at once")
    except KeyboardInterrupt:
        interrupted()


def fail(reason: UserError | str) -> NoReturn:
    """End the program with the line "PROG: error: REASON" on standard error and status 1."""
    logging.shutdown()
    # A data loader's worker process puts its traceback before the message.
    message = str(reason).rpartition(f"{UserError.__name__}: ")[2].strip()
    sys.exit(f"{sys.argv[0]}: error: {message}")


def interrupted() -> NoReturn:
    """End the program as Ctrl-C asks for: one line on standard error and status 130."""
    logging.shutdown()
    print(f"{sys.argv[0]}: interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def make_parser(
    description: str, examples: str | None = None, **options
) -> argparse.ArgumentParser:
    """A parser whose help shows the examples, as they are written, below the flags.

    Args:
        options: further arguments of `ArgumentParser`.
    """
    return argparse.ArgumentParser(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def add_config_argument(parser: argparse.ArgumentParser, **options) -> None:
    """Add `--config FILE`, or `--config-file FILE` as Detectron2 has it: `args.config_file`.

    Args:
        options: further arguments of `add_argument`, such as `action="append"`.
    """
    parser.add_argument(
        "--config",
        "--config-file",
        dest="config_file",
        metavar="FILE",
        help="path of a config, or the bare name of one that comes with the package (default: the "
        "config that the weights of a training run carry)",
        default=None if options.get("action") == "append" else "",
        **options,
    )


def add_networks_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and `--weights`, once for each network, and `--output`."""
    add_config_argument(parser, action="append")
    parser.add_argument(
        "--weights", action="append", required=True, metavar="FILE", help="a trained checkpoint"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the results")


def add_test_images_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--images`, of how many test images are evaluated."""
    parser.add_argument(
        "--images",
        type=positive,
        metavar="N",
        help="evaluate so many, spread evenly over the test data (default: all)",
    )


def add_num_gpus_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--num-gpus`, of how many processes there are on this machine."""
    parser.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        metavar="K",
        help="processes on this machine: one for each GPU; without a GPU, on the CPU's cores",
    )


def add_overrides_argument(parser: argparse.ArgumentParser) -> None:
    """Add `KEY VALUE ...` after the flags: `args.opts`, a list of strings."""
    parser.add_argument(
        "opts", nargs="*", metavar="KEY VALUE", help="overrides of the config's keys"
    )


def positive(text: str) -> int:
    """The type of an argument that is a whole number from 1 on."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return value


def fraction(text: str) -> float:
    """The type of an argument that is a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def percentages(text: str) -> tuple[float, ...]:
    """The type of an argument that lists percentages, 0 to 1000, with commas between."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 1000 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of percentages from 0 to 1000")
    return values


def subset_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an argument that lists distinct names out of `names`, with commas between."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"{text!r} is no set out of {','.join(names)}")
        return chosen

    return parse


def config_for_each(configs: list[str] | None, weights: list[str]) -> list[str]:
    """The `--config` of each of several `--weights`; "" for each if none is given.

    Raises:
        UserError: there are not as many of one as of the other.
    """
    configs = configs or [""] * len(weights)
    if len(configs) != len(weights):
        raise UserError(
            f"--config is given {len(configs)} and --weights {len(weights)} times; each "
            "network needs both, or all weights carry their configs"
        )
    return configs


def names_of_networks(configs: list[str], weights: list[str]) -> list[str]:
    """The configs' names, or without one the weights' folder; with the weights where they repeat,
    and a number where those do too."""
    names = [Path(c).stem if c else Path(w).resolve().parent.name for c, w in zip(configs, weights)]
    names = [n if names.count(n) == 1 else f"{n}, {w}" for n, w in zip(names, weights)]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def output_folder(path: str | os.PathLike) -> Path:
    """The folder of a tool's results, made if it is missing.

    Raises:
        UserError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {str(path)!r}: {error.strerror}") from None
    return Path(path)
