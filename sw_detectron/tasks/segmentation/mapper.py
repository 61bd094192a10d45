"""From a record of an image and its label map to what a segmentor takes, with augmentation.

Zhao et al. (Pyramid Scene Parsing Network, CVPR 2017) train with random scales, rotations, blur,
mirror images and crops. Labels are never interpolated, and what an augmentation adds around an
image is of the mean colour and has the label to ignore.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import check_image_size
from fvcore.transforms.transform import NoOpTransform, Transform
from PIL import Image, ImageFilter

from ...data.images import read_image
from .data import check_label_size, read_labels

NO_LABEL = 255
"""What labels are to ignore, in each byte of those that are augmented."""


class RandomScale(T.Augmentation):
    """Resizes by a factor from a range, all of its values being equally likely."""

    def __init__(self, low: float, high: float):
        super().__init__()
        self._init(locals())

    def get_transform(self, image: np.ndarray) -> Transform:
        height, width = image.shape[:2]
        factor = self._rand_range(self.low, self.high)
        return T.ResizeTransform(height, width, round(height * factor), round(width * factor))


class RandomRotation(T.Augmentation):
    """Rotates, every other time, by an angle of up to `degrees` either way; the size stays.

    Args:
        degrees: at most 90.
        color: three values, 0 to 255, of what comes in at the corners.
        ignore_label: its label.
    """

    def __init__(self, degrees: float, color: Sequence[int], ignore_label: int):
        super().__init__()
        self._init(locals())

    def get_transform(self, image: np.ndarray) -> Transform:
        angle = self._rand_range(-self.degrees, self.degrees)
        if self._rand_range() < 0.5:
            return NoOpTransform()
        return RotateTransform(*image.shape[:2], angle, self.color, self.ignore_label)


class RotateTransform(Transform):
    """Rotates by `angle` degrees counterclockwise about the centre; see `RandomRotation`."""

    def __init__(
        self, height: int, width: int, angle: float, color: Sequence[int], ignore_label: int
    ):
        super().__init__()
        self._set_attributes(locals())

    def apply_image(self, image: np.ndarray) -> np.ndarray:
        picture = Image.fromarray(image)
        color = tuple(self.color)
        return np.asarray(picture.rotate(self.angle, Image.Resampling.BILINEAR, fillcolor=color))

    def apply_segmentation(self, segmentation: np.ndarray) -> np.ndarray:
        labels = Image.fromarray(segmentation)
        return np.asarray(labels.rotate(self.angle, fillcolor=self.ignore_label))

    def apply_coords(self, coords: np.ndarray) -> np.ndarray:
        radians = np.deg2rad(self.angle)
        cosine, sine = np.cos(radians), np.sin(radians)
        centre = np.array([self.width, self.height]) / 2
        return (coords - centre) @ np.array([[cosine, -sine], [sine, cosine]]) + centre


class PadToSize(T.Augmentation):
    """Pads on all sides to a minimal height and width; see `RandomRotation`."""

    def __init__(self, size: Sequence[int], color: Sequence[int], ignore_label: int):
        super().__init__()
        self._init(locals())

    def get_transform(self, image: np.ndarray) -> Transform:
        missing = [max(0, wanted - side) for wanted, side in zip(self.size, image.shape)]
        top, left = (amount // 2 for amount in missing)
        bottom, right = missing[0] - top, missing[1] - left
        return PadTransform(top, bottom, left, right, self.color, self.ignore_label)


class PadTransform(Transform):
    """Adds rows and columns around an image; see `PadToSize`."""

    def __init__(
        self,
        top: int,
        bottom: int,
        left: int,
        right: int,
        color: Sequence[int],
        ignore_label: int,
    ):
        super().__init__()
        self._set_attributes(locals())

    def apply_image(self, image: np.ndarray) -> np.ndarray:
        return self._pad(image, np.array(self.color, dtype=image.dtype))

    def apply_segmentation(self, segmentation: np.ndarray) -> np.ndarray:
        return self._pad(segmentation, segmentation.dtype.type(self.ignore_label))

    def apply_coords(self, coords: np.ndarray) -> np.ndarray:
        return coords + (self.left, self.top)

    def _pad(self, array: np.ndarray, value: np.ndarray) -> np.ndarray:
        height, width = array.shape[:2]
        shape = (height + self.top + self.bottom, width + self.left + self.right)
        padded = np.broadcast_to(value, shape + array.shape[2:]).copy()
        padded[self.top : self.top + height, self.left : self.left + width] = array
        return padded


def build_augmentations(cfg: CfgNode, is_train: bool) -> list[T.Augmentation]:
    """The augmentations of the keys of INPUT; in tests, only the resizing to MIN_SIZE_TEST.

    Where they add to an image, they label what they add NO_LABEL.
    """
    inputs = cfg.INPUT
    if not is_train:
        return [T.ResizeShortestEdge(inputs.MIN_SIZE_TEST, inputs.MAX_SIZE_TEST)]
    color = [round(value) for value in cfg.MODEL.PIXEL_MEAN]
    border = {"color": color, "ignore_label": NO_LABEL}
    augmentations = [RandomScale(*inputs.RANDOM_SCALE)]
    if inputs.RANDOM_ROTATION:
        augmentations.append(RandomRotation(inputs.RANDOM_ROTATION, **border))
    if inputs.RANDOM_BLUR:
        blur = ImageFilter.GaussianBlur(inputs.RANDOM_BLUR)
        augmentations.append(T.RandomApply(T.PILColorTransform(lambda x: x.filter(blur)), 0.5))
    if inputs.RANDOM_FLIP != "none":
        vertical = inputs.RANDOM_FLIP == "vertical"
        augmentations.append(T.RandomFlip(horizontal=not vertical, vertical=vertical))
    augmentations.append(PadToSize(inputs.CROP.SIZE, **border))
    augmentations.append(T.RandomCrop("absolute", tuple(inputs.CROP.SIZE)))
    return augmentations


class SegmentationMapper:
    """Reads an image, in training with its labels, and augments them.

    Args:
        cfg: INPUT, and of MODEL the pixels' mean and the classes.
        is_train: whether labels are wanted.
        augmentations: None for those of `build_augmentations`.
    """

    def __init__(
        self,
        cfg: CfgNode,
        is_train: bool,
        augmentations: Sequence[T.Augmentation] | None = None,
    ):
        if augmentations is None:
            augmentations = build_augmentations(cfg, is_train)
        self._is_train = is_train
        self._format = cfg.INPUT.FORMAT
        self._num_classes = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
        self._ignore_label = cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE
        self._augmentations = T.AugmentationList(augmentations)

    def __call__(self, record: dict) -> dict:
        """Adds to a record "image", uint8 (3, H, W), and in training "sem_seg", int64 (H, W).

        Raises:
            UserError: the labels cannot be read, or do not fit the image or the classes.
        """
        record = copy.deepcopy(record)
        image = read_image(record["file_name"], format=self._format)
        check_image_size(record, image)
        if "sem_seg_file_name" in record:  # not of images alone
            check_label_size(record, image)
        if self._is_train:
            labels = read_labels(
                record["sem_seg_file_name"],
                self._num_classes,
                self._ignore_label,
                np.int64,
                record.get("label_ids", ()),
            )
        inputs = T.AugInput(image)
        transforms = self._augmentations(inputs)
        pixels = np.ascontiguousarray(inputs.image.transpose(2, 0, 1))
        record["image"] = torch.from_numpy(pixels)
        if self._is_train:
            record["sem_seg"] = torch.from_numpy(self._transform_labels(transforms, labels))
        return record

    def _transform_labels(self, transforms: T.TransformList, labels: np.ndarray) -> np.ndarray:
        """Apply what was drawn for the image to its labels, (H, W), int64.

        Detectron2's and Pillow's nearest neighbours lie differently for numbers of more than a
        byte. So each byte of the labels is transformed as an image of its own.
        """
        dtype = np.min_scalar_type(self._num_classes)  # its largest value is no class
        none = np.iinfo(dtype).max
        coded = np.where(labels == self._ignore_label, none, labels).astype(dtype)
        planes = np.moveaxis(coded[..., None].view(np.uint8), -1, 0)
        planes = [transforms.apply_segmentation(plane.copy()) for plane in planes]
        coded = np.stack(planes, axis=-1).view(dtype)[..., 0]
        return np.where(coded == none, self._ignore_label, coded.astype(np.int64))
