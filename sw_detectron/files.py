"""Files that are written whole or not at all."""

import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError

PREFIX = ".sw_detectron-unfinished-"


@contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[Path]:
    """A path in the folder of `path`, of the same ending, to write to; at the end it becomes
    `path`.

    No reader ever meets half of it, whoever else writes there, and an error leaves what was there,
    and nothing else. As with open(), a link stays and the file that it names is written, a file
    that exists keeps its permissions, and a new one has those of the umask.

    A process that is killed leaves its unfinished file behind. It is locked for as long as it is
    written, so the next writer of the folder knows by the lock, which dies with its process, which
    ones were left, and takes their place: there are never more than were written at one time.

    Raises:
        UserError: `path` cannot be written: its folder is missing or not writable, it is a folder
            or a device, the disk is full.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "no regular file"
            raise UserError(f"{str(path)!r} is {kind}; give the name of a file")
        unfinished, lock = _create_unfinished(target)
        try:
            yield unfinished
            if target.exists():
                shutil.copymode(target, unfinished)
            os.replace(unfinished, target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        names = (None, target, str(target))
        if error.errno is None or not (error.filename in names or PREFIX in str(error.filename)):
            raise  # the system does not complain about this file
        if not target.parent.is_dir():
            reason = f"the folder {str(target.parent)!r} does not exist; make it first"
        else:
            reason = error.strerror
        raise UserError(f"cannot write {str(path)!r}: {reason}") from None


def _create_unfinished(target: Path) -> tuple[Path, int]:
    """A new, empty file beside `target`, and the descriptor that holds its lock.

    Its name is numbered and not made of the target's, which may be as long as names can be.
    """
    ending = target.suffix if len(os.fsencode(target.suffix)) < 32 else ""
    for number in itertools.count():
        path = target.with_name(f"{PREFIX}{number}{ending}")
        _remove_if_left(path)
        try:
            lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            continue  # another process or thread is writing it
        with suppress(OSError):  # a file system without locks: what is left there stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is(lock, path):  # else it was taken for one that was left, before it was locked
            return path, lock
        os.close(lock)


def _remove_if_left(path: Path) -> None:
    """Remove an unfinished file that no living process has locked."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return  # there is none, or it is another user's
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(file, path):  # else it was renamed meanwhile, and is somebody's finished file
            path.unlink()
    except OSError:
        pass  # it is being written, or this file system has no locks
    finally:
        os.close(file)


def _is(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
