"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[Path]:
    """A path beside `path`, of the same ending, to write to; the file replaces `path` at the end.

    No reader ever meets half of it, and an error leaves what was there, and nothing else.
    """
    path = Path(path)
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
