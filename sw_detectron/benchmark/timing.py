"""Measures functions beside each other: their durations, and the memory that they take.

Contenders are timed in interleaved rounds: each round runs every one of them once, so that a
machine that slows down slows all of them, and a contender's ratio to the baseline is taken round
by round. The median over the rounds is reported, with its quartiles.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from ..errors import UserError

# A measurement repeats a run until it lasts about this long, well above a clock's noise.
_SHORTEST_MS = 2.0
_MOST_REPEATS = 1000

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Duration over the rounds, and its ratio to the baseline's of the same round.

    Attributes:
        ms: the median, in milliseconds.
        ratio, ratio_low, ratio_high: the median and the quartiles of the ratios.
    """

    ms: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.ratio_low:.2f} to {self.ratio_high:.2f})"


def time_rounds(
    runs: Mapping[Hashable, Run], device: torch.device, rounds: int, warmup: int, title: str
) -> dict[Hashable, list[float]]:
    """Time every run once in each round, with a progress bar.

    Args:
        runs: functions without arguments, by any key.
        rounds, warmup: rounds that count, and rounds before them that do not; at least 1 each.
        title: of the progress bar.

    Returns:
        By the keys of `runs`, the duration of one call in each round, in milliseconds.

    Raises:
        UserError: there is no round, or none to warm up.
    """
    if rounds < 1 or warmup < 1:
        raise UserError(f"need at least one round and one to warm up, got {rounds} and {warmup}")
    times = {key: [] for key in runs}
    repeats = dict.fromkeys(runs, 1)
    for index in tqdm(range(-warmup, rounds), desc=title, unit="round", leave=False, disable=None):
        # There and back, so that no contender always comes after the same other one.
        for key in list(runs)[:: 1 if index % 2 else -1]:
            elapsed = _milliseconds(runs[key], repeats[key], device)
            if index >= 0:
                times[key].append(elapsed)
            else:  # the last warm-up round decides, when everything is compiled and cached
                repeats[key] = min(_MOST_REPEATS, max(1, math.ceil(_SHORTEST_MS / elapsed)))
    return times


def _milliseconds(run: Run, repeats: int, device: torch.device) -> float:
    """The duration of one call, averaged over a few in a row.

    On a GPU that is what the GPU sees: a run that keeps it waiting for the host pays for that.
    """
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        begin.record(stream)
        for _ in range(repeats):
            run()
        end.record(stream)
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return 1e3 * (time.perf_counter() - begin) / repeats


def summarize(times: Sequence[float], baseline: Sequence[float]) -> Timing:
    """Median and quartiles of durations (ms) and of their ratios to the baseline's, by round."""
    low, ratio, high = np.quantile(np.divide(times, baseline), (0.25, 0.5, 0.75))
    return Timing(float(np.median(times)), float(ratio), float(low), float(high))


def retained_bytes(forward: Callable[[], Tensor], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that a forward pass keeps for its backward pass.

    Counted are the distinct storages that autograd saves, apart from those of the tensors to
    exclude, such as parameters.
    """
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    for tensor in exclude:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del output  # until here it kept the storages, and so their addresses, apart
    return sum(storages.values())


def kept_bytes(
    forward: Callable[[], Tensor], device: torch.device, parameters: Iterable[Tensor]
) -> int:
    """Bytes that a network's forward pass keeps for its backward pass, its parameters aside.

    On a GPU that is what is allocated more after the pass than before it, whoever keeps it, such
    as a compiled graph; on a CPU it is what `retained_bytes` finds.
    """
    if device.type != "cuda":
        return retained_bytes(forward, exclude=parameters)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    after = torch.cuda.memory_allocated(device)
    del output  # until here it kept all of it
    return after - before


def peak_bytes(run: Run, device: torch.device) -> int:
    """The most bytes that a run has allocated at a time, beyond what was there before.

    On a CPU, what PyTorch's own allocator hands out is counted, not the work space of a library.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"
    ]
    changes.sort(key=lambda change: change[0])
    return max(0, int(np.cumsum([size for _, size in changes]).max(initial=0)))
