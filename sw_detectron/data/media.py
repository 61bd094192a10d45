"""Image files and video files as sequences of frames, and the way back.

A frame is a picture (H, W, 3), uint8, in BGR order.
"""

import itertools
import logging
import math
import mimetypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, PngImagePlugin

from ..errors import UserError
from ..files import written_whole
from .images import is_visible, read_image, why_unreadable
from .registration import whole_folder

logger = logging.getLogger(__name__)

# Broken files are reported by our own errors; FFmpeg's and OpenCV's would come beside them.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_MARK = b"Software\0sw_detectron"
"""In what is written here, so that a later run knows that it may replace it: in a PNG the text
chunk that names the program, in an MPEG-4 file a box of free space at the end."""

_NAME_BYTES = 255  # of a file's name, as most file systems have it


class UnreadableMedia(UserError):
    """An image or a video that cannot be read."""


class ImageFile:
    """An image file: one frame; see `read_image`.

    Attributes:
        size: width and height, in pixels, as the file has them.

    Raises:
        UnreadableMedia: the file is no image; when iterated, it cannot be decoded.
    """

    num_frames = 1

    def __init__(self, path: Path):
        self.path = path
        try:
            with Image.open(path) as image:
                self.size = image.size
        except Exception as error:  # Pillow's decoders have many kinds of errors
            raise UnreadableMedia(
                f"{str(path)!r} is not a readable image: {why_unreadable(error)}"
            ) from None

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            frame = read_image(self.path, "BGR")
        except UserError as error:
            raise UnreadableMedia(*error.args) from None
        yield frame


class VideoFile:
    """A video file: its frames, as OpenCV decodes them.

    Attributes:
        num_frames: as the file declares it; a broken one has fewer, and some formats declare 0.
        fps: frames per second, as the file declares it.

    Raises:
        UnreadableMedia: the file is no video, or none of its frames can be decoded.
    """

    def __init__(self, path: Path):
        self.path = path
        video = self._open()
        if not video.read()[0]:
            raise self._unreadable()
        count = video.get(cv2.CAP_PROP_FRAME_COUNT)
        self.num_frames = max(0, int(count)) if math.isfinite(count) else 0
        self.fps = video.get(cv2.CAP_PROP_FPS)

    def __iter__(self) -> Iterator[np.ndarray]:
        video = self._open()
        count = 0
        while True:
            decoded, frame = video.read()
            if not decoded:
                break
            count += 1
            yield frame
        if not count:
            raise self._unreadable()
        if count < self.num_frames:
            logger.warning(
                f"{str(self.path)!r}: only {count} of {self.num_frames} frames can be read"
            )

    def _open(self) -> cv2.VideoCapture:
        if not _is_known_to_opencv(self.path):
            raise self._unreadable(": rename it, OpenCV takes names in UTF-8 alone")
        return cv2.VideoCapture(str(self.path))

    def _unreadable(self, reason: str = "") -> UnreadableMedia:
        return UnreadableMedia(f"{str(self.path)!r} is not a readable video{reason}")


def _is_known_to_opencv(path: Path) -> bool:
    """Whether the name is text in UTF-8; by others, OpenCV ends the process."""
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def find_media(inputs: list[str]) -> list[Path]:
    """The files among files and folders. Of a folder (not of folders in it) they are those whose
    names say that they are images or videos, sorted, without hidden ones.

    Raises:
        UserError: a path does not exist or cannot be read, or a folder holds none.
    """
    media = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            try:
                files = sorted(file for file in path.iterdir() if is_visible(file.name))
            except OSError as error:
                raise UserError(f"folder {name!r} cannot be read: {error.strerror}") from None
            found = [f for f in files if _kind(f) and (f.is_file() or f.is_symlink())]
            if not found:
                raise UserError(f"folder {name!r} holds no images and no videos")
            media += found
        elif path.is_file():
            media.append(path)
        elif path.exists():
            raise UserError(f"input {name!r} is neither a file nor a folder")
        else:
            raise UserError(f"input {name!r} does not exist")
    return media


def open_media(path: Path) -> ImageFile | VideoFile:
    """A file as what its name says that it is; others are taken for images.

    Raises:
        UnreadableMedia: it is no image and no video.
    """
    return VideoFile(path) if _kind(path) == "video" else ImageFile(path)


def _kind(path: Path) -> str | None:
    """ "image" or "video", if the file's name says that it is one."""
    kind = (mimetypes.guess_type(path.name)[0] or "").split("/")[0]
    return kind if kind in ("image", "video") else None


def output_paths(media: list[ImageFile | VideoFile], folder: Path) -> list[Path]:
    """A path in the folder for the picture of each, named as its input.

    Where the name is taken, by another picture or by something that this module has not written,
    a number follows it. Names that differ in case alone count as the same.

    Raises:
        UserError: it would replace an input.
    """
    sources = {item.path.resolve() for item in media}
    taken, paths = set(), []
    for item in media:
        suffix = ".mp4" if isinstance(item, VideoFile) else ".png"
        for path in _names(folder, item.path.stem, suffix):
            if path.name.casefold() in taken:
                continue
            if path.resolve() in sources:
                raise UserError(
                    f"the picture {str(path)!r} would replace an input: give another --output"
                )
            if not os.path.lexists(path) or is_own(path):
                break
        taken.add(path.name.casefold())
        paths.append(path)
    return paths


def is_own(path: Path) -> bool:
    """Whether a file is one that `write_picture` or `write_video` has written."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = file.read(256)
            file.seek(-min(64, os.path.getsize(path)), os.SEEK_END)
            return _MARK in head or _MARK in file.read()
    except OSError:
        return False


def _names(folder: Path, stem: str, suffix: str) -> Iterator[Path]:
    """Paths in the folder for STEM.SUFFIX, STEM_2.SUFFIX and so on, cut to what names can be."""
    for ending in itertools.chain(
        [suffix], (f"_{number}{suffix}" for number in itertools.count(2))
    ):
        space = _NAME_BYTES - len(ending)
        cut = os.fsencode(stem)[:space].decode("utf-8", "ignore")
        yield folder / ((stem if len(os.fsencode(stem)) <= space else cut) + ending)


def write_picture(frame: np.ndarray, path: Path) -> None:
    """Write a frame as PNG, whole or not at all.

    Raises:
        UserError: the path cannot be written.
    """
    info = PngImagePlugin.PngInfo()
    info.add_text(*_MARK.decode().split("\0"))
    with written_whole(path) as unfinished:
        picture = Image.fromarray(np.ascontiguousarray(frame[..., ::-1]))
        picture.save(unfinished, "PNG", pnginfo=info, compress_level=1)


def write_video(frames: Iterable[np.ndarray], path: Path, fps: float) -> None:
    """Write frames as MPEG-4 video, whole or not at all.

    All are resized to the size of the first. The encoder wants even sides, and so cuts off the
    last row or column of odd ones. Where OpenCV has no encoder, or does not take the path, the
    frames become `000000.png`, `000001.png`, … in a new folder that has the video's name without
    its suffix, and a number if that is taken.

    Args:
        frames: at least one.
        path: of the video, with the suffix .mp4.
        fps: frames per second; see `encodable_rate`.

    Raises:
        UserError: the path cannot be written.
    """
    frames = iter(frames)
    first = next(frames)
    frames = itertools.chain([first], frames)
    size = first.shape[1::-1]
    try:
        with written_whole(path) as unfinished:
            if not _encode((_resized(frame, size) for frame in frames), unfinished, fps, size):
                raise UserError(f"{str(path)!r} cannot be written whole: is the disk full?")
    except _NoEncoder:
        names = _names(path.parent, path.stem, "")
        folder = next(name for name in names if not os.path.lexists(name))
        with whole_folder(folder) as unfinished:
            for index, frame in enumerate(frames):
                write_picture(frame, unfinished / f"{index:06d}.png")


class _NoEncoder(Exception):
    """OpenCV cannot write a video; no frame has been taken yet."""


def _encode(frames: Iterable[np.ndarray], path: Path, fps: float, size: tuple[int, int]) -> bool:
    """Whether all frames are in the file then: OpenCV itself says nothing if it cannot write."""
    code, rate = cv2.VideoWriter_fourcc(*"mp4v"), encodable_rate(fps)
    video = cv2.VideoWriter(str(path), code, rate, size) if _is_known_to_opencv(path) else None
    if not (video and video.isOpened()):
        raise _NoEncoder
    count = 0
    for frame in frames:
        video.write(frame)
        count += 1
    video.release()
    with path.open("ab") as file:
        file.write((8 + len(_MARK)).to_bytes(4, "big") + b"free" + _MARK)
    return cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FRAME_COUNT) == count


def encodable_rate(fps: float) -> float:
    """The frame rate nearest to one that MPEG-4 has, which knows fractions of numbers to 65535.

    Where there is no rate, as videos of unknown rate say 0 or what is no number, it is 25.
    """
    if not (math.isfinite(fps) and fps > 0):
        return 25.0
    fps = min(max(fps, 0.01), 65535.0)
    # OpenCV makes the fraction of the decimals, of which it takes three at most.
    return next(
        rounded
        for decimals in (3, 2, 1, 0)
        if (rounded := round(fps, decimals)) * 10**decimals < 65535.5
    )


def _resized(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return frame if frame.shape[1::-1] == size else cv2.resize(frame, size)
