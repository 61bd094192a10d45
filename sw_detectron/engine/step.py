"""One iteration of training: what a task brings of its own if a loss and an optimizer do not do.

A step is a `TrainerBase` whose `run_step` does all of the forward and backward passes and of the
updates. Between the backward passes and the updates it calls `after_backward()`, where hooks change
gradients (the end of the importance weights' training is one). Besides it has

- `model`: what checkpoints save, and what is evaluated;
- `optimizers`: by name, the first of which drives the model; the trainer makes a schedule for each;
- `continue_from(iteration)`: let the training data go on where that iteration begins;
- `state_dict()` and `load_state_dict()`: of all its optimizers and whatever else it changes.
"""

from collections.abc import Iterable

from detectron2.engine import AMPTrainer, SimpleTrainer
from torch import nn
from torch.optim import Optimizer


class SupervisedStep(SimpleTrainer):
    """The sum of the losses that the model returns for a batch, and one optimizer.

    Args:
        model: perhaps in DistributedDataParallel.
        data_loader: of batches; its `resumable_sampler`, if it has one, says where it begins.
        optimizer: over the model's parameters.
        images_per_step: over all processes.
    """

    def __init__(
        self, model: nn.Module, data_loader: Iterable, optimizer: Optimizer, images_per_step: int
    ):
        super().__init__(model, data_loader, optimizer)
        self._images_per_step = images_per_step

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        return {"optimizer": self.optimizer}

    def continue_from(self, iteration: int) -> None:
        # A loader of the user's own may have another sampler.
        sampler = getattr(self.data_loader, "resumable_sampler", None)
        if sampler is not None:
            sampler.start = iteration * self._images_per_step


class MixedPrecisionStep(SupervisedStep, AMPTrainer):
    """The same under autocast, with scaled gradients; on GPUs."""

    def load_state_dict(self, state: dict) -> None:
        # A run may have begun without.
        super().load_state_dict({"grad_scaler": self.grad_scaler.state_dict()} | state)
