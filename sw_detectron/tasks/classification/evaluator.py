"""Top-1 and top-5 error of a classifier."""

from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from torch import Tensor

from .data import CorruptImages
from .model import IGNORED_LABEL


class ClassificationEvaluator(DatasetEvaluator):
    """Counts, over all processes, the images whose class is not among the highest scores.

    With a sampler that gives each image to one process, such as Detectron2's `InferenceSampler`,
    the errors are exact for any number of processes. Unreadable images are left out, named and
    counted.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self._images = 0
        self._wrong = {}  # by k of top-k
        self._corrupt = {}

    def process(self, inputs: dict, outputs: Tensor) -> None:
        """Count a batch.

        Args:
            inputs: `label` (N,), int64, and `corrupt`, see `data.collate`.
            outputs: logits (N, K).
        """
        self._corrupt |= inputs["corrupt"]
        labels = inputs["label"].to(outputs.device)
        there = labels != IGNORED_LABEL
        outputs, labels = outputs[there], labels[there]
        self._images += len(labels)
        for k in (1, 5):
            if k < outputs.shape[1]:
                hit = (outputs.topk(k).indices == labels[:, None]).any(1)
                self._wrong[k] = self._wrong.get(k, 0) + int((~hit).sum())

    def evaluate(self) -> dict[str, dict[str, float]] | None:
        """`{"classification": {"top1_error": %, "top5_error": %}}`, on the main process.

        The top-5 error is left out for five classes and fewer.

        Raises:
            UserError: too many images cannot be read.
        """
        parts = comm.all_gather((self._images, self._wrong, self._corrupt))
        images = sum(part[0] for part in parts)
        corrupt = {name: reason for part in parts for name, reason in part[2].items()}
        unreadable = CorruptImages(images + len(corrupt))
        unreadable.add(corrupt)
        unreadable.report()
        if not comm.is_main_process():
            return None
        wrong = {k: sum(part[1].get(k, 0) for part in parts) for k in parts[0][1]}
        return {"classification": {f"top{k}_error": 100 * n / images for k, n in wrong.items()}}
