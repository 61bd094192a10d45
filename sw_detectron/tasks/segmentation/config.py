"""The config keys of semantic segmentation; names as in Detectron2's DeepLab where it has them."""

from detectron2.config import CfgNode


def add_segmentation_config(cfg: CfgNode) -> None:
    """Add the task's keys, with their defaults, to a Detectron2 config."""
    # Of PSPHead: the grids of the pyramid pooling, [1, 2, 3, 6] in PSPNet; empty for none.
    cfg.MODEL.SEM_SEG_HEAD.POOL_BINS = []
    cfg.MODEL.SEM_SEG_HEAD.DROPOUT = 0.1
    # With two IN_FEATURES, the factor of the loss on the first.
    cfg.MODEL.SEM_SEG_HEAD.AUX_LOSS_WEIGHT = 0.4
    # A factor for each class's pixels in the loss; empty: all are 1.
    cfg.MODEL.SEM_SEG_HEAD.CLASS_WEIGHTS = []

    # Range of the factors by which training images are resized, before they are cut to or padded
    # to INPUT.CROP.SIZE (height, width), which is the window of tests too.
    cfg.INPUT.RANDOM_SCALE = [0.5, 2.0]
    # Largest angle in degrees by which every other training image is rotated.
    cfg.INPUT.RANDOM_ROTATION = 0.0
    # Standard deviation in pixels of the Gaussian by which every other training image is blurred.
    cfg.INPUT.RANDOM_BLUR = 0.0

    # Data sets of your own by name, each with IMAGES and LABELS (two folders of files with the same
    # names, labels as PNG), CLASSES (names, or their number), IGNORE_LABEL (default 255) and
    # LABEL_IDS (what the files have for each class; default: its number).
    cfg.DATASETS.SEM_SEG_FOLDERS = CfgNode(new_allowed=True)

    # Scales of TEST.AUG for segmentation, in place of its MIN_SIZES; with FLIP, of the mirror
    # images too.
    cfg.TEST.AUG.SCALES = [0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
