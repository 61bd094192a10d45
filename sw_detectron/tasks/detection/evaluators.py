"""Detectron2's evaluators of detectors and of panoptic models."""

import logging

from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
)

from ...data.annotations import mended_coco_files
from ...task import evaluator_builders

logger = logging.getLogger(__name__)


class CocoEvaluator(COCOEvaluator):
    """Detectron2's, by pycocotools, with the ground truth that the data set's check leaves.

    Detections of classes that the data set lacks are left out, and so are masks of objects that
    have none in the ground truth.

    Args:
        dataset_name: as registered. If its metadata has no `json_file`, its records are converted
            to one in `folder`.
        folder: for the predictions.
    """

    def __init__(self, dataset_name: str, folder: str):
        metadata = MetadataCatalog.get(dataset_name)
        converted = not metadata.get("json_file")
        with mended_coco_files(dataset_name):
            # use_fast_impl=False: pycocotools, as Detectron2's own C++ evaluation needs its
            # compiled part. allow_cached_coco=False: the records may be others than last time.
            super().__init__(
                dataset_name, output_dir=folder, use_fast_impl=False, allow_cached_coco=False
            )
        if converted:
            # Detectron2 remembers the file, and that of another run in this process may be gone.
            vars(metadata).pop("json_file")
        self._do_evaluation = bool(self._coco_api.anns)
        if not self._do_evaluation:
            logger.warning(f"Data set {dataset_name!r} has no annotations: nothing is measured")

    def count_up_to(self, detections: int) -> None:
        """Measure the best so many detections of an image, where COCO's 100 are fewer."""
        if detections > 100:
            self._max_dets_per_image = [1, 10, detections]

    def _eval_predictions(self, predictions: list[dict], img_ids: list | None = None) -> None:
        number, left_out = len(self._coco_api.cats), 0
        for prediction in predictions:
            kept = [r for r in prediction["instances"] if r["category_id"] < number]
            left_out += len(prediction["instances"]) - len(kept)
            prediction["instances"] = kept
        if left_out:
            logger.warning(
                f"Data set {self._metadata.name!r} has {number} classes: {left_out} detections of "
                "others are not counted"
            )
        super()._eval_predictions(predictions, img_ids)

    def _tasks_from_predictions(self, predictions: list[dict]) -> list[str]:
        tasks = super()._tasks_from_predictions(predictions)
        annotations = self._coco_api.dataset.get("annotations", [])
        masked = [a for a in annotations if "segmentation" in a]
        if "segm" not in tasks or len(masked) == len(annotations):
            return tasks
        if not masked:
            logger.warning(f"Data set {self._metadata.name!r} has no masks: boxes are measured")
            return [task for task in tasks if task != "segm"]
        logger.warning(
            f"Data set {self._metadata.name!r}: {len(annotations) - len(masked)} objects without "
            "a mask are not counted"
        )
        self._coco_api.dataset["annotations"] = masked
        self._coco_api.createIndex()
        return tasks


def build_panoptic_evaluator(dataset_name: str, folder: str) -> DatasetEvaluators:
    """Of instances, of label maps, and of both together."""
    semantic = evaluator_builders()["sem_seg"](dataset_name, folder)
    instances = CocoEvaluator(dataset_name, folder)
    return DatasetEvaluators([semantic, instances, COCOPanopticEvaluator(dataset_name, folder)])


EVALUATORS = {
    "coco": CocoEvaluator,
    "coco_panoptic_seg": build_panoptic_evaluator,
    "cityscapes_instance": lambda dataset_name, folder: CityscapesInstanceEvaluator(dataset_name),
    "pascal_voc": lambda dataset_name, folder: PascalVOCDetectionEvaluator(dataset_name),
    "lvis": lambda dataset_name, folder: LVISEvaluator(dataset_name, output_dir=folder),
}
