"""Image files and video files as sequences of frames, and the way back.

A frame is a picture (H, W, 3), uint8, in BGR order.
"""

import logging
import mimetypes
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import cv2
import numpy as np
from detectron2.data.detection_utils import read_image
from PIL import Image

from ..errors import UserError
from ..files import written_whole

logger = logging.getLogger(__name__)

# Broken files are reported by our own errors; FFmpeg's would come beside them.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")


class ImageFile:
    """An image file: one frame, turned as its EXIF orientation says.

    Raises:
        UserError: the file is no image; when iterated, it cannot be decoded.
    """

    num_frames = 1

    def __init__(self, path: Path):
        self.path = path
        try:
            Image.open(path).close()
        except OSError as error:
            raise _unreadable(path, "image", error) from None

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            yield read_image(str(self.path), format="BGR")
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's kinds for broken files
            raise _unreadable(self.path, "image", error) from None


class VideoFile:
    """A video file: its frames, as OpenCV decodes them.

    Attributes:
        num_frames: as the file declares it; a broken one has fewer, and some formats declare 0.
        fps: frames per second.

    Raises:
        UserError: the file is no video, or none of its frames can be decoded.
    """

    def __init__(self, path: Path):
        self.path = path
        video = cv2.VideoCapture(str(path))
        if not video.read()[0]:
            raise UserError(f"{str(path)!r} is not a readable video")
        self.num_frames = max(0, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
        self.fps = video.get(cv2.CAP_PROP_FPS) or 25.0

    def __iter__(self) -> Iterator[np.ndarray]:
        video = cv2.VideoCapture(str(self.path))
        count = 0
        while True:
            decoded, frame = video.read()
            if not decoded:
                break
            count += 1
            yield frame
        if count < self.num_frames:
            logger.warning(f"{self.path}: only {count} of {self.num_frames} frames can be read")


def find_media(inputs: list[str]) -> list[ImageFile | VideoFile]:
    """The images and videos among files and folders; those of a folder (not of folders in it) are
    sorted by name.

    Raises:
        UserError: a path does not exist, a folder holds none, or a file is neither.
    """
    media = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = [file for file in sorted(path.iterdir()) if file.is_file() and _kind(file)]
            if not found:
                raise UserError(f"folder {name!r} holds no images and no videos")
            media += found
        elif path.is_file():
            media.append(path)
        else:
            raise UserError(f"input {name!r} does not exist")
    return [VideoFile(path) if _kind(path) == "video" else ImageFile(path) for path in media]


def _kind(path: Path) -> str | None:
    """ "image" or "video", if the file's name says that it is one."""
    kind = (mimetypes.guess_type(path.name)[0] or "").split("/")[0]
    return kind if kind in ("image", "video") else None


def _unreadable(path: Path, kind: str, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UserError(f"{str(path)!r} is not a readable {kind}: {reason}")


def write_picture(frame: np.ndarray, path: Path) -> None:
    """Write a frame as PNG, whole or not at all."""
    with written_whole(path) as unfinished:
        cv2.imwrite(str(unfinished), frame)


def write_video(frames: Iterable[np.ndarray], path: Path, fps: float) -> None:
    """Write frames of one size as MPEG-4 video, whole or not at all.

    The encoder wants even sides, and so cuts off the last row or column of odd ones. Where OpenCV
    has no encoder, the frames become `000000.png`, `000001.png`, … in a folder that has the
    video's name without its suffix.

    Args:
        frames: at least one.
        path: of the video, with the suffix .mp4.
        fps: frames per second.
    """
    frames = iter(frames)
    first = next(frames)
    height, width = first.shape[:2]
    with tempfile.TemporaryDirectory(prefix=".video-", dir=path.parent) as staging:
        unfinished = Path(staging) / path.name
        video = cv2.VideoWriter(
            str(unfinished), cv2.VideoWriter_fourcc(*"mp4v"), fps, (width, height)
        )
        if video.isOpened():
            for frame in chain([first], frames):
                video.write(frame)
            video.release()
            unfinished.replace(path)
            return
        folder = unfinished.with_suffix("")
        folder.mkdir()
        for index, frame in enumerate(chain([first], frames)):
            cv2.imwrite(str(folder / f"{index:06d}.png"), frame)
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        folder.replace(path.with_suffix(""))
