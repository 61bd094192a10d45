"""mask_rcnn_R50_FPN_SW_2x.yaml as a Python config: the same network, data and schedule."""

from detectron2.config import LazyCall as L

from sw_detectron.modeling import with_norms

from ..base.coco import dataloader  # noqa: F401  read by its name, as are the others
from ..base.mask_rcnn_FPN import model
from ..base.train import lr_multiplier_2x as lr_multiplier
from ..base.train import optimizer, train  # noqa: F401

# SyncBN everywhere, every layer trained, and four convolutions in the box head.
model.backbone.bottom_up.freeze_at = 0
model.backbone.bottom_up.stem.norm = "SyncBN"
model.backbone.bottom_up.stages.norm = "SyncBN"
model.backbone.norm = "SyncBN"
model.roi_heads.box_head.update(conv_dims=[256] * 4, fc_dims=[1024], conv_norm="SyncBN")
model.roi_heads.mask_head.conv_norm = "SyncBN"

# SW on seven layers of the backbone. Options of the layer, such as num_pergroup, go here too.
model.backbone.bottom_up = L(with_norms)(
    resnet=model.backbone.bottom_up, placement="imagenet", norm="SW"
)

train.max_iter = lr_multiplier.scheduler.num_updates
