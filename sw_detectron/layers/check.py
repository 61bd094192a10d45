"""Whether the kernels compute the same as plain PyTorch, on a device and for a kind of call.

They are compiled for whatever GPU there is, by whatever version of Triton is installed; so they are
tried on a small problem before anything is left to them.
"""

import torch
from torch import Tensor

from . import plain, triton
from .options import Options, Parameters, Running
from .padding import Extent

# Errors relative to the largest value, of the same computation by other operations in float32:
# some hundred roundings of 6e-8, amplified by the inverse root.
_TOLERANCE = 1e-3


def disagreement(x: Tensor, options: Options, padded: bool = False) -> str | None:
    """What speaks against the kernels for calls like this one; None if nothing does.

    Args:
        x: (N, C, H, W), of whose dtype, memory format and device the small problem is.
        padded: whether calls have an extent.
    """
    try:
        with torch.no_grad(), plain.without_autocast(x):
            return _disagreement(x, options, Extent(((16, 9), (5, 65))) if padded else None)
    except Exception as error:  # whatever Triton, a compiler or a driver may raise
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _disagreement(x: Tensor, options: Options, extent: Extent | None) -> str | None:
    reason = _compare(x, options, extent)
    if reason is not None or not x.is_cuda:
        return reason
    # The second time launches go straight to the compiled kernels.
    try:
        reason = _compare(x, options, extent)
    except Exception:
        reason = "launches that Triton does not make fail"
    if reason is not None:
        triton.start_as_triton_does()
        reason = _compare(x, options, extent)
    return reason


def _compare(like: Tensor, options: Options, extent: Extent | None) -> str | None:
    options = options._replace(group=None, training=True)
    # Most maps of networks have the same strides modulo 16, so that kernels that are compiled
    # here serve them too. A sample has more pixels than one chunk, for any G.
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2 * options.num_pergroup, 16, 65)
    last = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    memory_format = torch.channels_last if last else torch.contiguous_format
    x, dy = (
        torch.randn(shape, generator=generator)
        .to(like.device, like.dtype)
        .contiguous(memory_format=memory_format)
        for _ in range(2)
    )
    k = len(options.statistics)
    parameters = Parameters(
        *(torch.linspace(0.5, 1.5, n, device=like.device) for n in (shape[1], shape[1], k, k))
    )
    results = []
    for backend in (plain, triton):
        running = Running(
            torch.zeros(2, options.num_pergroup, 1, device=like.device),
            torch.eye(options.num_pergroup, device=like.device).repeat(2, 1, 1),
        )
        y, kept, extra = backend.forward(x, parameters, running, options, extent)
        gradients = backend.backward(dy, x, parameters, list(kept), extra, options, True, extent)
        evaluating = options._replace(training=False)
        y_evaluated = backend.forward(x, parameters, running, evaluating, extent)[0]
        results.append([y, y_evaluated, *running, *gradients])
    names = ("y", "y in evaluation", "running mean", "running covariance")
    names += ("gradient of x", "gradient of γ")
    names += ("gradient of β", "gradient of λ", "gradient of λ'")
    tolerance = max(_TOLERANCE, 2 * torch.finfo(like.dtype).eps)
    # All are compared on the device, and waited for once. An error of the importance weights'
    # gradients is one of the terms of a difference, as large as the others' gradients.
    scales = torch.stack([expected.abs().max().float() for expected in results[0]])
    scales[-2:] = scales.max()
    errors = torch.stack(
        [
            (actual.float() - expected.float()).abs().max()
            for actual, expected in zip(results[1], results[0])
        ]
    )
    for name, error, scale in zip(names, errors.tolist(), scales.tolist()):
        if not error <= tolerance * scale:
            return f"{name} differs by {error:.2g} of {scale:.2g}"
    return None
