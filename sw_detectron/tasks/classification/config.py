"""The config keys of image classification."""

from detectron2.config import CfgNode


def add_classification_config(cfg: CfgNode) -> None:
    """Add the task's keys, with their defaults, to a Detectron2 config."""
    cfg.MODEL.CLASSIFIER = CfgNode()
    # Must equal the number of classes of the data sets.
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = 1000
    # The share of the target that is spread evenly over all classes.
    cfg.MODEL.CLASSIFIER.LABEL_SMOOTHING = 0.0
    # Keep images, weights and feature maps in the channels_last memory format.
    cfg.MODEL.CLASSIFIER.CHANNELS_LAST = False

    cfg.INPUT.CLASSIFIER = CfgNode()
    # Side of the square crops in pixels, in training and in evaluation.
    cfg.INPUT.CLASSIFIER.SIZE = 224
    # The shorter side that evaluation resizes images to, before the central crop.
    cfg.INPUT.CLASSIFIER.RESIZE_TEST = 256
    # The crop in training. random_resized: 8 to 100 % of the area at an aspect ratio of 3/4 to 4/3;
    # padded: a random square of the image, with PADDING black pixels added on each side. Flips are
    # INPUT.RANDOM_FLIP's: horizontal or none.
    cfg.INPUT.CLASSIFIER.TRAIN_CROP = "random_resized"
    cfg.INPUT.CLASSIFIER.PADDING = 4

    # A folder with train/CLASS/* and val/CLASS/*: the data sets folder_train and folder_val.
    cfg.DATASETS.FOLDER = ""
