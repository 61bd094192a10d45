"""The four passes over the pixels of a feature map that SW's forward and backward consist of.

Shape shorthand in this module:
    N: samples;  C: channels;  H, W: height, width;  L = H * W: pixels of a sample
    g: channel groups;  G = num_pergroup: channels in a group;  C = g * G

Each pass reads x once, in its own memory format, and exchanges only small tensors with the rest:
means (N, g, G) and matrices (N, g, G, G). Where no whitening takes part, a matrix is diagonal and
given as (N, g, G). A first dimension of 1 stands for N equal ones.
"""

import math

import torch
from torch import Tensor

from ..padding import Extent

# Centred pixels are made and consumed piece by piece, of a size (in values) that stays in a
# core's cache: 1 MB of float32.
_PIECE = 1 << 18

# In channels_last, the columns of one matrix product: groups are taken together up to this number,
# as one block-diagonal matrix. The zeros cost less than columns too few for a core's registers.
_COLUMNS = 32


def moments(
    x: Tensor, num_pergroup: int, diagonal: bool, extent: Extent | None = None
) -> tuple[Tensor, Tensor]:
    """Biased mean and covariance of each sample and group (Eq. 3 without its ε).

    Args:
        x: (N, C, H, W); N may be 0.
        num_pergroup: G.
        diagonal: compute only the variances.
        extent: the pixels that are taken; None for all. Of none, all moments are zero.

    Returns:
        mean (N, g, G) and covariance (N, g, G, G), or variance (N, g, G).
    """
    if extent is not None:
        inside = (image[:, :, :h, :w] for image, (h, w) in zip(x.split(1), extent.sides))
        parts = [moments(_dense(image, x), num_pergroup, diagonal) for image in inside]
        mean, cov = (torch.cat(part) for part in zip(*parts))
        return mean, cov
    x = _at_least_float32(x)
    if not x.numel():  # var_mean would warn, and there are no pieces to take
        shape = (x.shape[0], x.shape[1] // num_pergroup, num_pergroup)
        return x.new_zeros(shape), x.new_zeros(shape if diagonal else (*shape, num_pergroup))
    if diagonal:
        variance, mean = torch.var_mean(x, dim=(2, 3), correction=0)
        return mean.unflatten(1, (-1, num_pergroup)), variance.unflatten(1, (-1, num_pergroup))
    mean = x.mean(dim=(2, 3)).unflatten(1, (-1, num_pergroup))
    # Looking at the numbers costs nothing on a CPU, but would stop a GPU.
    cov = _uncentred_covariance(x, mean) if x.device.type == "cpu" else None
    return mean, _centred_covariance(x, mean) if cov is None else cov


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
    if matrix.dim() == 3:
        scale, shift = _per_channel(matrix), _per_channel(bias - matrix * center)
        return torch.addcmul(shift, _at_least_float32(x), scale).to(x.dtype)
    bias = bias - _times(matrix, center)
    pixels = _at_least_float32(x)
    return _transform(pixels, bias, (matrix, pixels)).to(x.dtype)


def cross_moments(dy: Tensor, x: Tensor, center: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Sums over the pixels of each sample and group, D = Σ dy (x - center)^T and s = Σ dy.

    Args:
        dy, x: (N, C, H, W).
        center: (N, g, G).
        diagonal: compute only D's diagonal.

    Returns:
        D (N, g, G, G), or its diagonal (N, g, G), and s (N, g, G).
    """
    num_pergroup = center.shape[-1]
    dy, x = _at_least_float32(dy), _at_least_float32(x)
    total = dy.sum(dim=(2, 3)).unflatten(1, (-1, num_pergroup))
    if diagonal:
        product = torch.einsum("nchw,nchw->nc", dy, x).view_as(total)
        return product - total * center, total
    product = _products(dy, x, num_pergroup)
    return product.sub_(total[..., :, None] * center[..., None, :]), total


def input_gradient(
    dy: Tensor,
    x: Tensor,
    center: Tensor,
    dy_matrix: Tensor,
    x_matrix: Tensor | None,
    bias: Tensor,
    extent: Extent | None = None,
) -> Tensor:
    """dx = A^T dy + S (x - center) + t, at every pixel of each sample and group.

    Args:
        dy, x: (N, C, H, W).
        center: (N, g, G).
        dy_matrix: A, (N, g, G, G), or its diagonal (N, g, G).
        x_matrix: S, symmetric, in the same form as A; None for zero.
        bias: t, (N, g, G).
        extent: where S and t are not zero; None for everywhere.

    Returns:
        dx (N, C, H, W), in the dtype and memory format of x.
    """
    if extent is not None:
        dx = input_gradient(dy, x, center, dy_matrix, x_matrix, bias)
        nothing = torch.zeros_like(bias[:1])
        matrices = _repeat(dy_matrix, len(x)).split(1)
        for i, (matrix, (rows, columns)) in enumerate(zip(matrices, extent.sides)):
            image = slice(i, i + 1), slice(None)
            below = *image, slice(rows, None)
            beside = *image, slice(rows), slice(columns, None)
            for place in (below, beside):
                padding = (_dense(t[place], x) for t in (dy, x))
                dx[place] = input_gradient(*padding, center, matrix, None, nothing)
        return dx
    dtype, dy, x = x.dtype, _at_least_float32(dy), _at_least_float32(x)
    if dy_matrix.dim() == 3:
        if x_matrix is None:
            return torch.addcmul(_per_channel(bias), dy, _per_channel(dy_matrix)).to(dtype)
        shift = _per_channel(bias - x_matrix * center)
        dx = torch.addcmul(shift, x, _per_channel(x_matrix))
        return dx.addcmul_(dy, _per_channel(dy_matrix)).to(dtype)
    terms = [(dy_matrix.mT, dy)]
    if x_matrix is not None:
        terms.append((x_matrix, x))
        bias = bias - _times(x_matrix, center)
    return _transform(x, bias, *terms).to(dtype)


def _uncentred_covariance(x: Tensor, mean: Tensor) -> Tensor | None:
    """E[xx] - E[x]E[x], which reads the pixels once less than centring them.

    The difference loses as many digits as E[xx] is larger than the variance. It is returned if it
    lost at most one for every channel, as is usual of features; if not, None is.
    """
    cov = _products(x, x, mean.shape[-1]).div_(x.shape[2] * x.shape[3])
    cov.addcmul_(mean[..., None], mean[..., None, :], value=-1)
    variance = cov.diagonal(dim1=-2, dim2=-1)
    return cov if (torch.sub(mean.square(), variance, alpha=9) <= 0).all() else None


def _centred_covariance(x: Tensor, mean: Tensor) -> Tensor:
    """E[(x - E[x]) (x - E[x])ᵀ]."""
    n, channels, height, width = x.shape
    largest = _PIECE if x.device.type == "cpu" else x.numel()
    samples = min(n, max(1, largest // (channels * height * width)))
    rows = height if samples > 1 else min(height, max(1, largest // (channels * width)))
    cov = mean.new_zeros(*mean.shape, mean.shape[-1])
    for i in range(0, n, samples):
        some = slice(i, i + samples)
        for piece in x[some].split(rows, dim=2):
            centred = piece - _per_channel(mean[some])  # dense, in the format of x
            cov[some] += _products(centred, centred, mean.shape[-1])
    return cov.div_(height * width)


def _products(a: Tensor, b: Tensor, num_pergroup: int) -> Tensor:
    """Σ a bᵀ over the pixels of each sample and group, (N, g, G, G); a takes the format of b."""
    if b.is_contiguous():
        products = torch.bmm(_planes(a, num_pergroup), _planes(b, num_pergroup).mT)
        return products.unflatten(0, (b.shape[0], b.shape[1] // num_pergroup))
    groups = zip(_pixels(a).split(num_pergroup, dim=2), _pixels(b).split(num_pergroup, dim=2))
    return torch.stack([torch.bmm(a_j.mT, b_j) for a_j, b_j in groups], dim=1)


def _transform(like: Tensor, bias: Tensor, *terms: tuple[Tensor, Tensor]) -> Tensor:
    """b + Σ M x over the terms (M, x), at every pixel of each sample and group.

    Args:
        like: (N, C, H, W), of the result's format.
        bias: b, (N or 1, g, G).
        terms: M (N or 1, g, G, G) and x (N, C, H, W).
    """
    n, groups, num_pergroup = len(like), *bias.shape[1:]
    out, bias = torch.empty_like(like), _repeat(bias, n)
    matrices = [_repeat(matrix, n) for matrix, _ in terms]
    if like.is_contiguous():
        planes = _planes(out, num_pergroup)
        total = bias.flatten(0, 1)[..., None]
        for matrix, (_, x) in zip(matrices, terms):
            factors = matrix.flatten(0, 1), _planes(x, num_pergroup)
            total = torch.baddbmm(total, *factors, out=planes)
        return out
    joined = math.gcd(groups, max(1, _COLUMNS // num_pergroup))
    columns = joined * num_pergroup
    wide = [_block_diagonal(matrix, joined).mT for matrix in matrices]
    pixels = [_pixels(x).split(columns, dim=2) for _, x in terms]
    shift = bias.flatten(1)[:, None].split(columns, dim=2)
    product = like.new_empty(n, like.shape[2] * like.shape[3], columns)
    for j, part in enumerate(_pixels(out).split(columns, dim=2)):
        for k in range(len(terms)):
            torch.baddbmm(product, pixels[k][j], wide[k][:, j], beta=min(k, 1), out=product)
        torch.add(product, shift[j], out=part)
    return out


def _block_diagonal(matrix: Tensor, joined: int) -> Tensor:
    """Matrices (N, g, G, G) as (N, g / joined, joined * G, joined * G) with zeros between them."""
    n, groups, size, _ = matrix.shape
    blocks = matrix.new_zeros(n, groups // joined, joined, size, joined, size)
    blocks.diagonal(dim1=2, dim2=4).copy_(matrix.unflatten(1, (-1, joined)).movedim(2, -1))
    return blocks.flatten(4, 5).flatten(2, 3)


def _planes(x: Tensor, num_pergroup: int) -> Tensor:
    """(N * g, G, L); a view if x is contiguous."""
    n, channels, height, width = x.shape
    return x.contiguous().view(n * (channels // num_pergroup), num_pergroup, height * width)


def _pixels(x: Tensor) -> Tensor:
    """(N, L, C); a view if x is channels_last."""
    return x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).flatten(1, 2)


def _dense(part: Tensor, like: Tensor) -> Tensor:
    """A part of a map as a map of its own, in the format of another one."""
    last = not like.is_contiguous()
    return part.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _repeat(small: Tensor, n: int) -> Tensor:
    return small.expand(n, *small.shape[1:])


def _per_channel(small: Tensor) -> Tensor:
    return small.flatten(1)[..., None, None]


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix * vector[..., None, :]).sum(dim=-1)
