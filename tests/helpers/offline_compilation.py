"""Compile the kernels that layers start for a GPU that is not there.

Run by itself, as Triton must not interpret kernels in the same process:
    python tests/helpers/offline_compilation.py BACKEND ARCHITECTURE WARP_SIZE
It prints a line of JSON for each. For NVIDIA's GPUs it says what the kernel takes of a
multiprocessor: registers and spilled bytes of a thread, shared memory in bytes.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sw_detectron.layers import STATISTICS, SwitchWhiten2d, set_backend
from sw_detectron.layers.padding import image_sizes
from sw_detectron.layers.triton import common, replaced_launches
from sw_detectron.layers.triton.ranks_moments import ranks_moments

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
}

# Statistics, G, dtype, memory format, training, whether images are padded, and the map's sides.
CASES = [
    (("bw", "iw"), 16, torch.float32, torch.contiguous_format, True, False, 28),
    (("bw", "iw"), 16, torch.bfloat16, torch.channels_last, True, True, 28),
    (("bw", "iw"), 16, torch.bfloat16, torch.contiguous_format, True, True, 70),  # many chunks
    (("bw", "iw"), 32, torch.float32, torch.contiguous_format, True, False, 28),
    (STATISTICS, 16, torch.float16, torch.contiguous_format, True, False, 28),
    (STATISTICS, 64, torch.float32, torch.channels_last, True, True, 28),
    (("bw",), 8, torch.float32, torch.contiguous_format, False, False, 28),
    (("iw", "ln"), 32, torch.bfloat16, torch.contiguous_format, False, True, 28),
]


def source(launch, pointers) -> ASTSource:
    """The kernel specialized as Triton does: for numbers that are 1, and multiples of 16."""
    kernel, named = launch.kernel, launch.options(pointers)
    parameters = dict(zip(kernel.arg_names, pointers)) | {
        name: value for name, value in named.items() if name in kernel.arg_names
    }
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = parameters[parameter.name]
        aligned = False
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            aligned = not parameter.do_not_specialize_on_alignment
        elif parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "i32"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def resources(cubin: bytes) -> dict[str, int]:
    """What a compiled kernel takes, as `cuobjdump`, which comes with Triton, reads it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", output).groups()
    return {"registers": int(registers), "spilled": int(spilled)}


def main() -> None:
    backend, architecture, warp_size = sys.argv[1:]
    architecture = int(architecture) if architecture.isdigit() else architecture
    if backend == "hip":  # as `common` and `moments` choose where PyTorch is AMD's
        for module in (common, sys.modules[common.__name__.replace("common", "moments")]):
            for name in {"PRODUCT", "EXACT_PRODUCT"} & vars(module).keys():
                setattr(module, name, tl.constexpr("ieee"))
    target = GPUTarget(backend, architecture, int(warp_size))
    done = set()

    def compile_once(launch, pointers):
        kernel = source(launch, pointers)
        options = launch.options(pointers)
        how = {name: options[name] for name in ("num_warps", "num_stages")}
        if kernel.hash() not in done:
            done.add(kernel.hash())
            compiled = compile_kernel(kernel, target=target, options=how)
            record = {"kernel": launch.kernel.__name__, "G": group, "dtype": str(dtype)}
            record |= {"programs": launch.programs, "warps": how["num_warps"]}
            if backend == "cuda":
                record |= {"shared": compiled.metadata.shared} | resources(compiled.asm["cubin"])
            print(json.dumps(record), flush=True)

    set_backend("triton")
    for statistics, group, dtype, memory_format, training, padded, side in CASES:
        layer = SwitchWhiten2d(2 * group, group, statistics, padding="ignored").train(training)
        x = torch.zeros(3, 2 * group, side, side, dtype=dtype).to(memory_format=memory_format)
        sizes = [(side, 14), (side, side), (side, side)] if padded else None
        with replaced_launches(compile_once), image_sizes(sizes, (side, side)):
            layer(x.requires_grad_()).backward(torch.zeros_like(x))
        # The launch of several processes besides, as if there were four.
        with replaced_launches(compile_once):
            ranks_moments(common.map_of(x, group), 4, 0.1)(None, *[torch.zeros(1)] * 5)


if __name__ == "__main__":
    main()
