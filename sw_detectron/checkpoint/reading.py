"""Reads checkpoints of others without running any code in them.

A pickle is a program. Of what such a program can do, only building plain containers and tensors is
allowed here: by `torch.load(weights_only=True)` for PyTorch's files, by safetensors for its own,
and by an unpickler for numpy arrays for the rest.
"""

import io
import math
import os
import pickle
import re
import socket
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from detectron2.utils.file_io import PathManager
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import UserError, one_line

# Where a training checkpoint or a published one keeps the weights among other things.
WEIGHTS_KEYS = ("model", "state_dict", "blobs")

URL_TIMEOUT = 30
"""Seconds that a server may be silent."""

# Tensors can share storage, so there may be more of them than bytes; but not without bound.
MAX_EXPANSION = 8

TORCH_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def read_checkpoint(path: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a checkpoint's model by name, on the CPU.

    Args:
        path: a file of PyTorch (.pth, .pt, .th, .bin, .tar), of safetensors, or a pickle of numpy
            arrays (.pkl), as it is recognized from its content. A "model", "state_dict" or "blobs"
            around the tensors is taken off.

    Raises:
        UserError: there is no such file, or it is not a readable checkpoint. No code of it has run.
    """
    return weights_in(read_file(path), path)[0]


def fetched(path: str) -> str:
    """The path of a local file, or of the local copy of one behind a URL.

    Raises:
        UserError: the server, or the network, does not give it.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(URL_TIMEOUT)
    try:
        return PathManager.get_local_path(path)
    except Exception as error:  # of the network, of the server, of the cache's folder
        raise UserError(f"{path!r} cannot be fetched: {one_line(error)}") from None
    finally:
        socket.setdefaulttimeout(before)


def read_file(path: str | os.PathLike) -> dict:
    """All that a checkpoint's file holds: plain containers, numbers, tensors and numpy arrays.

    Raises:
        UserError: as in `read_checkpoint`.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise UserError(f"checkpoint {path!r} does not exist; give the path of a file")
    if not os.path.isfile(path):
        raise UserError(f"checkpoint {path!r} is not a file; give the file itself")
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"cannot read checkpoint {path!r}: {error.strerror}") from None
    read = _reader(path, head)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            contents = read(path)
    except UserError:
        raise
    except Exception as error:  # a broken file can break a parser in any way
        raise UserError(f"{path!r} is not a readable checkpoint: {_reason(error)}") from None
    if not isinstance(contents, dict):
        raise UserError(
            f"{path!r} holds a {type(contents).__name__} where a checkpoint holds a dictionary of "
            "tensors; save model.state_dict()"
        )
    return contents


def weights_in(contents: dict, path: str | os.PathLike) -> tuple[dict[str, Tensor], list[str]]:
    """The model's tensors in what `read_file` returned, and the names of all else.

    Args:
        contents: of the file.
        path: of the file, for messages, and for its size, which bounds that of its tensors.

    Raises:
        UserError: there are no tensors, or impossible ones.
    """
    path = os.fspath(path)
    wrapper = next((key for key in WEIGHTS_KEYS if isinstance(contents.get(key), dict)), None)
    entries = contents if wrapper is None else contents[wrapper]
    left_out = [] if wrapper is None else [str(key) for key in contents if key != wrapper]
    weights = {}
    for name, value in entries.items():
        if not (isinstance(name, str) and name.isprintable() and len(name) < 300):
            raise UserError(f"{path!r} is not a checkpoint: a key of it is no name of a tensor")
        if isinstance(value, np.ndarray):
            value = _from_numpy(name, value, path)
        if isinstance(value, Tensor):
            _check_plain(name, value, path)
            weights[name] = value.detach()
        else:
            left_out.append(name)
    if not weights:
        raise UserError(
            f"{path!r} holds no tensors; a checkpoint is a dictionary of tensors by name, or has "
            f"one as {' or '.join(map(repr, WEIGHTS_KEYS))}"
        )
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if total > MAX_EXPANSION * os.path.getsize(path):
        raise UserError(
            f"{path!r} is not a readable checkpoint: its tensors claim {total:.1e} bytes, more "
            "than the file can hold; get it again"
        )
    return weights, left_out


def _reader(path: str, head: bytes) -> Callable[[str], object]:
    if not head:
        raise UserError(f"checkpoint {path!r} is empty; get it again")
    if head.startswith(b"PK\x03\x04"):
        return _read_zip
    if head.startswith(TORCH_LEGACY_MAGIC):
        return _read_torch
    if head[257:262] == b"ustar":
        raise UserError(
            f"{path!r} is a tar archive, PyTorch's format before version 0.1.10, which cannot be "
            "read without running code; load it with an old PyTorch and save it again"
        )
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path!r} is a Git LFS pointer, not the checkpoint; run git lfs pull")
    if head.lstrip().startswith(b"<"):
        raise UserError(f"{path!r} is a web page, not a checkpoint; download it again")
    if path.endswith(".safetensors") or head[7:9] == b"\0{":
        return _read_safetensors
    if path.endswith(".pkl") or head.startswith(b"\x80"):
        return _read_pickle
    raise UserError(
        f"{path!r} is not a checkpoint: neither a file of torch.save, nor of safetensors, nor a "
        "pickle; get it again"
    )


def _reason(error: Exception) -> str:
    """One line about why a file could not be parsed."""
    text = str(error)
    blocked = re.search(r"GLOBAL ([\w.]+)", text)
    if blocked:
        return (
            f"it holds a Python object ({blocked[1][:100]}), which is not loaded because that can "
            "run code; save the state dict alone"
        )
    weights_only = re.search(r"WeightsUnpickler error: (.*)", text)
    text = weights_only[1] if weights_only else text
    if isinstance(error, MemoryError):
        return "it claims more data than memory can hold; get it again"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0][:200] if lines else type(error).__name__
    printable = "".join(c if c.isprintable() else "?" for c in reason)
    return f"it is cut off or damaged ({printable}); get it again"


def _read_torch(path: str) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_zip(path: str) -> object:
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.filename.endswith("/constants.pkl") for record in records):
        raise UserError(
            f"{path!r} is a TorchScript program, which would have to be run; save the module's "
            "state_dict() instead"
        )
    # torch.save stores without compression; a few compressed bytes could unpack to any size.
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise UserError(f"{path!r} is a compressed archive, not a checkpoint; unpack it first")
    if sum(record.file_size for record in records) > os.path.getsize(path):
        raise UserError(f"{path!r} is a damaged archive: its parts overlap; get it again")
    return _read_torch(path)


def _read_safetensors(path: str) -> object:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path!r} is not a readable checkpoint: {_reason(error)}") from None


def _read_pickle(path: str) -> object:
    with open(path, "rb") as file:
        data = file.read()
    # Python 2 wrote the older ones; numpy's bytes are text to it.
    return _ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in Python 2's protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How it writes none."""
    return b""


def _dtype(name: str, *_) -> np.dtype:
    if not re.fullmatch(r"[<>|=]?([biufc]\d{1,2}|\?)", name):
        raise pickle.UnpicklingError(f"arrays of dtype {name!r}")
    return np.dtype(name, align=False, copy=True)  # a copy, for its byte order is set afterwards


def _reconstruct(*_) -> np.ndarray:
    """The empty array that BUILD fills; the arguments in the file say nothing else."""
    return np.empty(0, np.int8)


def _scalar(dtype: np.dtype, raw: bytes | str = b"") -> np.generic:
    return np.frombuffer(_bytes(raw), dtype, count=1)[0]


def _frombuffer(buffer: bytes, dtype: np.dtype, shape: tuple, order: str) -> np.ndarray:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order).copy()


def _bytes(raw: bytes | str) -> bytes:
    return raw.encode("latin1") if isinstance(raw, str) else raw


class _ArrayUnpickler(pickle._Unpickler):
    """Builds plain containers, numbers and numpy arrays of numbers; refuses all else.

    It is Python's own unpickler written in Python, since the one in C allocates memory by sizes
    that a damaged file states.
    """

    ALLOWED = {
        "collections.OrderedDict": OrderedDict,
        "_codecs.encode": _encode,
        "__builtin__.bytes": _no_bytes,
        "numpy.dtype": _dtype,
        "numpy.ndarray": None,  # an argument of _reconstruct; calling it is refused
    }
    for _core in ("numpy.core", "numpy._core"):  # numpy 1, numpy 2
        ALLOWED[f"{_core}.multiarray._reconstruct"] = _reconstruct
        ALLOWED[f"{_core}.multiarray.scalar"] = _scalar
        ALLOWED[f"{_core}.numeric._frombuffer"] = _frombuffer

    def find_class(self, module: str, name: str) -> object:
        try:
            return self.ALLOWED[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed") from None

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, np.ndarray):
            _, shape, dtype, fortran_order, raw = state
            raw = _bytes(raw)
            sizes_fit = all(isinstance(size, int) and size >= 0 for size in shape) and (
                math.prod(shape) * dtype.itemsize == len(raw)
            )
            if not sizes_fit:
                raise pickle.UnpicklingError(f"an array of shape {shape} with {len(raw)} bytes")
            target.__setstate__((1, shape, dtype, bool(fortran_order), raw))
        elif isinstance(target, np.dtype):
            _, byte_order, *fields = state
            if byte_order not in ("<", ">", "=", "|") or fields[:3] != [None] * 3:
                raise pickle.UnpicklingError("arrays of a structured dtype")
            target.__setstate__((3, byte_order, None, None, None, -1, -1, 0))
        elif not isinstance(target, OrderedDict):  # whose attributes are a state dict's versions
            raise pickle.UnpicklingError(f"sets attributes of a {type(target).__name__}")

    def load_bytearray8(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    dispatch = pickle._Unpickler.dispatch | {
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def _from_numpy(name: str, array: np.ndarray, path: str) -> Tensor:
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        raise UserError(
            f"{path!r}: {name} has the dtype {array.dtype}, which PyTorch does not know"
        ) from None


def _check_plain(name: str, tensor: Tensor, path: str) -> None:
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.is_quantized or tensor.is_nested:
        raise UserError(
            f"{path!r}: {name} is not a plain tensor (sparse, quantized or without data)"
        )
