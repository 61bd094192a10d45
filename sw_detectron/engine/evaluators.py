"""Which evaluator measures a data set, by the type its metadata declares."""

from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator

from ..errors import UserError
from ..task import evaluator_builders


def build_evaluator(dataset_name: str, folder: str) -> DatasetEvaluator:
    """The evaluator of a registered data set.

    Args:
        folder: where predictions and results are written.

    Raises:
        UserError: the data set declares no type, or one that has no evaluator.
    """
    builders = evaluator_builders()
    kind = getattr(MetadataCatalog.get(dataset_name), "evaluator_type", None)
    if kind not in builders:
        raise UserError(
            f"data set {dataset_name!r} declares evaluator_type {kind!r}; known: "
            f"{', '.join(builders)}"
        )
    return builders[kind](dataset_name, folder)
