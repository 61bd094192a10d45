"""Starting kernels: what stays the same from one call to the next is prepared once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Launch:
    """A kernel, its grid, and all arguments but the pointers, which come first.

    The first call starts the kernel as Triton does, which compiles it for these arguments. Later
    calls go straight to the compiled kernel: numbers are the same, and pointers as well aligned,
    since the owner of a launch makes them so.

    Args:
        kernel: its parameters are pointers, numbers, constants.
        programs: of the grid.
        numbers: in the order of the kernel's parameters.
        num_warps: of a program.
        constants: by name.
    """

    __slots__ = ("_compiled", "_constants", "_numbers", "_tail", "_warps", "kernel", "programs")

    def __init__(
        self, kernel, programs: int, *numbers: float, num_warps: int, **constants: int | bool
    ):
        self.kernel, self.programs = kernel, programs
        self._numbers, self._constants, self._warps = numbers, constants, num_warps
        ordered = (constants[name] for name in kernel.arg_names if name in constants)
        self._tail = (*numbers, *ordered)
        self._compiled = None

    def __call__(self, stream: int | None, *pointers: torch.Tensor | None) -> None:
        """Start the kernel on a stream of the current device, None where it is interpreted."""
        if _instead is not None:
            _instead(self, pointers)
        elif self._compiled is None or not _direct:
            self._compiled = self.kernel[(self.programs,)](*pointers, **self.options(pointers))
        else:
            compiled = self._compiled
            compiled.run(
                *(self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata),
                *(None, None, None, *pointers, *self._tail),
            )

    def options(self, pointers: tuple) -> dict[str, int | float | bool]:
        """What Triton is given by name: the arguments behind the pointers, and how to compile."""
        names = self.kernel.arg_names[len(pointers) :]
        numbers = dict(zip(names, self._numbers))
        # Loads are either prefetched by hand or left to the many programs: no pipelining.
        return numbers | self._constants | {"num_warps": self._warps, "num_stages": 1}


def current_stream(device: torch.device) -> int | None:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def launches_are_replaced() -> bool:
    return _instead is not None


def start_as_triton_does() -> None:
    """Give up going straight to compiled kernels, for the rest of the process."""
    global _direct
    _direct = False


@contextmanager
def replaced_launches(instead: Callable[[Launch, tuple], None]) -> Iterator[None]:
    """Call `instead(launch, pointers)` in the place of starting kernels.

    With a function that does nothing, what remains is the host's work; one that collects the
    launches counts them.
    """
    global _instead
    before, _instead = _instead, instead
    try:
        yield
    finally:
        _instead = before


_direct = True
_instead: Callable[[Launch, tuple], None] | None = None
