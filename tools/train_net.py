#!/usr/bin/env python
"""Train and evaluate a detector or a classifier, with Switchable Whitening or without."""

from sw_detectron.engine import argument_parser, launch, train_or_evaluate

EXAMPLES = """
examples:
  train the paper's Mask R-CNN on COCO with 8 GPUs, from converted ImageNet weights:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --num-gpus 8 MODEL.WEIGHTS R-50-SW.pkl

  the same, from where it was interrupted:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --num-gpus 8 --resume

  evaluate a checkpoint:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --eval-only MODEL.WEIGHTS model_final.pth

  SW with all five statistics, in groups of 32 channels, on 14 layers:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml \\
        MODEL.SW.NORM SWb MODEL.SW.NUM_PERGROUP 32 MODEL.SW.PLACEMENT segmentation

  pretrain its backbone on ImageNet, and start the detector from the result:
    %(prog)s --config classification_R50_SW_100e.yaml --num-gpus 8
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.yaml --num-gpus 8 \\
        MODEL.WEIGHTS output/classification_R50_SW_100e/model_final.pth

  train a classifier on a folder with train/CLASS/* and val/CLASS/*:
    %(prog)s --config classification_R50_SW_100e.yaml DATASETS.FOLDER pets \\
        DATASETS.TRAIN "('folder_train',)" DATASETS.TEST "('folder_val',)" \\
        MODEL.CLASSIFIER.NUM_CLASSES 37

  try it out on the generated data sets, without GPU and without any download:
    %(prog)s --config shapes_mask_rcnn_R18_FPN_SW.yaml
    %(prog)s --config classification_shapes_R18_SW.yaml

COCO is looked for in ./datasets/coco, ImageNet in ./datasets/imagenet; the environment variable
DETECTRON2_DATASETS names another place for ./datasets.
"""

if __name__ == "__main__":
    launch(train_or_evaluate, argument_parser(__doc__, EXAMPLES).parse_args())
