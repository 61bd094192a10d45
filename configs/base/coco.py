"""COCO, 16 images a step: the data of common.yaml as calls."""

import detectron2.data.transforms as T
from detectron2.config import LazyCall as L
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    get_detection_dataset_dicts,
)
from detectron2.evaluation import COCOEvaluator

from sw_detectron.data.sampler import build_resumable_train_loader

dataloader = {
    "train": L(build_resumable_train_loader)(
        dataset=L(get_detection_dataset_dicts)(names="coco_2017_train"),
        mapper=L(DatasetMapper)(
            is_train=True,
            augmentations=[
                L(T.ResizeShortestEdge)(
                    short_edge_length=[800], max_size=1333, sample_style="choice"
                ),
                L(T.RandomFlip)(horizontal=True),
            ],
            image_format="RGB",
            use_instance_mask=True,
        ),
        total_batch_size=16,
        aspect_ratio_grouping=True,
        num_workers=4,
        seed="${train.seed}",
    ),
    "test": L(build_detection_test_loader)(
        dataset=L(get_detection_dataset_dicts)(names="coco_2017_val", filter_empty=False),
        mapper=L(DatasetMapper)(
            is_train=False,
            augmentations=[L(T.ResizeShortestEdge)(short_edge_length=800, max_size=1333)],
            image_format="${...train.mapper.image_format}",
        ),
        num_workers=4,
    ),
    # use_fast_impl=False: pycocotools, as Detectron2's own C++ evaluation needs its compiled part.
    "evaluator": L(COCOEvaluator)(
        dataset_name="${..test.dataset.names}",
        output_dir="${train.output_dir}/inference",
        use_fast_impl=False,
    ),
}
