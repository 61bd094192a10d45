"""The config keys that all tasks share, and where a config's bare name is looked up."""

import difflib
import os
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path

import yaml
from detectron2.config import CfgNode
from detectron2.utils.file_io import PathManager
from fvcore.common.config import BASE_KEY

from .errors import UserError
from .task import all_tasks


def add_sw_config(cfg: CfgNode) -> None:
    """Add the package's keys, with their defaults, to a Detectron2 config."""
    # What is trained: detection, classification, segmentation, domain_adaptation, style_transfer.
    # Empty: what META_ARCHITECTURE says.
    cfg.TASK = ""
    # Data sets of images alone, by name: each a folder.
    cfg.DATASETS.IMAGE_FOLDERS = CfgNode(new_allowed=True)
    cfg.MODEL.SW = CfgNode()
    # The norm of the placed layers: SW = SWa {bw, iw}, SWb {bw, iw, bn, in, ln}, SN {bn, in, ln},
    # BW, IW, or any other registered or built-in norm, for ablations. All other norms of the
    # backbone are MODEL.RESNETS.NORM.
    cfg.MODEL.SW.NORM = "SW"
    # The placed layers by the paper's rules: imagenet, segmentation, cifar, released, vgg, all,
    # none.
    cfg.MODEL.SW.PLACEMENT = "imagenet"
    # The placed layers by number; overrides PLACEMENT unless it is empty.
    cfg.MODEL.SW.LAYERS = []
    # The set of statistics, out of bw, iw, bn, in, ln. Empty: what NORM's name says.
    cfg.MODEL.SW.STATISTICS = []
    # G, the channels that are whitened together; it divides the channels of every placed layer.
    cfg.MODEL.SW.NUM_PERGROUP = 16
    # How Σ^(-1/2) is taken: newton (iterative) or eigh (exact).
    cfg.MODEL.SW.WHITENING = "newton"
    # T of Newton's iteration.
    cfg.MODEL.SW.NUM_ITERATIONS = 5
    # Use the mean's importance weights for the covariance too.
    cfg.MODEL.SW.TIE_WEIGHT = False
    # ε, added to the diagonal of the mixed covariance.
    cfg.MODEL.SW.EPS = 1e-5
    # The share of the current batch in the running statistics.
    cfg.MODEL.SW.MOMENTUM = 0.1
    # Take the batch's statistics over all processes.
    cfg.MODEL.SW.SYNC = True
    # The padding of images to a common size: counted as pixels of the image, ignored by SW's
    # statistics, or zeroed too for all convolutions.
    cfg.MODEL.SW.PADDING = "counted"
    # Of build_sw_vgg_backbone: channels of the five groups, those of fc6 and fc7, and the features
    # that it gives, out of group1, …, group5, fc7.
    cfg.MODEL.VGG = CfgNode()
    cfg.MODEL.VGG.CHANNELS = [64, 128, 256, 512, 512]
    cfg.MODEL.VGG.FC_CHANNELS = 1024
    cfg.MODEL.VGG.OUT_FEATURES = ["fc7"]
    # Weight decay of the importance weights. None: WEIGHT_DECAY, as the authors trained.
    cfg.SOLVER.WEIGHT_DECAY_IMPORTANCE = None
    # Multiplies the learning rate of the importance weights.
    cfg.SOLVER.IMPORTANCE_LR_FACTOR = 1.0
    # The first iteration that leaves the importance weights as they are; like SOLVER.STEPS, it
    # scales with REFERENCE_WORLD_SIZE. 0: they always learn.
    cfg.SOLVER.IMPORTANCE_STOP_ITER = 0
    # Of LR_SCHEDULER_NAME "WarmupPolyLR": its power, and the iteration at which the rate would be
    # 0, which 0 says to be MAX_ITER.
    cfg.SOLVER.POLY_LR_POWER = 0.9
    cfg.SOLVER.POLY_LR_MAX_ITER = 0
    # Multiplies the learning rate of all that lies outside of the backbone.
    cfg.SOLVER.HEAD_LR_FACTOR = 1.0
    _add_epoch_config(cfg)
    for task in all_tasks():
        task.add_config(cfg)


def _add_epoch_config(cfg: CfgNode) -> None:
    # Schedules in epochs: once the size of the training data is known, each of these that is not
    # zero or empty gives the key in iterations that is named beside it.
    cfg.SOLVER.EPOCHS = 0  # MAX_ITER
    cfg.SOLVER.STEP_EPOCHS = []  # STEPS
    cfg.SOLVER.WARMUP_EPOCHS = 0  # WARMUP_ITERS
    cfg.SOLVER.IMPORTANCE_STOP_EPOCH = 0  # IMPORTANCE_STOP_ITER
    cfg.SOLVER.CHECKPOINT_EPOCHS = 0  # CHECKPOINT_PERIOD
    cfg.TEST.EVAL_EPOCHS = 0  # EVAL_PERIOD


def config_folder() -> Path:
    """The folder of the configs that come with the package, in a folder for each kind of data.

    Installed, they lie inside the package; in a checkout, beside it.
    """
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str) -> Path:
    """The absolute path of a config given as a path, or as the bare name of one that comes with the
    package.

    Raises:
        UserError: there is no such file; the message has the most similar names.
    """
    for path in (Path(name), config_folder() / name):
        if path.is_file():
            return Path(os.path.abspath(path))
    configs = {p.name: p for p in _packaged_files() if p.parent.name != "base"}
    if name in configs:
        return configs[name]
    raise UserError(
        f"config {name!r} is neither a file nor one of the package's; {_hint(name, configs)}"
    )


def default_output_dir(config_file: str | Path) -> str:
    """The OUTPUT_DIR, or train.output_dir, of a config that sets none, by its name.

    Python configs get another one than the YAML configs of the same name.
    """
    path = Path(config_file)
    return f"output/{path.stem}" + ("_lazy" if path.suffix == ".py" else "")


# The file that is being read, for its bases; None outside of `load_yaml_with_base`.
_derived: ContextVar[str | None] = ContextVar("_derived", default=None)


def load_yaml_with_base(
    cls: type[CfgNode], filename: str, allow_unsafe: bool = False
) -> dict[str, object]:
    """fvcore's method of `CfgNode`, which calls itself with the path of every `_BASE_`, but a base
    may also be the bare name of one of the package's configs.

    A file of that name beside the file that says `_BASE_` comes first.

    Raises:
        UserError: a base is in no such place.
    """
    derived = _derived.get()
    path = filename if derived is None else _find_base(filename, derived)
    token = _derived.set(path)
    try:
        return super(CfgNode, cls).load_yaml_with_base(path, allow_unsafe=allow_unsafe)
    finally:
        _derived.reset(token)


def keys_of_user(path: str) -> set[str]:
    """The keys that a config file and its bases set, but for those that come with the package.

    Returns:
        With their sections, such as "SOLVER.MAX_ITER".
    """
    if config_folder() in Path(path).parents:
        return set()
    with PathManager.open(path) as file:
        tree = yaml.load(file, yaml.BaseLoader) or {}  # whose values may be of any type
    bases = tree.pop(BASE_KEY, [])
    keys = set(flatten(tree))
    for base in bases if isinstance(bases, list) else [bases]:
        base = os.path.expanduser(base)
        whole = base.startswith("/") or "://" in base
        joined = base if whole else os.path.join(os.path.dirname(path), base)
        keys |= keys_of_user(_find_base(joined, path))
    return keys


def flatten(config: Mapping, prefix: str = "") -> dict[str, object]:
    """The leaves of a nested config by their dotted keys, as plain data."""
    leaves = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = plain(value)
    return leaves


def plain(value: object) -> object:
    """Lists, dicts, texts and numbers alone; of anything else, its name."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


def _find_base(path: str, derived: str) -> str:
    """Where a base lies.

    Args:
        path: its `_BASE_`, joined to the folder of the file that says it.
        derived: that file.
    """
    # A config may have the same name as the one of the package that it builds on.
    if "://" in path or (os.path.isfile(path) and path != derived):
        return path
    folder, name = os.path.split(path)
    configs = {p.name: p for p in _packaged_files() if p.suffix == ".yaml"}
    if folder == os.path.dirname(derived) and name in configs:
        return str(configs[name])
    raise UserError(
        f"config {derived!r}: its _BASE_ {path!r} is neither a file nor the bare name of one of "
        f"the package's; {_hint(name, configs)}"
    )


def _packaged_files() -> list[Path]:
    """The package's configs, and their bases."""
    return [p for p in config_folder().glob("*/*") if p.suffix in (".yaml", ".py")]


def _hint(name: str, configs: Iterable[str]) -> str:
    similar = difflib.get_close_matches(os.path.basename(name), configs, n=4, cutoff=0.5)
    return f"did you mean {', '.join(similar)}?" if similar else f"see {config_folder()}"
