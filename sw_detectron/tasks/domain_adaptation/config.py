"""The config keys of domain adaptation."""

from detectron2.config import CfgNode


def add_adaptation_config(cfg: CfgNode) -> None:
    """Add the task's keys, with their defaults, to a Detectron2 config."""
    # The data sets of the target domain, of which training sees the images alone. DATASETS.TRAIN
    # are the source.
    cfg.DATASETS.TARGET = ()
    # Height and width that images of the source, and of the target and tests, are resized to.
    # Empty: they keep their size.
    cfg.INPUT.SOURCE_SIZE = []
    cfg.INPUT.TARGET_SIZE = []

    # The factor of the adversarial loss; 0 trains on the source alone, without a discriminator.
    cfg.MODEL.DA = CfgNode()
    cfg.MODEL.DA.ADVERSARIAL_WEIGHT = 0.001
    # Channels of the discriminator's first convolution.
    cfg.MODEL.DA.DISCRIMINATOR_CHANNELS = 64
    # Whose statistics the norms' running values are: mixed (source and target in turn, as they pass
    # the network) or target.
    cfg.MODEL.DA.STATISTICS = "mixed"
    # Folder of another run, whose predictions the page shows beside this one's.
    cfg.MODEL.DA.COMPARE_WITH = ""
    # Of DeepLabV2Head: the dilation of each of its convolutions.
    cfg.MODEL.SEM_SEG_HEAD.DILATIONS = [6, 12]

    # The learning rate of the discriminator's Adam, which follows the schedule too.
    cfg.SOLVER.DISCRIMINATOR_LR = 1e-4
    cfg.SOLVER.DISCRIMINATOR_BETAS = [0.9, 0.99]
