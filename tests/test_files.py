"""Files are whole or not there, whoever else writes them and whatever ends the process."""

import errno
import fcntl
import os
import signal
import stat
import threading

import pytest

from sw_detectron import UserError
from sw_detectron.files import PREFIX, written_whole


def write(path, text):
    with written_whole(path) as unfinished:
        unfinished.write_text(text)


def fail(path, error):
    with written_whole(path) as unfinished:
        unfinished.write_text("half")
        raise error


def test_a_file_that_gets_its_name_meanwhile_is_not_taken_for_one_that_was_left(
    tmp_path, monkeypatch
):
    """Between its opening and its locking another writer may finish, and a third one begin."""
    left = tmp_path / f"{PREFIX}0.txt"
    left.write_text("left")
    lock = fcntl.flock

    def renamed_before(file, operation):
        if operation & fcntl.LOCK_NB and left.read_text() == "left":
            left.rename(tmp_path / "finished.txt")
            left.write_text("of a third writer")
        return lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", renamed_before)
    write(tmp_path / "out.txt", "mine")
    assert left.read_text() == "of a third writer"
    assert (tmp_path / "finished.txt").read_text() == "left"
    assert (tmp_path / "out.txt").read_text() == "mine"


def in_process(function):
    """Start `function` in a forked process, which ends without cleaning up; its id."""
    child = os.fork()
    if child:
        return child
    try:
        function()
        os._exit(0)
    finally:
        os._exit(1)


def killed_while_writing(path):
    def run():
        with written_whole(path) as unfinished:
            unfinished.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(in_process(run), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_the_file_appears_at_the_end(tmp_path):
    path = tmp_path / "curve.png"
    path.write_text("old")
    with written_whole(path) as unfinished:
        assert unfinished.suffix == ".png" and unfinished.parent == tmp_path
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path, error):
    path = tmp_path / "results.json"
    path.write_text("old")
    with pytest.raises(error):
        fail(path, error)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask, expected", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_permissions_are_those_of_open(tmp_path, umask, expected):
    before = os.umask(umask)
    try:
        write(tmp_path / "a.txt", "new")
        (tmp_path / "b.txt").touch()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.txt", "b.txt")]
    assert modes == [expected, expected]


def test_a_file_that_exists_keeps_its_permissions(tmp_path):
    path = tmp_path / "shared.pth"
    path.touch()
    path.chmod(0o640)
    write(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "model.pth"
    link.symlink_to("../disk/large.pth")  # which is not there yet
    for text in ("first", "second"):
        with written_whole(link) as unfinished:
            assert unfinished.parent == tmp_path / "disk"  # where a rename is possible
            unfinished.write_text(text)
        assert link.is_symlink() and link.read_text() == text
        assert (tmp_path / "disk/large.pth").read_text() == text


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path, words in {
        tmp_path / "none/a.txt": "folder '.*none' does not exist; make it first",
        tmp_path / "file/a.txt": "folder '.*file' does not exist",
        tmp_path / "folder": "is a folder; give the name of a file",
        tmp_path / ("n" * 256): "File name too long",
        "/dev/null": "no regular file",
    }.items():
        with pytest.raises(UserError, match=words) as error, written_whole(path):
            raise AssertionError("it is refused before the work")
        assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "loop"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="cannot write '.*a.txt': No space left"):
        fail(tmp_path / "a.txt", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert not list(tmp_path.iterdir())


def test_errors_about_other_files_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "a.txt"):
        (tmp_path / "input.json").read_text()
    with pytest.raises(OSError, match="cannot write mode RGBA as JPEG"):
        fail(tmp_path / "a.jpg", OSError("cannot write mode RGBA as JPEG"))  # Pillow's
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["n" * 250, "n" * 251 + ".pth", "ä" * 125, "x." + "e" * 250], ids=len
)
def test_names_as_long_as_a_file_system_has_them(tmp_path, name):
    write(tmp_path / name, "new")
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "new"


def test_what_killed_processes_leave_does_not_pile_up(tmp_path):
    path = tmp_path / "model.pth"
    path.write_text("old")
    for _ in range(5):
        killed_while_writing(path)
        assert path.read_text() == "old"
        assert len(os.listdir(tmp_path)) == 2
    killed_while_writing(tmp_path / "another.pth")
    assert len(os.listdir(tmp_path)) == 2
    write(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["model.pth"]


def test_only_left_files_of_ours_are_removed(tmp_path):
    foreign = [f"{PREFIX}a.pth", f"{PREFIX}1.pth.bak", f"my{PREFIX}0.pth", ".123.model.pth"]
    for name in foreign:
        (tmp_path / name).touch()
    (tmp_path / f"{PREFIX}0.pth").mkdir()
    (tmp_path / f"{PREFIX}1.pth").symlink_to(foreign[0])
    before = set(os.listdir(tmp_path))
    write(tmp_path / "model.pth", "new")
    assert set(os.listdir(tmp_path)) == before | {"model.pth"}
    assert (tmp_path / "model.pth").read_text() == "new"


def test_an_unfinished_file_of_a_living_process_stays(tmp_path):
    """Two runs in one folder, in processes that know nothing of each other."""
    path = tmp_path / "model.pth"
    ready, go = os.pipe(), os.pipe()

    def first():
        with written_whole(path) as unfinished, open(unfinished, "w") as file:
            file.write("first, ")
            file.flush()
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            file.write("whole")

    child = in_process(first)
    os.read(ready[0], 1)
    with written_whole(path) as unfinished:
        unfinished.write_text("second")
        assert len(os.listdir(tmp_path)) == 2
    assert path.read_text() == "second"
    write(path, "third")
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_text() == "first, whole" and os.listdir(tmp_path) == ["model.pth"]


def test_many_writers_at_once(tmp_path):
    path = tmp_path / "last_checkpoint"
    texts = [letter * 3000 for letter in "abcd"]
    write(path, texts[0])

    def write_often(text):
        for _ in range(100):
            with written_whole(path) as unfinished, open(unfinished, "w") as file:
                for part in (text[:1000], text[1000:]):
                    file.write(part)
                    file.flush()

    children = [in_process(lambda text=text: write_often(text)) for text in texts[:2]]
    threads = [threading.Thread(target=write_often, args=(text,)) for text in texts[2:]]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in texts
    for thread in threads:
        thread.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert os.listdir(tmp_path) == ["last_checkpoint"]
