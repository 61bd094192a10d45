"""Parts one after the other within a number of minutes, each in a process of its own.

A part that runs too long, takes the GPU down, or dies leaves the others, and what it had measured.
"""

import logging
import multiprocessing
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tqdm import tqdm

from ...errors import UserError
from .parts import Part, Scale

# A part is not begun for fewer seconds: it would not measure anything.
_SHORTEST = 5.0

_PACKAGE = Path(__file__).resolve().parents[2]

_RECORD, _NOTE, _FAILURE, _DONE = range(4)


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        state: "done", or in words why not.
        seconds: that it took.
        records: headings and what was measured.
        notes: warnings, and what is missing.
    """

    part: str
    state: str = "left out: the time was up"
    seconds: float = 0.0
    records: list[tuple[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_parts(
    parts: Sequence[Part],
    scale: Scale,
    deadline: float,
    after: Callable[[list[Outcome]], None] = lambda outcomes: None,
    shortest: float = _SHORTEST,
) -> list[Outcome]:
    """Run the parts until the deadline, a value of `time.monotonic()`.

    Args:
        after: called after every part with the outcomes of all.
        shortest: seconds for which a part is still begun.
    """
    # A server that has imported everything once, and never used the GPU, forks a process a part.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    outcomes = [Outcome(part.name) for part in parts]
    for index, (part, outcome) in enumerate(zip(parts, outcomes)):
        left = deadline - time.monotonic()
        seconds = left * part.share / sum(later.share for later in parts[index:])
        if seconds < shortest:
            break
        _run(part, scale, seconds, outcome, context)
        after(outcomes)
    return outcomes


def _run(part: Part, scale: Scale, seconds: float, outcome: Outcome, context) -> None:
    """Run a part for at most so many seconds, and fill in its outcome."""
    begin = time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(part, scale, seconds, sender))
    process.start()
    sender.close()  # the other process has its own
    outcome.state = f"stopped after {seconds:.0f} s"
    try:
        while receiver.poll(max(0.0, begin + seconds - time.monotonic())):
            kind, content = receiver.recv()
            if kind == _RECORD:
                outcome.records.append(content)
            elif kind == _NOTE:
                outcome.notes.append(content)
            else:
                outcome.state = "done" if kind == _DONE else f"failed: {content}"
                break
    except EOFError:
        process.join()
        outcome.state = f"failed: its process ended with status {process.exitcode}"
    finally:
        process.terminate()
        process.join(2)
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
        outcome.seconds = time.monotonic() - begin


def _measure(part: Part, scale: Scale, seconds: float, sender: Connection) -> None:
    """The process of a part."""
    # Ctrl-C is the other process's to see; told to end, this one ends what it has started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which a process killed leaks
    _send_warnings(sender)
    try:
        for heading, record in part.measure(scale, seconds):
            if isinstance(record, str):
                sender.send((_NOTE, record))
            else:
                sender.send((_RECORD, (heading, record)))
        sender.send((_DONE, None))
    except torch.OutOfMemoryError:
        sender.send((_FAILURE, "the GPU's memory does not suffice"))
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        first_line, *_ = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        sender.send((_FAILURE, kind + first_line))


def _send_warnings(sender: Connection) -> None:
    """Note what the package warns of, such as that it does not use its kernels, and why."""
    show = warnings.showwarning

    def note(message, category, filename, *rest) -> None:
        if _PACKAGE in Path(filename).resolve().parents:
            sender.send((_NOTE, str(message)))
        else:
            show(message, category, filename, *rest)

    warnings.showwarning = note
    logging.getLogger(_PACKAGE.name).addHandler(_Notes(sender))


class _Notes(logging.Handler):
    def __init__(self, sender: Connection):
        super().__init__(logging.WARNING)
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        self._sender.send((_NOTE, record.getMessage()))
