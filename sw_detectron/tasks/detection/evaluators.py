"""Detectron2's evaluators of detectors and of panoptic models."""

from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
)

from ...task import evaluator_builders


def build_coco_evaluator(dataset_name: str, folder: str) -> COCOEvaluator:
    """The evaluator of a registered data set; it writes its predictions to `folder`."""
    metadata = MetadataCatalog.get(dataset_name)
    if metadata.get("sliced_from"):
        # Detectron2 writes the annotations of a slice to the output folder, and remembers them:
        # the folder of another run in this process may be gone.
        vars(metadata).pop("json_file", None)
    # use_fast_impl=False: pycocotools, as Detectron2's own C++ evaluation needs its compiled part.
    return COCOEvaluator(dataset_name, output_dir=folder, use_fast_impl=False)


def build_panoptic_evaluator(dataset_name: str, folder: str) -> DatasetEvaluators:
    """Of instances, of label maps, and of both together."""
    semantic = evaluator_builders()["sem_seg"](dataset_name, folder)
    instances = build_coco_evaluator(dataset_name, folder)
    return DatasetEvaluators([semantic, instances, COCOPanopticEvaluator(dataset_name, folder)])


EVALUATORS = {
    "coco": build_coco_evaluator,
    "coco_panoptic_seg": build_panoptic_evaluator,
    "cityscapes_instance": lambda dataset_name, folder: CityscapesInstanceEvaluator(dataset_name),
    "pascal_voc": lambda dataset_name, folder: PascalVOCDetectionEvaluator(dataset_name),
    "lvis": lambda dataset_name, folder: LVISEvaluator(dataset_name, output_dir=folder),
}
