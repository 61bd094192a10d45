"""The Switchable Whitening layer."""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .functional import WHITENING_METHODS, switch_whiten
from .mixing import OF_BATCH, OF_SAMPLE, STATISTICS, WHITENING
from .padding import PADDINGS, Extent, current_sizes


class SwitchWhiten2d(nn.Module):
    """Switchable Whitening over (N, C, H, W) features (Pan et al., ICCV 2019, Eqs. 5 and 6).

    Each sample is whitened, in consecutive groups of `num_pergroup` channels, with a mixture of
    mean and covariance statistics. The mixing ratios are the softmax of importance weights that
    are learned with the network. The statistics:

    ====  =====================================  ========================================
    name  mean and (biased) covariance over      used in evaluation
    ====  =====================================  ========================================
    bw    all pixels of the batch                the running values
    iw    the pixels of each sample              the same as in training
    bn    as bw, only the covariance's diagonal  the running values
    in    as iw, only the covariance's diagonal  the same as in training
    ln    all pixels and channels of a sample    the same as in training
    ====  =====================================  ========================================

    {"bn"}, {"in"} and {"ln"} alone are BatchNorm2d, InstanceNorm2d and GroupNorm(1, C).

    Args:
        num_features: C, the channels of the input.
        num_pergroup: G, the channels that are whitened together; divides C.
        statistics: a non-empty subset of ("bw", "iw", "bn", "in", "ln"), in any order.
        whitening: how the inverse square root of the covariance is taken: "newton" (iterative,
            fast) or "eigh" (eigendecomposition, exact). Of no effect if the set has neither "bw"
            nor "iw".
        num_iterations: T of Newton's iteration.
        tie_weight: use the mean's importance weights for the covariance too.
        eps: ε > 0, added to the diagonal of the mixed covariance.
        momentum: the share of the current batch in the running statistics.
        affine: learn a scale γ and a shift β per channel.
        sync: take "bw" and "bn" over the batch of all ranks of `process_group` while training:
            exactly, as if one process had all their pixels, whatever number and size of images
            each rank has. Every rank must then call the layer the same number of times, and
            backward through it as often; a rank without data calls it with N = 0.
        process_group: the ranks to synchronize over; None for all of them.
        padding: one of `padding.PADDINGS`. But for "counted", statistics are those of the pixels
            that belong to images, where `padding.image_sizes` says their sizes; all pixels are
            whitened.

    Parameters and buffers: `weight` and `bias` (C,), `sw_mean_weight` and `sw_var_weight` (K,)
    for K statistics (`sw_var_weight` is None if tied), `running_mean` (g, G, 1) and `running_cov`
    (g, G, G) with g = C / G. Names and shapes are those of the paper authors' checkpoints.

    Attributes:
        name: in the network, for errors; empty if nobody has said it.

    Raises:
        ValueError: an argument is out of its range, or the input is not (N, C, H, W).
        FloatingPointError: the input has values that are not finite, and `whitening` is "eigh".
            Newton's iteration hands these on, as BN does; running values stay as they were in
            either case.
    """

    name = ""

    def __init__(
        self,
        num_features: int,
        num_pergroup: int = 16,
        statistics: Sequence[str] = ("bw", "iw"),
        whitening: str = "newton",
        num_iterations: int = 5,
        tie_weight: bool = False,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        padding: str = "counted",
    ):
        super().__init__()
        if num_pergroup < 1 or num_features < 1 or num_features % num_pergroup:
            raise ValueError(
                f"num_features ({num_features}) must be a positive multiple of num_pergroup "
                f"({num_pergroup})"
            )
        if isinstance(statistics, str):
            raise ValueError(f'statistics must be a sequence such as ("{statistics}",)')
        unknown = [name for name in statistics if name not in STATISTICS]
        if unknown or not statistics or len(set(statistics)) < len(statistics):
            raise ValueError(
                f"statistics must be distinct names out of {STATISTICS}, at least one; "
                f"got {tuple(statistics)}"
            )
        if whitening not in WHITENING_METHODS:
            raise ValueError(f"whitening must be one of {WHITENING_METHODS}, got {whitening!r}")
        if num_iterations < 1:
            raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        if momentum is None or not 0 <= momentum <= 1:
            raise ValueError(
                f"momentum must be a number in [0, 1], got {momentum}; a cumulative average, which "
                "None asks of BatchNorm2d, is not implemented"
            )
        if padding not in PADDINGS:
            raise ValueError(f"padding must be one of {PADDINGS}, got {padding!r}")

        self.num_features = num_features
        self.num_pergroup = num_pergroup
        self.statistics = tuple(name for name in STATISTICS if name in statistics)
        self.whitening = whitening
        self.num_iterations = num_iterations
        self.tie_weight = tie_weight
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.sync = sync
        self.process_group = process_group
        self.padding = padding
        self.frozen = False

        num_groups = num_features // num_pergroup
        num_statistics = len(self.statistics)
        self.weight = nn.Parameter(torch.empty(num_features)) if affine else None
        self.bias = nn.Parameter(torch.empty(num_features)) if affine else None
        self.sw_mean_weight = nn.Parameter(torch.empty(num_statistics))
        self.sw_var_weight = None if tie_weight else nn.Parameter(torch.empty(num_statistics))
        self.register_buffer("running_mean", torch.empty(num_groups, num_pergroup, 1))
        self.register_buffer("running_cov", torch.empty(num_groups, num_pergroup, num_pergroup))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """γ = 1, β = 0, uniform importance weights, running mean 0 and covariance I."""
        if self.affine:
            self.weight.fill_(1)
            self.bias.fill_(0)
        self.sw_mean_weight.fill_(1)
        if self.sw_var_weight is not None:
            self.sw_var_weight.fill_(1)
        self.running_mean.zero_()
        self.running_cov.copy_(torch.eye(self.num_pergroup))

    def freeze(self) -> "SwitchWhiten2d":
        """Stop learning for good: running statistics in training too, no update, no gradient.

        The counterpart of turning a BatchNorm2d into a FrozenBatchNorm2d.
        """
        self.frozen = True
        return self.requires_grad_(False)

    @property
    def uses_batch(self) -> bool:
        """Some statistic is that of the batch, in evaluation the running one: "bw" or "bn"."""
        return not OF_BATCH.isdisjoint(self.statistics)

    @property
    def uses_sample(self) -> bool:
        """Some statistic is that of each sample: "iw", "in" or "ln"."""
        return not OF_SAMPLE.isdisjoint(self.statistics)

    @property
    def whitens(self) -> bool:
        """Some statistic is a whole covariance, not only its diagonal: "bw" or "iw"."""
        return not WHITENING.isdisjoint(self.statistics)

    def importance(self) -> dict[str, dict[str, float]]:
        """The mixing ratios: {"mean": {"bw": ω_bw, …}, "cov": {"bw": ω'_bw, …}}."""
        var_weight = self.sw_mean_weight if self.sw_var_weight is None else self.sw_var_weight
        return {
            kind: dict(zip(self.statistics, weight.detach().float().softmax(0).tolist()))
            for kind, weight in (("mean", self.sw_mean_weight), ("cov", var_weight))
        }

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.num_features:
            raise ValueError(
                f"expected an input of shape (N, {self.num_features}, H, W), got {tuple(x.shape)}"
            )
        training = self.training and not self.frozen
        try:
            return switch_whiten(
                x,
                self.weight,
                self.bias,
                self.sw_mean_weight,
                self.sw_var_weight,
                self.running_mean,
                self.running_cov,
                statistics=self.statistics,
                num_pergroup=self.num_pergroup,
                training=training,
                momentum=self.momentum,
                eps=self.eps,
                whitening=self.whitening,
                num_iterations=self.num_iterations,
                group=self._ranks() if training else None,
                extent=self.extent(x),
            )
        except torch.linalg.LinAlgError as error:
            if x.isfinite().all():
                raise
            name = self.name or str(self)
            raise FloatingPointError(f"the input of {name} is not finite") from error

    def extent(self, x: Tensor) -> Extent | None:
        """What of an input counts in its statistics; None for all pixels."""
        sizes = None if self.padding == "counted" else current_sizes()
        return None if sizes is None else sizes.extent(x)

    @torch.no_grad()
    def __prepare_scriptable__(self) -> torch.jit.ScriptModule:
        """What torch.jit.script takes in the place of this layer of a model: its trace, which holds
        for every N, H and W, but for evaluation alone.

        Raises:
            RuntimeError: the layer would use the statistics of the batch.
        """
        if self.training and not self.frozen:
            raise RuntimeError("SwitchWhiten2d can be scripted in evaluation only: call eval()")
        return torch.jit.trace(self, self.running_mean.new_zeros(2, self.num_features, 4, 4))

    def _apply(self, fn: Callable, recurse: bool = True) -> "SwitchWhiten2d":
        """Moves and casts, but leaves running values float32 at least.

        A covariance rounded to 16 bits is in general not positive definite any more.
        """
        before = {name: getattr(self, name) for name in ("running_mean", "running_cov")}
        super()._apply(fn, recurse)
        for name, value in before.items():
            after = getattr(self, name)
            if torch.finfo(after.dtype).bits < 32:
                setattr(self, name, value.to(after.device))
        return self

    def __deepcopy__(self, memo: dict) -> "SwitchWhiten2d":
        """A copy is synchronized over the same ranks: a group of processes cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def _ranks(self) -> dist.ProcessGroup | None:
        """The group to synchronize over; None if this process is alone in it."""
        if not (self.sync and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def extra_repr(self) -> str:
        text = f"{self.num_features}, num_pergroup={self.num_pergroup}"
        text += f", statistics={self.statistics}"
        if self.whitens:
            text += f", whitening={self.whitening!r}"
            if self.whitening == "newton":
                text += f", num_iterations={self.num_iterations}"
        defaults = {"tie_weight": False, "affine": True, "sync": True, "padding": "counted"}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)!r}"
        return text + f", eps={self.eps}, momentum={self.momentum}" + ", frozen" * self.frozen
