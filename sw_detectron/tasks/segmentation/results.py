"""A segmentor's outputs in COCO's format, and drawn."""

import numpy as np
import pycocotools.mask as mask_util
from detectron2.data import Metadata
from torch import Tensor

from ...engine.prediction import check_class
from .drawing import overlay_class_map


def segmentation_results(
    scores: Tensor, frame: np.ndarray, metadata: Metadata
) -> tuple[list[dict], np.ndarray]:
    """See `Task.results`: one result, without box and score, for each class in the picture.

    Args:
        scores: (K, H, W), of the classes.
    """
    labels = scores.argmax(dim=0).cpu().numpy()
    check_class(labels.max(), metadata.stuff_classes, metadata)
    results = []
    for label in np.unique(labels).tolist():
        rle = mask_util.encode(np.asfortranarray(labels == label, dtype=np.uint8))
        rle["counts"] = rle["counts"].decode()
        results.append({"category_id": label, "segmentation": rle})
    return results, overlay_class_map(frame[..., ::-1], labels, metadata)[..., ::-1]
