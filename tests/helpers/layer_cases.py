"""Layers, feature maps and golden vectors that several files of tests use."""

import itertools

import numpy as np
import torch
from conftest import SHARED

from sw_detectron.layers import STATISTICS, SwitchWhiten2d

SUBSETS = [s for k in range(1, 6) for s in itertools.combinations(STATISTICS, k)]
GOLDEN = sorted((SHARED / "golden").glob("*.npz")) if SHARED.is_dir() else []


def make_layer(num_features, seed=0, dtype=torch.float64, **kwargs):
    """A layer whose parameters and running values are all away from their initial values."""
    torch.manual_seed(seed)
    layer = SwitchWhiten2d(num_features, **kwargs).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        layer.running_mean.normal_()
        noise = torch.randn_like(layer.running_cov)
        layer.running_cov.add_(0.2 * noise @ noise.mT)
    return layer


def correlated(*shape, seed=0, dtype=torch.float64):
    """Features with correlated channels and a mean that differs between samples."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    mixing = torch.randn(shape[1], shape[1], generator=generator, dtype=torch.float64)
    x = torch.einsum("ij,njhw->nihw", mixing / shape[1] ** 0.5, x)
    x = x + torch.randn(shape[0], shape[1], 1, 1, generator=generator, dtype=torch.float64)
    return x.to(dtype)


def load_golden(path, dtype):
    data = np.load(path)
    layer = SwitchWhiten2d(
        data["x"].shape[1],
        int(data["num_pergroup"]),
        [str(s) for s in data["stats"]],
        str(data["whitening"]),
        int(data["num_iterations"]),
        bool(data["tie_weight"]),
        float(data["eps"]),
        float(data["momentum"]),
    ).to(dtype)
    state = {k: torch.from_numpy(data[k]) for k in layer.state_dict() if k in data}
    state |= {k: torch.from_numpy(data[f"{k}_before"]) for k in ("running_mean", "running_cov")}
    layer.load_state_dict(state)
    return data, layer
