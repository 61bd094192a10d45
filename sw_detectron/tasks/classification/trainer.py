"""The trainer of image classifiers."""

from collections.abc import Iterator

from detectron2.config import CfgNode
from detectron2.data import build_batch_data_loader
from detectron2.data.samplers import InferenceSampler
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch.utils.data import DataLoader

from ...checkpoint import Checkpointer
from ...data.sampler import ResumableTrainingSampler
from ...engine.hooks import BestCheckpointer, ImagesPerSecond
from ...engine.trainer import Trainer
from ...engine.values import check_batch
from .data import (
    MAX_CORRUPT_SHARE,
    CorruptImages,
    LabelledImages,
    collate,
    load_records,
    test_transform,
    train_transform,
)


class TrainBatches:
    """The endless batches of a training run, which keeps the account of unreadable images.

    Args:
        loader: of batches as `data.collate` makes them.
        sampler: where `loader` begins in the sequence of images.
        num_images: of the data set.
    """

    def __init__(self, loader: DataLoader, sampler: ResumableTrainingSampler, num_images: int):
        self.resumable_sampler = sampler
        self._loader = loader
        self._corrupt = CorruptImages(num_images)
        self._found: dict[str, str] = {}  # in this process, not yet known to the others

    def __iter__(self) -> Iterator[dict]:
        for number, batch in enumerate(self._loader):
            self._found |= batch.pop("corrupt")
            if number % 20 == 0:
                self._exchange()
            yield batch

    def report(self) -> None:
        """Log how many images were skipped; to be called by all processes together."""
        self._exchange()
        self._corrupt.report()

    def _exchange(self) -> None:
        # Among all processes, so that all of them stop when too many images cannot be read.
        for found in comm.all_gather(self._found):
            self._corrupt.add(found)
        self._found = {}


class ReportCorruptImages(HookBase):
    """Reports the unreadable training images when training is done."""

    def __init__(self, batches: TrainBatches):
        self._batches = batches

    def after_train(self) -> None:
        if self.trainer.iter + 1 >= self.trainer.max_iter:  # not after a failure of one process
            self._batches.report()


class ClassificationTrainer(Trainer):
    """The `Trainer` of an `ImageClassifier`: its data, images per second, and the best checkpoint.

    `model_best.pth` has the weights with the lowest top-1 error on the first data set of
    DATASETS.TEST so far.
    """

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> TrainBatches:
        num_classes = cfg.MODEL.CLASSIFIER.NUM_CLASSES
        records = load_records(cfg.DATASETS.TRAIN, num_classes)
        check_batch(cfg)
        # One more than may be unreadable: after that many the run stops.
        tries = int(MAX_CORRUPT_SHARE * len(records)) + 1
        seed = cfg.SEED if cfg.SEED >= 0 else None
        sampler = ResumableTrainingSampler(len(records), seed=seed)
        loader = build_batch_data_loader(
            LabelledImages(records, train_transform(cfg), cfg.INPUT.CLASSIFIER.SIZE, tries),
            sampler,
            cfg.SOLVER.IMS_PER_BATCH,
            num_workers=cfg.DATALOADER.NUM_WORKERS,
            collate_fn=collate,
            seed=None if seed is None else seed + comm.get_rank(),
            pin_memory=cfg.MODEL.DEVICE != "cpu",
        )
        return TrainBatches(loader, sampler, len(records))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> DataLoader:
        records = load_records((dataset_name,), cfg.MODEL.CLASSIFIER.NUM_CLASSES)
        return DataLoader(
            LabelledImages(records, test_transform(cfg), cfg.INPUT.CLASSIFIER.SIZE),
            batch_size=max(1, cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size()),
            sampler=InferenceSampler(len(records)),
            num_workers=cfg.DATALOADER.NUM_WORKERS,
            collate_fn=collate,
            pin_memory=cfg.MODEL.DEVICE != "cpu",
        )

    def named_hooks(self) -> dict[str, HookBase | None]:
        named = super().named_hooks()
        evaluation = named.pop("evaluation")
        ordered = {}
        for name, hook in named.items():
            if name == "checkpoint":
                # After the evaluation of the same iteration, to know the best error so far: a run
                # that resumes from it goes on as if it had not been interrupted.
                ordered |= {"evaluation": evaluation, "best_checkpoint": self._best_checkpoint()}
            ordered[name] = hook
            if name == "timer":
                ordered["images_per_second"] = ImagesPerSecond(self.cfg.SOLVER.IMS_PER_BATCH)
        return ordered | {"corrupt_images": ReportCorruptImages(self._trainer.data_loader)}

    def _best_checkpoint(self) -> BestCheckpointer | None:
        if not (comm.is_main_process() and self.cfg.DATASETS.TEST):
            return None
        metric = "classification/top1_error"
        if len(self.cfg.DATASETS.TEST) > 1:
            metric = f"{self.cfg.DATASETS.TEST[0]}/{metric}"
        weights = Checkpointer(self.model, self.cfg.OUTPUT_DIR, cfg=self.cfg)
        return BestCheckpointer(self.cfg.TEST.EVAL_PERIOD, weights, metric, mode="min")
