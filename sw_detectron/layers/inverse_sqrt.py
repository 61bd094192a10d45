"""The inverse square root Σ^(-1/2) of symmetric positive definite matrices, differentiable.

Shapes: every matrix is (..., G, G); leading dimensions are a batch.
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
    trace = cov.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]
    y = cov / trace
    identity = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    step = 1.5 * identity - 0.5 * y
    p = step  # P_1, as P_0 = I
    for _ in range(1, num_iterations):
        y = y @ step
        step = 1.5 * identity - 0.5 * (p @ y)
        p = step @ p
    return p * trace.rsqrt()


class _EighInverseSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cov: Tensor, floor: float) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(cov)
        # Eigenvalues under the rounding error of the largest carry no digits and can even come
        # out negative. `floor` bounds the exact ones from below.
        rounding = cov.shape[-1] * torch.finfo(cov.dtype).eps
        smallest = (eigenvalues[..., -1:] * rounding).clamp(min=floor)
        roots = eigenvalues.maximum(smallest).sqrt()
        ctx.save_for_backward(roots, vectors)
        return (vectors / roots[..., None, :]) @ vectors.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        # f(λ) = λ^(-1/2) has the divided differences
        #   (f(λi) - f(λj)) / (λi - λj) = -1 / (√λi √λj (√λi + √λj)),
        # finite for equal eigenvalues too, where the appendix's 1 / (λi - λj) is not.
        roots, vectors = ctx.saved_tensors
        ri, rj = roots[..., :, None], roots[..., None, :]
        difference = -1 / (ri * rj * (ri + rj))
        grad = (grad + grad.mT) / 2
        return vectors @ (difference * (vectors.mT @ grad @ vectors)) @ vectors.mT, None


def eigh_inverse_sqrt(cov: Tensor, floor: float = 0.0) -> Tensor:
    """Σ^(-1/2) by eigendecomposition (Eq. 4), exact to rounding; its gradient is exact too.

    Args:
        cov: (..., G, G), symmetric positive definite.
        floor: a lower bound of the eigenvalues known from the outside, such as ε.

    Returns:
        (..., G, G), symmetric.
    """
    return _EighInverseSqrt.apply(cov, floor)
