"""Writes checkpoints whole or not at all."""

import os
import pickle
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from ..files import written_whole
from .facts import FACTS_KEY

FORMATS = ("pkl", "pth")


def check_destination(path: Path, output_format: str | None, force: bool) -> str:
    """The format to write `path` in; whether it can be written, before the long work.

    Args:
        path: of the file to come.
        output_format: one of `FORMATS`, or None for what the path's ending says.
        force: an existing file may be replaced.

    Raises:
        UserError: it cannot be written, or must not.
    """
    try:
        is_dir, exists = path.is_dir(), path.exists()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from None
    if is_dir:
        raise UserError(f"{str(path)!r} is a folder; give the name of a file")
    output_format = output_format or path.suffix.removeprefix(".")
    if output_format not in FORMATS:
        raise UserError(
            f"{str(path)!r} ends neither in .pkl nor in .pth: rename it, or give --output-format"
        )
    if exists and not force:
        raise UserError(f"{str(path)!r} exists; give another name, or --force to replace it")
    if not path.parent.is_dir():
        raise UserError(f"the folder {str(path.parent)!r} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"the folder {str(path.parent)!r} is not writable; choose another")
    return output_format


def write_checkpoint(
    path: Path,
    model: dict[str, Tensor],
    output_format: str,
    matching_heuristics: bool,
    carried: dict[str, object] | None = None,
) -> None:
    """Write tensors by name as a checkpoint that Detectron2 loads.

    Args:
        path: of the file, which is replaced if it exists.
        model: the tensors.
        output_format: "pkl" (numpy arrays, as in Detectron2's model zoo) or "pth".
        matching_heuristics: let Detectron2 match names by their endings, so that a bare backbone
            is found in a detector. It does not rename them otherwise.
        carried: what it says beside its tensors: under "config" what these need of a config, see
            `facts`, and under "run" what is known of their run, see `run_record`.

    Raises:
        UserError: the tensors do not fit the format, or the disk is full; no file is left.
    """
    if output_format == "pkl" and (
        unknown := [name for name, tensor in model.items() if tensor.dtype == torch.bfloat16]
    ):
        raise UserError(f"a .pkl cannot hold bfloat16, which {unknown[0]} has; write a .pth")
    contents = {
        "model": {name: tensor.contiguous() for name, tensor in model.items()},
        "__author__": "sw_detectron",
        "matching_heuristics": matching_heuristics,
        FACTS_KEY: carried or {"config": {}},
    }
    if output_format == "pth":
        save_pth(contents, path)
        return
    contents["model"] = {name: tensor.numpy() for name, tensor in contents["model"].items()}
    with written_whole(path) as unfinished, open(unfinished, "wb") as file:
        pickle.dump(contents, file)


def save_pth(contents: dict, path: str | os.PathLike) -> None:
    """torch.save, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    with written_whole(path) as unfinished, open(unfinished, "wb") as file:
        try:
            torch.save(contents, file)
        except RuntimeError:  # what torch.save makes of an OSError
            raise UserError(f"cannot write {str(path)!r}: is the disk full?") from None
