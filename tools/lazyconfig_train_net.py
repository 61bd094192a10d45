#!/usr/bin/env python
"""Train and evaluate by a Python config (LazyConfig), with Switchable Whitening or without."""

from sw_detectron.engine import argument_parser, launch, train_or_evaluate_lazy

EXAMPLES = """
examples:
  train the paper's Mask R-CNN on COCO with 8 GPUs, from converted ImageNet weights:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.py --num-gpus 8 train.init_checkpoint=R-50-SW.pkl

  the same, from where it was interrupted:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.py --num-gpus 8 --resume

  evaluate a checkpoint:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.py --eval-only train.init_checkpoint=model_final.pth

  SW with all five statistics, in groups of 32 channels, on 14 layers:
    %(prog)s --config mask_rcnn_R50_FPN_SW_2x.py model.backbone.bottom_up.norm=SWb \\
        +model.backbone.bottom_up.num_pergroup=32 model.backbone.bottom_up.placement=segmentation

key=value changes a key of the config, +key=value adds one. COCO is looked for in ./datasets/coco;
the environment variable DETECTRON2_DATASETS names another place for ./datasets.
"""

if __name__ == "__main__":
    launch(train_or_evaluate_lazy, argument_parser(__doc__, EXAMPLES).parse_args())
