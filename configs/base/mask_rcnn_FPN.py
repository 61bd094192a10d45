"""The model of mask_rcnn_FPN.yaml with norm_FrozenBN.yaml, as nested calls."""

from detectron2.config import LazyCall as L
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone import FPN, BasicStem, ResNet
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN, StandardRPNHead
from detectron2.modeling.roi_heads import (
    FastRCNNConvFCHead,
    FastRCNNOutputLayers,
    MaskRCNNConvUpsampleHead,
    StandardROIHeads,
)

_roi_levels = ["p2", "p3", "p4", "p5"]


def _roi_pooler(size):
    return L(ROIPooler)(
        output_size=size,
        scales=[1 / 4, 1 / 8, 1 / 16, 1 / 32],  # of the image, for each of p2 … p5
        sampling_ratio=0,
        pooler_type="ROIAlignV2",
    )


model = L(GeneralizedRCNN)(
    backbone=L(FPN)(
        bottom_up=L(ResNet)(
            stem=L(BasicStem)(in_channels=3, out_channels=64, norm="FrozenBN"),
            stages=L(ResNet.make_default_stages)(
                depth=50,
                stride_in_1x1=False,  # torchvision's ResNets stride in the 3x3 convolution
                norm="FrozenBN",
            ),
            out_features=["res2", "res3", "res4", "res5"],
            freeze_at=2,
        ),
        in_features=["res2", "res3", "res4", "res5"],
        out_channels=256,
        norm="",
        top_block=L(LastLevelMaxPool)(),
    ),
    proposal_generator=L(RPN)(
        in_features=["p2", "p3", "p4", "p5", "p6"],
        head=L(StandardRPNHead)(in_channels=256, num_anchors=3),
        anchor_generator=L(DefaultAnchorGenerator)(
            sizes=[[32], [64], [128], [256], [512]],  # one size for each of p2 … p6
            aspect_ratios=[0.5, 1.0, 2.0],
            strides=[4, 8, 16, 32, 64],
            offset=0.0,
        ),
        anchor_matcher=L(Matcher)(
            thresholds=[0.3, 0.7], labels=[0, -1, 1], allow_low_quality_matches=True
        ),
        box2box_transform=L(Box2BoxTransform)(weights=[1.0, 1.0, 1.0, 1.0]),
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_topk=(2000, 1000),  # in training and in testing; per level
        post_nms_topk=(1000, 1000),
        nms_thresh=0.7,
    ),
    roi_heads=L(StandardROIHeads)(
        num_classes=80,
        batch_size_per_image=512,
        positive_fraction=0.25,
        proposal_matcher=L(Matcher)(
            thresholds=[0.5], labels=[0, 1], allow_low_quality_matches=False
        ),
        box_in_features=_roi_levels,
        box_pooler=_roi_pooler(7),
        box_head=L(FastRCNNConvFCHead)(
            input_shape=ShapeSpec(channels=256, height=7, width=7),
            conv_dims=[],
            fc_dims=[1024, 1024],
            conv_norm="",
        ),
        box_predictor=L(FastRCNNOutputLayers)(
            input_shape=ShapeSpec(channels=1024),
            box2box_transform=L(Box2BoxTransform)(weights=[10.0, 10.0, 5.0, 5.0]),
            num_classes="${..num_classes}",
            test_score_thresh=0.05,
        ),
        mask_in_features=_roi_levels,
        mask_pooler=_roi_pooler(14),
        mask_head=L(MaskRCNNConvUpsampleHead)(
            input_shape=ShapeSpec(channels=256, height=14, width=14),
            num_classes="${..num_classes}",
            conv_dims=[256, 256, 256, 256, 256],  # the last: of the deconvolution, without norm
            conv_norm="",
        ),
    ),
    pixel_mean=[123.675, 116.280, 103.530],  # RGB, ImageNet
    pixel_std=[58.395, 57.120, 57.375],
    input_format="RGB",
)
