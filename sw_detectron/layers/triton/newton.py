"""Parts of kernels: Newton's iteration and its derivative."""

from .common import tl, triton


@triton.jit
def _halves(left, right, K: tl.constexpr):
    """Two factors, K columns and K rows, as the halves of a sum of two products."""
    first, second = tl.split(left.reshape(left.shape[0], 2, K // 2).permute(0, 2, 1))
    upper, lower = tl.split(right.reshape(2, K // 2, right.shape[1]).permute(1, 2, 0))
    return first, upper, second, lower


@triton.jit
def _product(left, right, total=None):
    """left @ right, and + total, of small matrices in true float32."""
    K: tl.constexpr = left.shape[1]
    if total is None:
        total = tl.zeros((left.shape[0], right.shape[1]), dtype=tl.float32)
    if K <= 32:
        return tl.dot(left, right, total, input_precision="ieee")
    else:
        # Factors of 64 columns do not fit the registers: 16 at a time. No thread waits for another
        # here; the barriers keep the compiler from reading a part before its turn.
        a, b, c, d = _halves(left, right, K)
        a0, b0, a1, b1 = _halves(a, b, K // 2)
        c0, d0, c1, d1 = _halves(c, d, K // 2)
        total = tl.dot(a0, b0, total, input_precision="ieee")
        tl.debug_barrier()
        total = tl.dot(a1, b1, total, input_precision="ieee")
        tl.debug_barrier()
        total = tl.dot(c0, d0, total, input_precision="ieee")
        tl.debug_barrier()
        total = tl.dot(c1, d1, total, input_precision="ieee")
        tl.debug_barrier()
        return total


@triton.jit
def newton(normalized, identity, iterates, T: tl.constexpr, SIZE: tl.constexpr):
    """P_T of Newton's iteration P_k = (3 P - P^3 S) / 2 for S = `normalized`, of trace 1.

    It is computed in the coupled form with Y = P S, from P_1 = M_0 on, as P_0 = I:

        Y_k = Y_{k-1} M_{k-1},   M_k = (3 I - P_k Y_k) / 2,   P_{k+1} = M_k P_k,

    the same sequence in exact arithmetic, but one that does not amplify rounding errors where the
    matrix is ill-conditioned and T is large (Higham, Functions of Matrices, 2008, section 6.7).
    Y_k and P_k are kept for k = 1 … T - 1, unless `iterates`, pointers to a tile of SIZE values,
    is None.
    """
    step = 1.5 * identity - 0.5 * normalized
    y = normalized
    p = step
    for k in range(T - 1):
        y = _product(y, step)
        if iterates is not None:
            tl.store(iterates + 2 * k * SIZE, y)
            tl.store(iterates + (2 * k + 1) * SIZE, p)
        step = 1.5 * identity - 0.5 * _product(p, y)
        p = _product(step, p)
    return p


@triton.jit
def newton_backward(normalized, identity, iterates, grad_p, T: tl.constexpr, SIZE: tl.constexpr):
    """The gradient with respect to S, not symmetrized, from that with respect to P_T.

    Transposes are left out: every iterate is symmetric.
    """
    grad_y = tl.zeros_like(normalized)  # Y_T is not used
    for k in range(T - 1):
        y = tl.load(iterates + 2 * (T - 2 - k) * SIZE)
        p = tl.load(iterates + (2 * (T - 2 - k) + 1) * SIZE)
        half = -0.5 * _product(grad_p, p, _product(y, grad_y))
        step = 1.5 * identity - 0.5 * _product(p, y)
        grad_p = _product(half, y, _product(step, grad_p))
        grad_y = _product(p, half, _product(grad_y, step))
    # P_1 = M_0 = (3 I - S) / 2 and Y_1 = S M_0.
    grad_step = _product(normalized, grad_y, grad_p)
    step = 1.5 * identity - 0.5 * normalized
    return _product(grad_y, step, -0.5 * grad_step)
