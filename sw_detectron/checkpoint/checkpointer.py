"""Detectron2's checkpointer with whole-or-nothing writes and readable errors."""

import dataclasses
import os
from collections.abc import Collection

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from torch import nn

from ..errors import UserError
from ..files import written_whole
from .facts import FACTS_KEY, contradictions, facts_in, facts_of, facts_of_source
from .model_facts import facts_of_model
from .reading import read_file, weights_in
from .run_record import run_record
from .sources import find_backbone, plain_name, without_wrappers
from .writing import save_pth


class Checkpointer(DetectionCheckpointer):
    """A `DetectionCheckpointer` that a killed process cannot leave with a broken checkpoint.

    A classifier's checkpoint (a backbone and a linear layer) gives any other model its backbone.

    Args:
        model, save_dir, kwargs: as in Detectron2.
        cfg: the run's config, which the checkpoints that are loaded are to fit, and which those
            that are saved carry; None if there is none, and the model has to show what it can.
    """

    def __init__(
        self, model: nn.Module, save_dir: str = "", *, cfg: CfgNode | None = None, **kwargs
    ):
        super().__init__(model, save_dir, **kwargs)
        self._cfg = cfg

    def _facts(self) -> dict[str, object]:
        return facts_of_model(self.model) if self._cfg is None else facts_of(self._cfg)

    def save(self, name: str, **kwargs) -> None:
        """Write `name`.pth and, if training can continue from it, the name of the last checkpoint,
        each whole or not at all."""
        if not self.save_dir or not self.save_to_disk:
            return
        data = {"model": self.model.state_dict()}
        data |= {key: value.state_dict() for key, value in self.checkpointables.items()}
        data[FACTS_KEY] = {"config": self._facts()}
        if self._cfg is not None:
            data[FACTS_KEY]["run"] = dataclasses.asdict(run_record(self._cfg))
        path = os.path.join(self.save_dir, f"{name}.pth")
        self.logger.info(f"Saving checkpoint to {path}")
        save_pth(data | kwargs, path)
        if self.checkpointables:
            self.tag_last_checkpoint(f"{name}.pth")

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        with written_whole(os.path.join(self.save_dir, "last_checkpoint")) as unfinished:
            unfinished.write_text(last_filename_basename)

    def load(self, path: str, *args, **kwargs) -> dict:
        """As in Detectron2, but names of torchvision, timm and the like, and those of compiled
        models, are understood, and where the config contradicts what the weights need, a warning
        says so.

        Raises:
            UserError: there is no such file, it cannot be read, or no tensor of it is the model's.
        """
        try:
            return super().load(path, *args, **kwargs)
        except (OSError, AssertionError) as error:
            if isinstance(error, AssertionError) and "not found" not in str(error):
                raise
            reason = "not found"
            if not isinstance(error, (AssertionError, FileNotFoundError)):
                reason = f"cannot be read ({' '.join(str(error).split())})"
            raise UserError(
                f"weights {path!r} {reason}; set MODEL.WEIGHTS to a file, or to '' to train from "
                "scratch"
            ) from None
        finally:
            self._parsed_url_during_load = None  # so that another file can be tried

    def _load_model(self, checkpoint: dict):
        for line in contradictions(facts_in(checkpoint), self._facts()):
            self.logger.warning(line)
        own_names = self.model.state_dict().keys()
        if not _is_classifier(checkpoint["model"]) or _is_classifier(own_names):
            return super()._load_model(checkpoint)
        # An FPN holds the network that was pretrained as its bottom_up.
        fpn = any(name.startswith("backbone.bottom_up.") for name in own_names)
        prefix = "backbone.bottom_up." if fpn else "backbone."
        checkpoint["model"] = {
            prefix + key.removeprefix("backbone."): value
            for key, value in checkpoint["model"].items()
            if key.startswith("backbone.")
        }
        num_tensors = len(checkpoint["model"])
        incompatible = super()._load_model(checkpoint)
        own = [key for key in incompatible.missing_keys if not key.startswith(prefix)]
        self.logger.info(
            f"A classifier's checkpoint: its backbone, {num_tensors} tensors, is now "
            f"{prefix[:-1]}; the {len(own)} other tensors of the model start as they are"
        )
        # No surprises, so no warnings: the detector's own layers, and FrozenBN's lack of a counter.
        incompatible.missing_keys[:] = [k for k in incompatible.missing_keys if k not in own]
        incompatible.unexpected_keys[:] = [
            k for k in incompatible.unexpected_keys if not k.endswith(".num_batches_tracked")
        ]
        return incompatible

    def _load_file(self, filename: str) -> dict:
        """As in Detectron2, but no code in the file is run."""
        if not filename.endswith(".pkl"):
            return self._renamed(super()._load_file(filename), filename)
        data = read_file(filename)
        weights, _ = weights_in(data, filename)
        if "model" in data and "__author__" in data:
            return self._renamed(data | {"model": weights}, filename)
        weights = {name: value for name, value in weights.items() if not name.endswith("_momentum")}
        return {
            "model": weights,
            "__author__": "Caffe2",
            "matching_heuristics": True,
            FACTS_KEY: {"config": facts_of_source(weights)},
        }

    def _torch_load(self, f: str) -> dict:
        contents = read_file(f)
        weights, _ = weights_in(contents, f)
        # What others put beside their "state_dict" is not for this package's trainer.
        return (contents if "model" in contents else {}) | {"model": weights}

    def _renamed(self, checkpoint: dict, filename: str) -> dict:
        """The checkpoint with the model's names for its tensors.

        Raises:
            UserError: none of them is the model's.
        """
        own_names = {plain_name(name): name for name in self.model.state_dict()}
        try:
            weights = without_wrappers(checkpoint["model"])
            checkpoint["model"] = {own_names.get(n, n): tensor for n, tensor in weights.items()}
            if checkpoint.get("matching_heuristics") or _is_classifier(weights):
                return checkpoint
            # A classifier's last layer may be the only one that has the same name everywhere.
            foreign = "layer1.0.conv1.weight" in weights.keys() - own_names.keys()
            if own_names.keys() & weights.keys() and not foreign:
                return checkpoint
            backbone = find_backbone(weights)
        except UserError as error:
            raise UserError(f"{filename!r} does not fit this model: {error}") from None
        checkpoint["model"] = {backbone.prefix + n: t for n, t in backbone.weights.items()}
        checkpoint["model"] |= backbone.heads
        facts = {FACTS_KEY: {"config": facts_of_source(weights)}}
        return facts | checkpoint | {"matching_heuristics": True}


def _is_classifier(names: Collection[str]) -> bool:
    """Whether they are the tensors of a linear layer and a backbone without FPN, and no others."""
    return "linear.weight" in names and all(
        name.startswith(("backbone.", "linear.")) and not name.startswith("backbone.bottom_up.")
        for name in names
    )
