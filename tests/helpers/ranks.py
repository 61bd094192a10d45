"""Functions run by several processes that form one group, and what they send each other."""

import multiprocessing
import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes are forked from one that has imported these, which takes longer than most functions.
multiprocessing.set_forkserver_preload(["sw_detectron", "detectron2.engine", "pytest"])


def spawn(function, world_size, folder):
    """Run `function(rank, world_size)` in as many gloo processes; returns what each returned."""
    arguments = (function, world_size, str(folder))
    mp.start_processes(_start, arguments, nprocs=world_size, start_method="forkserver")
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(world_size)]


def _start(rank, function, world_size, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    result = pickle.dumps(function(rank, world_size))
    with open(f"{folder}/{rank}", "wb") as f:
        f.write(result)
    dist.barrier()
    dist.destroy_process_group()


class Counter:
    """Counts the collectives and their bytes while it is entered."""

    NAMES = ("all_gather", "all_reduce", "broadcast", "reduce", "all_gather_into_tensor")

    def __enter__(self):
        self.calls = []
        self.original = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self.original.items():
            setattr(dist, name, self.counting(name, function))
        return self

    def counting(self, name, function):
        def counted(*args, **kwargs):
            tensor = args[1] if name == "all_gather" else args[0]
            self.calls.append((name, tensor.numel() * tensor.element_size()))
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_):
        for name, function in self.original.items():
            setattr(dist, name, function)
