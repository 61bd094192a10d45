"""The inverse square root Σ^(-1/2) of symmetric positive definite matrices, and its gradient.

Shapes: every matrix is (..., G, G); leading dimensions are a batch. Gradients with respect to a
symmetric matrix are symmetric.
"""

import torch
from torch import Tensor


def newton_inverse_sqrt(cov: Tensor, num_iterations: int) -> Tensor:
    """Σ^(-1/2) by Newton's iteration, the method of IterNorm and of the paper's Table 5.

    With Σ_N = Σ / tr Σ and P_0 = I,  P_k = (3 P_{k-1} - P_{k-1}^3 Σ_N) / 2,  and the result is
    P_T / sqrt(tr Σ). It is computed in the coupled form with Y_k = P_k Σ_N, which is the same
    sequence in exact arithmetic, but does not amplify rounding errors where Σ is
    ill-conditioned and T is large (Higham, Functions of Matrices, 2008, section 6.7).

    Args:
        cov: (..., G, G), symmetric positive definite.
        num_iterations: T >= 1.

    Returns:
        (..., G, G).
    """
    trace = _trace(cov)
    _, root = _newton_iterates((cov / trace).flatten(0, -3), num_iterations)
    return root.view_as(cov) * trace.rsqrt()


def newton_inverse_sqrt_backward(cov: Tensor, grad: Tensor, num_iterations: int) -> Tensor:
    """The gradient of `newton_inverse_sqrt` with respect to `cov`.

    The iterates are computed again rather than kept. Each is a polynomial of Σ_N, hence symmetric:
    no transpose appears below.

    Args:
        cov: (B, G, G), as given to `newton_inverse_sqrt`.
        grad: (B, G, G), of its result.
        num_iterations: T.

    Returns:
        (B, G, G), symmetric.
    """
    trace = _trace(cov)
    normalized = cov / trace
    iterates, root = _newton_iterates(normalized, num_iterations)
    grad_p = (grad + grad.mT).mul_(0.5 * trace.rsqrt())
    grad_trace = -0.5 * (grad_p * root).sum(dim=(-2, -1), keepdim=True)
    grad_y = None  # Y_T is not used
    for y, p, step in reversed(iterates):  # P' = M P and Y' = Y M with M = (3 I - P Y) / 2
        grad_step = torch.bmm(grad_p, p)
        grad_p = torch.bmm(step, grad_p)
        if grad_y is None:
            grad_y = torch.bmm(p, grad_step).mul_(-0.5)
        else:
            grad_step.baddbmm_(y, grad_y)
            grad_y = torch.bmm(grad_y, step).baddbmm_(p, grad_step, alpha=-0.5)
        grad_p.baddbmm_(grad_step, y, alpha=-0.5)
    if grad_y is None:  # T = 1: P_1 = (3 I - Σ_N) / 2
        grad_normalized = -0.5 * grad_p
    else:  # and Y_1 = Σ_N P_1
        _, first_step, _ = iterates[0]  # M_0 = P_1
        grad_p.baddbmm_(normalized, grad_y)
        grad_normalized = grad_p.baddbmm_(grad_y, first_step, beta=-0.5)
    grad_trace -= (grad_normalized * normalized).sum(dim=(-2, -1), keepdim=True)
    grad_cov = (grad_normalized + grad_normalized.mT).mul_(0.5)
    grad_cov.diagonal(dim1=-2, dim2=-1).add_(grad_trace[..., 0])
    return grad_cov.div_(trace)


def eigh_inverse_sqrt(cov: Tensor, floor: float = 0.0) -> Tensor:
    """Σ^(-1/2) by eigendecomposition (Eq. 4), exact to rounding; differentiable any times.

    Args:
        cov: (..., G, G), symmetric positive definite.
        floor: a lower bound of the eigenvalues known from the outside, such as ε.

    Returns:
        (..., G, G), symmetric.
    """
    return _EighInverseSqrt.apply(cov, floor)


def eigh_inverse_sqrt_forward(cov: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ^(-1/2), and its eigenvalues (..., G) and eigenvectors, for `eigh_inverse_sqrt_backward`."""
    eigenvalues, vectors = torch.linalg.eigh(cov)
    # Eigenvalues under the rounding error of the largest carry no digits and can even come out
    # negative.
    rounding = cov.shape[-1] * torch.finfo(cov.dtype).eps
    smallest = (eigenvalues[..., -1:] * rounding).clamp(min=floor)
    inverse_roots = eigenvalues.maximum(smallest).rsqrt()
    return (vectors * inverse_roots[..., None, :]) @ vectors.mT, inverse_roots, vectors


def eigh_inverse_sqrt_backward(inverse_roots: Tensor, vectors: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `eigh_inverse_sqrt` with respect to `cov`, for equal eigenvalues too.

    The appendix's 1 / (λi - λj) is infinite there. The divided difference of f(λ) = λ^(-1/2) is
    not:  (f(λi) - f(λj)) / (λi - λj) = -1 / (√λi √λj (√λi + √λj)) = -ri² rj² / (ri + rj)  with
    the inverse roots r.
    """
    ri, rj = inverse_roots[..., :, None], inverse_roots[..., None, :]
    difference = -(ri.square() * rj.square()) / (ri + rj)
    grad = (grad + grad.mT) / 2
    return vectors @ (difference * (vectors.mT @ grad @ vectors)) @ vectors.mT


def _trace(cov: Tensor) -> Tensor:
    return cov.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]


def _newton_iterates(
    normalized: Tensor, num_iterations: int
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """(Y_k, P_k, M_k) for k = 1 … T - 1, with the step M_k = (3 I - P_k Y_k) / 2, and P_T.

    Args:
        normalized: Σ_N, (B, G, G).
    """
    size = normalized.shape[-1]
    identity = 1.5 * torch.eye(size, dtype=normalized.dtype, device=normalized.device)
    step = identity - 0.5 * normalized
    y, p = normalized, step  # Y_0 and P_1, as P_0 = I
    iterates = []
    for _ in range(1, num_iterations):
        y = torch.bmm(y, step)
        step = torch.baddbmm(identity, p, y, alpha=-0.5)
        iterates.append((y, p, step))
        p = torch.bmm(step, p)
    return iterates, p


class _EighInverseSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cov: Tensor, floor: float) -> Tensor:
        root, inverse_roots, vectors = eigh_inverse_sqrt_forward(cov, floor)
        ctx.save_for_backward(root, inverse_roots, vectors)
        return root

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        # dW Σ^(1/2) + Σ^(1/2) dW = -W dΣ W for W = Σ^(-1/2): `eigh_inverse_sqrt_backward` in a
        # form that can be differentiated again.
        root, inverse_roots, vectors = ctx.saved_tensors
        grad = (grad + grad.mT) / 2
        z = _Sylvester.apply(root, root @ grad @ root, inverse_roots, vectors)
        return -(root @ z @ root), None


class _Sylvester(torch.autograd.Function):
    """Z with W Z + Z W = G, for W symmetric positive definite with known eigenpairs."""

    @staticmethod
    def forward(ctx, matrix: Tensor, g: Tensor, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
        z = vectors.mT @ g @ vectors / (eigenvalues[..., :, None] + eigenvalues[..., None, :])
        z = vectors @ z @ vectors.mT
        ctx.save_for_backward(matrix, z, eigenvalues, vectors)
        return z

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        matrix, z, eigenvalues, vectors = ctx.saved_tensors
        grad_g = _Sylvester.apply(matrix, grad, eigenvalues, vectors)
        return -(grad_g @ z.mT + z.mT @ grad_g), grad_g, None, None
