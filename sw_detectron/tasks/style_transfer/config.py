"""The config keys of style transfer."""

import logging
from collections.abc import Collection

from detectron2.config import CfgNode

from ...data.image_folders import register_images
from ...data.registration import datasets_root

logger = logging.getLogger(__name__)

CONTENT = "content_images"
"""The data set of DATASETS.CONTENT_FOLDER."""


def add_style_config(cfg: CfgNode) -> None:
    """Add the task's keys, with their defaults, to a Detectron2 config."""
    # A folder of content images: the data set content_images. Without another word of the command
    # line it is trained on, and the first four of its images are stylized for the run's page.
    cfg.DATASETS.CONTENT_FOLDER = ""
    # Height and width in pixels of what is cut out of content images.
    cfg.INPUT.CONTENT_SIZE = 256

    cfg.MODEL.STYLE = CfgNode()
    # The style's image. Empty: a picture that the package paints.
    cfg.MODEL.STYLE.IMAGE = ""
    # Its longer side, in pixels, for the loss network.
    cfg.MODEL.STYLE.IMAGE_SIZE = 256
    # Of the stylizing network: channels of the first convolution, residual blocks, and what it ends
    # with: tanh, times 150, or none.
    cfg.MODEL.STYLE.CHANNELS = 32
    cfg.MODEL.STYLE.NUM_BLOCKS = 5
    cfg.MODEL.STYLE.OUTPUT = "tanh"
    # The largest picture that is stylized after training, in pixels, of which a million want about
    # a gigabyte of memory.
    cfg.MODEL.STYLE.MAX_PIXELS = 4_000_000
    # The loss network's weights, torchvision's file of VGG-16; or random, for fixed random filters.
    cfg.MODEL.STYLE.LOSS_NETWORK = "vgg16-397923af.pth"
    # What is compared there: ReLUs after the convolutions of the five groups.
    cfg.MODEL.STYLE.CONTENT_LAYERS = ["relu3_3"]
    cfg.MODEL.STYLE.STYLE_LAYERS = ["relu1_2", "relu2_2", "relu3_3", "relu4_3"]
    # The factors of the three losses.
    cfg.MODEL.STYLE.CONTENT_WEIGHT = 1.0
    cfg.MODEL.STYLE.STYLE_WEIGHT = 5.0
    cfg.MODEL.STYLE.TV_WEIGHT = 1e-6


def register_coco_images() -> None:
    """Register `coco_images_train` and `coco_images_val`, COCO's of 2017 without its annotations,
    below DETECTRON2_DATASETS."""
    remedy = (
        "set the environment variable DETECTRON2_DATASETS to the folder that contains coco/, or "
        "DATASETS.CONTENT_FOLDER to a folder of images"
    )
    for split in ("train", "val"):
        folder = datasets_root() / f"coco/{split}2017"
        register_images(f"coco_images_{split}", str(folder), remedy)


def register_content(cfg: CfgNode) -> None:
    """Register the data set of DATASETS.CONTENT_FOLDER, if there is one."""
    folder = cfg.DATASETS.CONTENT_FOLDER
    if folder:
        register_images(CONTENT, folder, "set DATASETS.CONTENT_FOLDER to a folder of images")


def follow_content(cfg: CfgNode, given: Collection[str]) -> None:
    """DATASETS.CONTENT_FOLDER is trained and tested on, where the user has named nothing else."""
    if not cfg.DATASETS.CONTENT_FOLDER:
        return
    for key, name in (("TRAIN", CONTENT), ("TEST", f"{CONTENT}[:4]")):
        if f"DATASETS.{key}" not in given:
            cfg.DATASETS[key] = (name,)
        elif not any(CONTENT in known for known in cfg.DATASETS[key]):
            logger.warning(
                f"DATASETS.CONTENT_FOLDER is not in DATASETS.{key}, which is {cfg.DATASETS[key]}: "
                f"set it to \"('{name}',)\" for the folder"
            )
