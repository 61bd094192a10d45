"""Runs a main function in one process or several, and turns users' mistakes into one line."""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from detectron2.data.detection_utils import SizeMismatchError
from detectron2.engine import launch as detectron2_launch
from detectron2.engine.launch import DEFAULT_TIMEOUT
from detectron2.utils import comm
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ..cli import fail, interrupted
from ..errors import UserError, one_line

Main = Callable[[argparse.Namespace], object]


def launch(main: Main, args: argparse.Namespace) -> None:
    """Call `main(args)` in as many processes as the flags of Detectron2's standard parser say, or,
    started by torchrun, in this one as a member of its group.

    Without a GPU the processes share the CPU's cores and talk through gloo. When one dies, the
    others are ended. A `UserError`, and what the system refuses, such as space on the disk, end the
    program with one line on standard error and status 1; an interruption does with status 130.
    """
    if dist.is_torchelastic_launched():
        _join_torchrun()
        _run_alone(main, args)
        dist.destroy_process_group()
        return
    available = torch.cuda.device_count() if torch.cuda.is_available() else args.num_gpus
    if not 1 <= args.num_gpus <= available:
        fail(f"--num-gpus {args.num_gpus}: this machine has {available}")
    if not 0 <= args.machine_rank < args.num_machines:
        fail(f"--machine-rank {args.machine_rank} must lie below --num-machines")
    several = args.num_gpus * args.num_machines > 1
    if several:
        # Python's watcher over shared memory would complain of a killed process after our own line.
        sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    try:
        detectron2_launch(
            _run if several else _run_alone,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(main, args),
        )
    except ProcessRaisedException as error:
        # Its text is the traceback of the first process that failed.
        _, is_mistake, message = str(error).rpartition(f"{UserError.__name__}: ")
        if not is_mistake:
            raise
        fail(message)
    except ProcessExitedException as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        fail(f"process {error.error_index} ended with {how}; the others were stopped")
    except KeyboardInterrupt:
        _stop_children()
        interrupted()


def _run(main: Main, args: argparse.Namespace) -> None:
    if not torch.cuda.is_available() and comm.get_world_size() > 1:
        # Each with all cores to itself, the processes would wait for each other's threads.
        torch.set_num_threads(max(1, torch.get_num_threads() // comm.get_local_size()))
    try:
        main(args)
    except SizeMismatchError as error:  # of an image that the check of the data did not open
        # A data loader's worker process puts its traceback before the message.
        message = str(error).rpartition(f"{SizeMismatchError.__name__}: ")[2].strip()
        raise UserError(message) from error
    except torch.OutOfMemoryError as error:
        raise UserError(f"{one_line(error)} Take fewer or smaller images a step") from error
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(one_line(error)) from error


def _run_alone(main: Main, args: argparse.Namespace) -> None:
    """In this process, which has to say itself what went wrong."""
    try:
        _run(main, args)
    except UserError as error:
        if comm.get_local_rank() == 0:
            fail(error)
        sys.exit(1)
    except KeyboardInterrupt:
        interrupted()


def _stop_children() -> None:
    """End the processes of this one; those that the interruption reached too may finish first."""
    deadline = time.monotonic() + 5
    for child in multiprocessing.active_children():
        child.join(max(0, deadline - time.monotonic()))
        if child.is_alive():
            child.terminate()


def _join_torchrun() -> None:
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=DEFAULT_TIMEOUT)
    comm.create_local_process_group(int(os.environ["LOCAL_WORLD_SIZE"]))
    if has_gpu:
        torch.cuda.set_device(comm.get_local_rank())
