"""Runs a main function in one process or several, and turns users' mistakes into one line."""

import argparse
import logging
import sys
from collections.abc import Callable

from detectron2.engine import launch as detectron2_launch

from ..errors import UserError


def launch(main: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> None:
    """Call `main(args)` as the flags of Detectron2's standard parser say.

    A `UserError` ends the program with one line on standard error and status 1.
    """
    try:
        detectron2_launch(
            main,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(args,),
        )
    except UserError as error:
        logging.shutdown()
        sys.exit(f"{sys.argv[0]}: error: {error}")
