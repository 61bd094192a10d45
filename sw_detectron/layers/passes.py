"""The four passes over the pixels of a feature map that SW's forward and backward consist of.

Shape shorthand in this module:
    N: samples;  C: channels;  H, W: height, width;  L = H * W: pixels of a sample
    g: channel groups;  G = num_pergroup: channels in a group;  C = g * G

Each pass reads x once, in its own memory format, and exchanges only small tensors with the rest:
means (N, g, G) and matrices (N, g, G, G). Where no whitening takes part, a matrix is diagonal and
given as (N, g, G). A first dimension of 1 stands for N equal ones. On a GPU the passes are the
Triton kernels of `kernels`; the code here serves all other cases.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import kernels

# Centred pixels are made and consumed piece by piece, of a size (in values) that stays in a
# core's cache: 1 MB of float32.
_PIECE = 1 << 18


def moments(x: Tensor, num_pergroup: int, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Biased mean and covariance of each sample and group (Eq. 3 without its ε).

    Args:
        x: (N, C, H, W), not empty.
        num_pergroup: G.
        diagonal: compute only the variances.

    Returns:
        mean (N, g, G) and covariance (N, g, G, G), or variance (N, g, G).
    """
    if not diagonal and kernels.available(x, num_pergroup):
        return kernels.moments(x, num_pergroup)
    x = _at_least_float32(x)
    if diagonal:
        variance, mean = torch.var_mean(x, dim=(2, 3), correction=0)
        return mean.unflatten(1, (-1, num_pergroup)), variance.unflatten(1, (-1, num_pergroup))
    shape = (x.shape[0], x.shape[1] // num_pergroup, num_pergroup)
    mean, cov = x.new_empty(shape), x.new_empty(*shape, num_pergroup)
    for pixels, pick in _views(x, num_pergroup):
        _view_moments(pixels, pick(mean), pick(cov))
    return mean, cov


def affine(x: Tensor, center: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """y = A (x - center) + b, at every pixel of each sample and group.

    Args:
        x: (N, C, H, W).
        center: (N, g, G).
        matrix: A, (N, g, G, G), or its diagonal (N, g, G).
        bias: b, (N, g, G).

    Returns:
        y (N, C, H, W), in the dtype and memory format of x.
    """
    n, num_pergroup = x.shape[0], center.shape[-1]
    diagonal = matrix.dim() == 3
    if not diagonal and kernels.available(x, num_pergroup):
        return kernels.affine(x, _repeat(center, n), _repeat(matrix, n), _repeat(bias, n))
    if diagonal:
        scale, shift = _per_channel(matrix), _per_channel(bias - matrix * center)
        return torch.addcmul(shift, _at_least_float32(x), scale).to(x.dtype)
    pixels_in = _at_least_float32(x)
    y = torch.empty_like(pixels_in)
    matrix, bias = _repeat(matrix, n), _repeat(bias - _times(matrix, center), n)
    for (pixels, pick), (out, _) in zip(_views(pixels_in, num_pergroup), _views(y, num_pergroup)):
        torch.baddbmm(pick(bias)[..., None], pick(matrix), pixels, out=out)
    return y.to(x.dtype)


def cross_moments(dy: Tensor, x: Tensor, center: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Sums over the pixels of each sample and group, D = Σ dy (x - center)^T and s = Σ dy.

    Args:
        dy, x: (N, C, H, W).
        center: (N, g, G).
        diagonal: compute only D's diagonal.

    Returns:
        D (N, g, G, G), or its diagonal (N, g, G), and s (N, g, G).
    """
    n, num_pergroup = x.shape[0], center.shape[-1]
    if not diagonal and kernels.available(x, num_pergroup):
        return kernels.cross_moments(dy, x, _repeat(center, n))
    dy, x = _at_least_float32(dy), _at_least_float32(x)
    total = dy.sum(dim=(2, 3)).unflatten(1, (-1, num_pergroup))
    if diagonal:
        product = torch.einsum("nchw,nchw->nc", dy, x).view_as(total)
        return product - total * center, total
    product = total.new_empty(*total.shape, num_pergroup)
    for (pixels, pick), (dy_pixels, _) in zip(_views(x, num_pergroup), _views(dy, num_pergroup, x)):
        torch.bmm(dy_pixels, pixels.mT, out=pick(product))
    return product - total[..., :, None] * center[..., None, :], total


def input_gradient(
    dy: Tensor, x: Tensor, center: Tensor, dy_matrix: Tensor, x_matrix: Tensor | None, bias: Tensor
) -> Tensor:
    """dx = A^T dy + S (x - center) + t, at every pixel of each sample and group.

    Args:
        dy, x: (N, C, H, W).
        center: (N, g, G).
        dy_matrix: A, (N, g, G, G), or its diagonal (N, g, G).
        x_matrix: S, symmetric, in the same form as A; None for zero.
        bias: t, (N, g, G).

    Returns:
        dx (N, C, H, W), in the dtype and memory format of x.
    """
    n, num_pergroup = x.shape[0], center.shape[-1]
    diagonal = dy_matrix.dim() == 3
    if not diagonal and kernels.available(x, num_pergroup):
        x_matrix = torch.zeros_like(dy_matrix) if x_matrix is None else x_matrix
        small = (_repeat(t, n) for t in (center, dy_matrix, x_matrix, bias))
        return kernels.input_gradient(dy, x, *small)
    dtype, dy, x = x.dtype, _at_least_float32(dy), _at_least_float32(x)
    if diagonal:
        if x_matrix is None:
            return torch.addcmul(_per_channel(bias), dy, _per_channel(dy_matrix)).to(dtype)
        shift = _per_channel(bias - x_matrix * center)
        dx = torch.addcmul(shift, x, _per_channel(x_matrix))
        return dx.addcmul_(dy, _per_channel(dy_matrix)).to(dtype)
    if x_matrix is not None:
        bias, x_matrix = bias - _times(x_matrix, center), _repeat(x_matrix, n)
    dx, dy_matrix, bias = torch.empty_like(x), _repeat(dy_matrix, n), _repeat(bias, n)
    views = zip(_views(x, num_pergroup), _views(dy, num_pergroup, x), _views(dx, num_pergroup, x))
    for (pixels, pick), (dy_pixels, _), (out, _) in views:
        torch.baddbmm(pick(bias)[..., None], pick(dy_matrix).mT, dy_pixels, out=out)
        if x_matrix is not None:
            out.baddbmm_(pick(x_matrix), pixels)
    return dx.to(dtype)


def _view_moments(pixels: Tensor, mean: Tensor, cov: Tensor) -> None:
    """Moments of pixels (B, G, L) into mean (B, G) and cov (B, G, G)."""
    if not pixels.numel():
        return
    torch.mean(pixels, dim=-1, out=mean)
    if pixels.device.type == "cpu" and _uncentred_moments(pixels, mean, cov):
        return
    batch, group, length = pixels.shape
    largest = _PIECE if pixels.device.type == "cpu" else pixels.numel()
    step = min(batch, max(1, largest // (group * length)))
    width = length if step > 1 else min(length, max(1, largest // group))
    # Laid out as the pixels are, for copying row by row.
    channels_first = pixels.stride(-1) == 1
    shape = (step, group, width) if channels_first else (step, width, group)
    buffer = pixels.new_empty(shape)
    buffer = buffer if channels_first else buffer.mT
    for i in range(0, batch, step):
        rows, out = pixels[i : i + step], cov[i : i + step]
        shift = mean[i : i + step, :, None]
        for k in range(0, length, width):
            piece = rows[..., k : k + width]
            centred = buffer[: piece.shape[0], :, : piece.shape[-1]]
            torch.sub(piece, shift, out=centred)
            if k == 0:
                torch.bmm(centred, centred.mT, out=out)
            else:
                out.baddbmm_(centred, centred.mT)
    cov.div_(length)


def _uncentred_moments(pixels: Tensor, mean: Tensor, cov: Tensor) -> bool:
    """Covariance as E[xx] - E[x]E[x], which reads the pixels once less than centring them.

    The difference loses as many digits as E[xx] is larger than the variance. Returns whether it
    lost at most one for every channel, as is usual of features; if not, cov is not to be used.
    (Looking at the numbers costs nothing on a CPU, but would stop a GPU.)
    """
    torch.baddbmm(cov, pixels, pixels.mT, beta=0, alpha=1 / pixels.shape[-1], out=cov)
    cov.addcmul_(mean[..., None], mean[..., None, :], value=-1)
    variance = cov.diagonal(dim1=-2, dim2=-1)
    return torch.sub(mean.square(), variance, alpha=9).max().item() <= 0


def _views(
    x: Tensor, num_pergroup: int, like: Tensor | None = None
) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Views (B, G, L) that cover x without a copy, each with what picks its part, (B, …), out of
    a small tensor (N, g, …).

    One view in the contiguous format. In channels_last the two leading dimensions do not merge,
    and there is a view for each sample or for each group, whichever are fewer. The views of
    another tensor go along with those of `like`, whatever its own format.
    """
    like = x if like is None else like
    n, groups = x.shape[0], x.shape[1] // num_pergroup
    if like.is_contiguous():
        x = x.contiguous().view(n * groups, num_pergroup, x.shape[2] * x.shape[3])
        yield x, lambda small: small.flatten(0, 1)
        return
    pixels = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).flatten(1, 2)
    pixels = pixels.unflatten(2, (groups, num_pergroup)).permute(0, 2, 3, 1)  # (N, g, G, L)
    if n < groups:
        for i in range(n):
            yield pixels[i], lambda small, i=i: small[i]
    else:
        for j in range(groups):
            yield pixels[:, j], lambda small, j=j: small[:, j]


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _repeat(small: Tensor, n: int) -> Tensor:
    return small.expand(n, *small.shape[1:])


def _per_channel(small: Tensor) -> Tensor:
    return small.flatten(1)[..., None, None]


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix * vector[..., None, :]).sum(dim=-1)
