"""Detectron2's mapper, without what it would read wrongly."""

from detectron2.data import DatasetMapper
from PIL import Image

from ...data.images import why_unreadable
from ...errors import UserError


class DetectionMapper(DatasetMapper):
    """The `DatasetMapper`; label maps that it would convert to other numbers are refused."""

    def __call__(self, record: dict) -> dict:
        """See `DatasetMapper`.

        Raises:
            UserError: the image cannot be read, or its label map is not of 8-bit grey.
        """
        if self.is_train and "sem_seg_file_name" in record:
            _check_labels(record["sem_seg_file_name"])
        return super().__call__(record)


def _check_labels(path: str) -> None:
    try:
        with Image.open(path) as image:
            mode = image.mode
    except Exception as error:
        raise UserError(f"labels {path!r} cannot be read: {why_unreadable(error)}") from None
    if mode != "L":
        raise UserError(
            f"labels {path!r} are of Pillow's mode {mode!r}, but this model takes 8-bit grey, mode "
            "'L': convert them, or use the SlidingWindowSegmentor, which reads others too"
        )
