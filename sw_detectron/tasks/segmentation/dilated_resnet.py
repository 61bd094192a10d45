"""ResNets whose feature maps keep an eighth of the image's resolution, for segmentation."""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, ResNet
from torch import nn

from ...modeling.backbone import build_sw_resnet_backbone

# Zhao et al., Pyramid Scene Parsing Network (CVPR 2017): of all 3x3 convolutions of the stage.
_DILATIONS = {"res4": 2, "res5": 4}


def dilate(resnet: ResNet) -> ResNet:
    """Take the strides out of res4 and res5, and dilate their convolutions instead, in place.

    The output stride becomes 8; names and shapes of all parameters stay. Stages that the network
    was built without are passed over.
    """
    for name in _DILATIONS.keys() & set(resnet.stage_names):
        dilation = _DILATIONS[name]
        for block in getattr(resnet, name):
            block.stride = 1
            for conv in (child for child in block.children() if isinstance(child, nn.Conv2d)):
                conv.stride = (1, 1)
                if conv.kernel_size == (3, 3):
                    conv.dilation = conv.padding = (dilation, dilation)
        resnet._out_feature_strides[name] = 8
    return resnet


@BACKBONE_REGISTRY.register()
def build_sw_dilated_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """The ResNet of `build_sw_resnet_backbone` with output stride 8.

    Its stem is Detectron2's BasicStem, one 7x7 convolution, as in He et al.'s ResNets; PSPNet's
    published code has three 3x3 convolutions there.
    """
    return dilate(build_sw_resnet_backbone(cfg, input_shape))
