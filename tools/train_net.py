#!/usr/bin/env python
"""Train and evaluate a detector, with Switchable Whitening or without."""

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

  try it out on the generated data set, without GPU and without any download:
    %(prog)s --config shapes_mask_rcnn_R18_FPN_SW.yaml

COCO is looked for in ./datasets/coco; the environment variable DETECTRON2_DATASETS names another
place for ./datasets.
"""

if __name__ == "__main__":
    launch(train_or_evaluate, argument_parser(__doc__, EXAMPLES).parse_args())
