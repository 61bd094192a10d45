"""Small detectors that have not been trained, but are as if they had, and images for them."""

import torch
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import nn

from sw_detectron import SwitchWhiten2d

SHAPES = "shapes_mask_rcnn_R18_FPN_SW.yaml"
SMALL = """
    MODEL.DEVICE cpu MODEL.WEIGHTS "" MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64
    MODEL.FPN.OUT_CHANNELS 32 MODEL.RPN.CONV_DIMS [-1,-1] MODEL.RPN.POST_NMS_TOPK_TEST 20
    MODEL.ROI_BOX_HEAD.FC_DIM 32 MODEL.ROI_MASK_HEAD.CONV_DIM 16 MODEL.ROI_MASK_HEAD.NUM_CONV 1
    MODEL.ROI_HEADS.SCORE_THRESH_TEST 0.0 MODEL.RETINANET.SCORE_THRESH_TEST 0.0
""".split()
SMALL[SMALL.index('""')] = ""


def trained(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, SwitchWhiten2d)):
                module.bias.normal_(0, 0.3, generator=generator)
                module.running_mean.normal_(0, 0.3, generator=generator)
            if isinstance(module, SwitchWhiten2d):
                module.sw_mean_weight.normal_(generator=generator)
            if isinstance(module, RetinaNetHead):
                module.cls_score.weight.normal_(0, 1, generator=generator)
    return model


def images(*sizes):
    """Inputs of a detector; the first ones of a longer list are the same."""
    generator = torch.Generator().manual_seed(1)
    return [{"image": 255 * torch.rand(3, h, w, generator=generator)} for h, w in sizes]
