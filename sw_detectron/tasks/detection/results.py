"""A detector's outputs in COCO's format, and drawn."""

import numpy as np
from detectron2.data import Metadata
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances

from ...engine.prediction import check_class
from .drawing import overlay_results


def detection_results(
    instances: Instances, frame: np.ndarray, metadata: Metadata, confidence: float
) -> tuple[list[dict], np.ndarray]:
    """See `Task.results`: a result for each object."""
    instances = instances.to("cpu")
    results = instances_to_coco_json(instances[instances.scores >= confidence], None)
    id_map = metadata.get("thing_dataset_id_to_contiguous_id")
    dataset_ids = {index: category for category, index in id_map.items()} if id_map else None
    for result in results:
        del result["image_id"]
        check_class(result["category_id"], metadata.thing_classes, metadata)
        if dataset_ids:
            result["category_id"] = dataset_ids[result["category_id"]]
    return results, overlay_results(frame[..., ::-1], results, metadata)[..., ::-1]
