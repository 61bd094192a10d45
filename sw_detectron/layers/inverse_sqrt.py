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
    normalized = (cov / trace).flatten(0, -3)
    identity = _three_halves(normalized)
    p = torch.sub(identity, normalized, alpha=0.5)  # P_1, as P_0 = I
    y = torch.bmm(normalized, p)
    for k in range(1, num_iterations):
        # Not baddbmm: it would first write the identity to every matrix.
        step = torch.sub(identity, torch.bmm(p, y), alpha=0.5)
        if k < num_iterations - 1:  # the last Y is not used
            y = torch.bmm(y, step)
        p = torch.bmm(step, p)
    return p.view_as(cov) * trace.rsqrt()


def newton_inverse_sqrt_backward(cov: Tensor, grad: Tensor, num_iterations: int) -> Tensor:
    """The gradient of `newton_inverse_sqrt` with respect to `cov`.

    P_T is a polynomial of the symmetric Σ_N, and the derivative of such a function is its own
    adjoint: the gradient is the change of P_T in the direction of the (symmetric) gradient that
    comes in. So the iteration runs once more, each matrix along with its change d·, and nothing
    of the forward pass is kept.

    Args:
        cov: (B, G, G), as given to `newton_inverse_sqrt`.
        grad: (B, G, G), of its result.
        num_iterations: T.

    Returns:
        (B, G, G), symmetric.
    """
    trace = _trace(cov)
    normalized = cov / trace
    direction = (grad + grad.mT).mul_(0.5 * trace.rsqrt())
    identity = _three_halves(normalized)
    p, dp = torch.sub(identity, normalized, alpha=0.5), direction * -0.5
    y, dy = torch.bmm(normalized, p), torch.bmm(direction, p).baddbmm_(normalized, dp)
    for k in range(1, num_iterations):
        step = torch.sub(identity, torch.bmm(p, y), alpha=0.5)
        dstep = torch.bmm(dp, y).baddbmm_(p, dy).mul_(-0.5)
        if k < num_iterations - 1:
            dy = torch.bmm(dy, step).baddbmm_(y, dstep)
            y = torch.bmm(y, step)
        dp = torch.bmm(step, dp).baddbmm_(dstep, p)
        p = torch.bmm(step, p)
    # Σ_N = Σ / tr Σ, and the result is P_T / sqrt(tr Σ).
    grad_trace = (direction * p).mul_(-0.5).sub_(dp * normalized).sum(dim=(-2, -1))
    grad_cov = (dp + dp.mT).mul_(0.5)  # symmetric but for rounding
    grad_cov.diagonal(dim1=-2, dim2=-1).add_(grad_trace[:, None])
    return grad_cov.div_(trace)


def eigh_inverse_sqrt(cov: Tensor, floor: float = 0.0) -> Tensor:
    """Σ^(-1/2) by eigendecomposition (Eq. 4), exact to rounding; differentiable any times.

    Args:
        cov: (..., G, G), symmetric positive definite.
        floor: a lower bound of the eigenvalues known from the outside, such as ε.

    Returns:
        (..., G, G), symmetric.
    """
    return _EighInverseSqrt.apply(cov, floor)[0]


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


def _three_halves(like: Tensor) -> Tensor:
    """1.5 I, (G, G)."""
    return 1.5 * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


# Written such that torch.func's transformations can take them.


class _EighInverseSqrt(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(cov: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
        return eigh_inverse_sqrt_forward(cov, floor)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx, grad: Tensor, *_) -> tuple[Tensor, None]:
        return _derivative(*ctx.saved_tensors, grad), None

    @staticmethod
    def jvp(ctx, direction: Tensor, _) -> tuple[Tensor, None, None]:
        return _derivative(*ctx.saved_tensors, direction), None, None


def _derivative(root: Tensor, inverse_roots: Tensor, vectors: Tensor, direction: Tensor) -> Tensor:
    """dW for dΣ or, being symmetric, the gradient of Σ for that of W = Σ^(-1/2).

    dW Σ^(1/2) + Σ^(1/2) dW = -W dΣ W: `eigh_inverse_sqrt_backward` in a form that can be
    differentiated again.
    """
    direction = (direction + direction.mT) / 2
    z = _Sylvester.apply(root, root @ direction @ root, inverse_roots, vectors)
    return -(root @ z @ root)


class _Sylvester(torch.autograd.Function):
    """Z with W Z + Z W = G, for W symmetric positive definite with known eigenpairs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, g: Tensor, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
        z = vectors.mT @ g @ vectors / (eigenvalues[..., :, None] + eigenvalues[..., None, :])
        return vectors @ z @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        matrix, _, eigenvalues, vectors = inputs
        ctx.save_for_backward(matrix, output, eigenvalues, vectors)
        ctx.save_for_forward(matrix, output, eigenvalues, vectors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        matrix, z, eigenvalues, vectors = ctx.saved_tensors
        grad_g = _Sylvester.apply(matrix, grad, eigenvalues, vectors)
        return -(grad_g @ z.mT + z.mT @ grad_g), grad_g, None, None

    @staticmethod
    def jvp(ctx, dmatrix: Tensor, dg: Tensor, *_) -> Tensor:
        matrix, z, eigenvalues, vectors = ctx.saved_tensors
        return _Sylvester.apply(matrix, dg - (dmatrix @ z + z @ dmatrix), eigenvalues, vectors)
